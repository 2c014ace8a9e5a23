"""Log-probs and entropy of a head on the CPU: values and gradients of every option, bugs that shipped elsewhere.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import math

import pytest
import torch
from heads import check, random_head, run_logprob, truth, weighted

from fastgrpo.kernel_checks.cases import error
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import launch

EVERYTHING = {"bias": True, "temperature": "row", "softcap": 5.0, "scale": 3.0}
RAGGED, ROW, TILES = (37, 24, 101), (1, 16, 33), (16, 19, 64)  # the last: whole tiles, a depth that no bulk copy takes


@pytest.mark.parametrize(
    ("shape", "options"), [(RAGGED, {}), (RAGGED, EVERYTHING), (ROW, EVERYTHING), (TILES, {"softcap": 5.0})], ids=str
)
def test_logprob_in_fp32(shape, options):
    head = random_head(*shape, **options)
    for entropy in (False, True):
        check(run_logprob(head, entropy=entropy), head, weighted(head, entropy))


def test_sums_over_many_vocabulary_tiles():
    """A real vocabulary has hundreds of tiles, more than one step of the sum reads."""
    tiles = torch.rand(2 * launch.REDUCE_TILES + 3, 40)
    torch.testing.assert_close(head_kernels.reduce_fwd(tiles), tiles.sum(0), rtol=1e-5, atol=0)


def test_logprob_by_chunks():
    head = random_head(70, 16, 50, bias=True)
    check(run_logprob(head, chunk_rows=16), head, weighted(head))


@pytest.mark.parametrize("scale", (20, 60))
def test_targets_far_below_the_rest(scale):
    """Both guarded passes: rows 60 to 1,000 nats from the anchor beside ordinary rows of the same block."""
    head = random_head(40, 16, 100)
    head.hidden[[3, 17, 39]] *= scale
    z = head.hidden @ head.weight.T
    head.targets[[3, 39]] = z[[3, 39]].argmin(-1)  # least likely
    head.targets[17] = z[17].argmax()  # 60 nats above the rest: logp is -log1p of nearly nothing
    ours = run_logprob(head)
    check(ours, head, weighted(head))
    assert truth(head, weighted(head))["logps"].min() < -60
    # full relative precision of a confident token, that log-softmax cannot have
    others = z[17].double() - z[17].double().max()
    others[head.targets[17]] = -math.inf
    assert ours["logps"][17].item() == pytest.approx(-others.exp().sum().log1p().item(), rel=1e-4)


@pytest.mark.parametrize("target", (True, False))
def test_one_logit_60_nats_above(target):
    head = random_head(20, 16, 50, bias=True)
    head.bias[7] += 60
    head.targets[:] = 7 if target else 9
    ours = run_logprob(head, entropy=False)
    z = head.hidden.double() @ head.weight.double().T + head.bias.double()
    others = z.clone()
    others[:, head.targets[0]] = -math.inf
    rest = (others - z[:, head.targets[0], None]).exp().sum(-1)
    torch.testing.assert_close(ours["logps"].double(), -rest.log1p(), rtol=1e-5, atol=0 if target else 1e-4)
    dz = -z.softmax(-1)
    dz[:, head.targets[0]] = rest / (1 + rest)  # 1 - p_t: the difference has no digit left even in fp64
    dz *= head.grad_logps[:, None].double()
    assert error("weight", ours["weight"], dz.T @ head.hidden.double()) < 1e-4
    assert error("hidden", ours["hidden"], dz @ head.weight.double()) < 1e-4


def test_a_bad_target_poisons_only_its_row():
    head = random_head(20, 16, 50)
    for bad in (-1, 50, -100):
        targets = head.targets.clone()
        targets[5] = bad
        logps, _ = head_kernels.linear_logprob(head.hidden, head.weight, targets)
        assert logps.isnan().nonzero().flatten().tolist() == [5]


def test_strides_and_retain_graph():
    """A slice of a wider hidden, a transposed weight; torch calls one row contiguous whatever its stride."""
    head = random_head(37, 16, 50)
    wide = torch.randn(37, 40)
    wide[:, 8:24] = head.hidden
    straight = run_logprob(head)
    hidden, weight = wide[:, 8:24].requires_grad_(), head.weight.T.contiguous().T.requires_grad_()
    logps, h = head_kernels.linear_logprob(hidden, weight, head.targets, return_entropy=True)
    loss = weighted(head)(logps, h)
    grads = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(logps, straight["logps"])
    torch.testing.assert_close(grads[0], straight["hidden"])
    torch.testing.assert_close(grads[1], straight["weight"])
    assert all(map(torch.equal, grads, torch.autograd.grad(loss, (hidden, weight))))
    row = torch.randn(16).as_strided((1, 16), (0, 1))  # bulk copies refuse a pitch of 0
    assert launch.rows_contiguous(row).stride() == (16, 1) and torch.equal(launch.rows_contiguous(row), row)
    assert launch.rows_contiguous(torch.randn(16, 1).T).stride() == (16, 1)
    assert launch.rows_contiguous(wide[:, 8:24]).stride() == (40, 1)


def test_row_offsets_pass_2_to_the_31():
    """Three rows, 2^30 elements apart: 4 GB of address space, of which a few pages are touched."""
    head = random_head(3, 16, 50, torch.float16)
    far = torch.empty_strided((3, 16), (2**30, 1), dtype=torch.float16)
    far.copy_(head.hidden)
    near, _ = head_kernels.linear_logprob(head.hidden, head.weight, head.targets)
    assert torch.equal(head_kernels.linear_logprob(far, head.weight, head.targets)[0], near)
    exps = torch.empty_strided((3, 50), (2**30, 1), dtype=torch.float16)
    rows, _ = head_kernels.linear_logprob_fwd(
        head.hidden, head.weight, None, head.targets, 1.0, None, None, False, False, 64, None
    )
    stats = head_kernels.RowStats(*rows).normalized()
    plain_head = head_kernels.Head(head.hidden, head.weight, None, head.targets, 1.0, None, None).checked()
    head_kernels.linear_exp_fwd(plain_head, stats.anchor, exps, patch=stats.patch, sums=False)
    p = (head.hidden.float() @ head.weight.float().T).softmax(-1)
    p[torch.arange(3), head.targets] -= 1
    torch.testing.assert_close(exps.float(), p, atol=2e-3, rtol=0)


def test_exponentials_past_2_to_the_31():
    """The anchored way over a pitch of 2^30: the product's store, the target's entry, the entropy's pass."""
    head = random_head(3, 16, 50, torch.float16)
    head.targets[:] = (head.hidden.float() @ head.weight.float().T).argmax(-1)
    arguments = head_kernels.Head(head.hidden, head.weight, None, head.targets, 1.0, None, None).checked()
    far = torch.empty_strided((3, 50), (2**30, 1), dtype=torch.float16)
    near = head_kernels.empty_exps(3, 50, far)
    rows = [head_kernels.rows_fwd(arguments, exps, True) for exps in (far, near)]
    assert torch.equal(*rows) and torch.equal(far, near)
    for exps in (far, near):
        head_kernels.head_entropy_bwd(exps, head.targets, rows[0], head.grad_logps, head.grad_entropy, exps)
    assert torch.equal(far, near)
