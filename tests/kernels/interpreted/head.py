"""The head's kernels on the CPU: values and gradients of every option and form, every bug that shipped elsewhere.

Collected by test_triton_interpret.py, in a process of its own with TRITON_INTERPRET=1.
"""

import math
import warnings

import pytest
import torch
from heads import check, error, policy_scalar, random_head, truth

from fastgrpo import Objective
from fastgrpo.kernels import head_gradients, head_rows, launch, linear_exp, linear_grpo, linear_logprob, logits_grpo
from fastgrpo.kernels.policy_rows import PolicyRows

if not launch.INTERPRET:
    pytest.skip("needs TRITON_INTERPRET=1 before the import", allow_module_level=True)

PATHS = ("anchored", "recompute")
DAPO = Objective(beta=0.1)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():  # numpy tells of every exp that overflows on its way to a flag
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def run_logprob(head, *, path, entropy=True, chunk_rows=launch.CHUNK_ROWS):
    """logps, entropy and their gradients for head's grad_logps and grad_entropy."""
    leaves = head.leaves()
    logps, h = linear_logprob.linear_logprob(
        leaves["hidden"], leaves["weight"], head.targets, bias=leaves.get("bias"), temperature=head.temperature,
        softcap=head.softcap, return_entropy=entropy, path=path, chunk_rows=chunk_rows,
    )  # fmt: skip
    loss = weighted(head, entropy)(logps, h)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return {"logps": logps, **({"entropy": h} if entropy else {}), **grads}


def weighted(head, entropy=True):
    def scalar(logps, h):
        loss = (logps * head.grad_logps.to(logps.dtype)).sum()
        return loss + (h * head.grad_entropy.to(logps.dtype)).sum() if entropy else loss

    return scalar


def run_grpo(head, objective, *, path, chunk_rows=launch.CHUNK_ROWS, factor=1.0, **fields):
    leaves = head.leaves()
    loss, outputs = linear_grpo.linear_grpo_loss(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), head.rows(objective, **fields), objective,
        softcap=head.softcap, path=path, chunk_rows=chunk_rows,
    )  # fmt: skip
    grads = torch.autograd.grad(loss * factor, list(leaves.values()))
    return {"loss": loss, "logps": outputs["logps"], **dict(zip(leaves, grads, strict=True))}


OPTIONS = [
    {},
    {"bias": True},
    {"temperature": 0.7},
    {"temperature": "row"},
    {"softcap": 5.0},
    {"bias": True, "temperature": "row", "softcap": 5.0, "scale": 3.0},
]
SHAPES = [(37, 24, 101), (1, 16, 33), (16, 19, 64)]  # ragged; one row; whole tiles with a depth that no bulk copy takes


@pytest.mark.parametrize("entropy", (False, True))
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_logprob_in_fp32(path, shape, options, entropy):
    head = random_head(*shape, **options)
    check(run_logprob(head, path=path, entropy=entropy), head, weighted(head, entropy))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("entropy", (False, True))
def test_logprob_in_fp16(options, entropy):
    head = random_head(37, 24, 101, torch.float16, **options)
    head.grad_logps *= 64  # a loss scale; without one plain PyTorch loses its small dz, and we do not
    check(run_logprob(head, path="recompute", entropy=entropy), head, weighted(head, entropy))


@pytest.mark.parametrize("path", PATHS)
def test_logprob_by_chunks(path):
    head = random_head(70, 16, 50, bias=True)
    check(run_logprob(head, path=path, chunk_rows=16), head, weighted(head))


OBJECTIVES = {
    "dapo": {},
    "k1": {"beta": 0.3, "kl": "k1"},
    "k2": {"beta": 0.3, "kl": "k2"},
    "k3": {"beta": 0.3},
    "abs": {"beta": 0.3, "kl": "abs"},
    "corrected": {"beta": 0.3, "use_bias_correction_kl": True},
    "delta": {"delta": 1.25, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate"},
    "gspo": {"importance_sampling_level": "sequence", "beta": 0.1},
    "gspo-corrected": {"importance_sampling_level": "sequence", "beta": 0.3, "use_bias_correction_kl": True},
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("path", PATHS)
def test_every_objective(name, path):
    head, objective = random_head(37, 16, 50), Objective(**OBJECTIVES[name])
    check(run_grpo(head, objective, path=path), head, policy_scalar(head, objective))


@pytest.mark.parametrize("mode", ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
@pytest.mark.parametrize("loss_type", ("dapo", "vespo"))
def test_importance_weights_against_the_sampler(mode, loss_type):
    if loss_type == "vespo" and mode.startswith("sequence"):
        pytest.skip("vespo takes token-level weights alone")
    head = random_head(37, 16, 50)
    objective = Objective(loss_type, importance_sampling_mode=mode, importance_sampling_clip_max=1.3)
    sampler = head.old_logps + 0.2 * torch.randn(37, generator=torch.Generator().manual_seed(1))
    sampler[3] = math.nan
    ours = run_grpo(head, objective, path="anchored", sampler_logps=sampler)
    check(ours, head, policy_scalar(head, objective, sampler_logps=sampler))


@pytest.mark.parametrize("softcap", (None, 5.0))
@pytest.mark.parametrize("chunk_rows", (16, 8192))
@pytest.mark.parametrize("path", PATHS)
def test_entropy_bonus(path, chunk_rows, softcap):
    head, objective = random_head(37, 16, 50, softcap=softcap), Objective(beta=0.1, entropy_coef=0.3)
    bonus = torch.full((37,), 0.3 / 37)
    ours = run_grpo(head, objective, path=path, chunk_rows=chunk_rows, entropy_weights=bonus)
    check(ours, head, policy_scalar(head, objective, entropy_weights=bonus))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("path", PATHS)
def test_several_chunks(path, options):
    head = random_head(70, 16, 50, **options)
    check(run_grpo(head, DAPO, path=path, chunk_rows=32), head, policy_scalar(head, DAPO))


@pytest.mark.parametrize("chunk_rows", (64, 16))  # chunks end with sequences; a sequence is longer than a chunk
def test_sequence_level_ratios_over_several_chunks(chunk_rows):
    head, objective = random_head(100, 16, 50), Objective(importance_sampling_level="sequence", beta=0.1)
    ours = run_grpo(head, objective, path="anchored", chunk_rows=chunk_rows)
    check(ours, head, policy_scalar(head, objective))


def test_dw_over_64_chunks_is_as_good_as_over_one():
    head = random_head(256, 16, 50)
    true = truth(head, policy_scalar(head, DAPO))["weight"]
    one, many = (run_grpo(head, DAPO, path="anchored", chunk_rows=rows)["weight"] for rows in (256, 4))
    assert error("weight", many, true) <= 1.5 * error("weight", one, true) + 1e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", (20, 60))
def test_targets_far_below_the_rest(scale, path):
    """Both guarded passes: rows 60 to 1,000 nats from the anchor beside ordinary rows of the same block."""
    head = random_head(40, 16, 100)
    head.hidden[[3, 17, 39]] *= scale
    z = head.hidden @ head.weight.T
    head.targets[[3, 39]] = z[[3, 39]].argmin(-1)  # least likely
    head.targets[17] = z[17].argmax()  # 60 nats above the rest: logp is -log1p of nearly nothing
    ours = run_logprob(head, path=path)
    check(ours, head, weighted(head))
    true = truth(head, weighted(head))["logps"]
    assert true.min() < -60
    # full relative precision of a confident token, that log-softmax cannot have
    others = z[17].double() - z[17].double().max()
    others[head.targets[17]] = -math.inf
    assert ours["logps"][17].item() == pytest.approx(-others.exp().sum().log1p().item(), rel=1e-4)


def test_the_guard_rewrites_flagged_blocks_alone(monkeypatch):
    head = random_head(40, 16, 100)
    head.hidden[3] *= 40
    head.targets[3] = (head.hidden[3] @ head.weight.T).argmin()
    arguments = (head.hidden, head.weight, None, head.targets, 1.0, None, None, True, True, False, 64, None)
    rows, exps = linear_logprob.linear_logprob_fwd(*arguments)
    monkeypatch.setattr(linear_logprob, "linear_exp_fwd", _only_first(linear_exp.linear_exp_fwd))
    unguarded_rows, unguarded = linear_logprob.linear_logprob_fwd(*arguments)
    assert not unguarded[3].isfinite().all() or unguarded[3].max() > 2.0**60
    assert exps[3].isfinite().all() and exps[3].max() < 1.001
    keep = torch.arange(40) != 3
    assert torch.equal(exps[keep], unguarded[keep]) and torch.equal(rows[:, keep], unguarded_rows[:, keep])


def _only_first(function):
    def wrapped(*args, flags=None, **kwargs):
        return function(*args, **kwargs) if flags is None else None

    return wrapped


@pytest.mark.parametrize("path", PATHS)
def test_every_logit_below_minus_87(path):
    head = random_head(20, 16, 50, bias=True)
    head.bias -= 200
    check(run_logprob(head, path=path), head, weighted(head))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("target", (True, False))
def test_one_logit_60_nats_above(path, target):
    head = random_head(20, 16, 50, bias=True)
    head.bias[7] += 60
    head.targets[:] = 7 if target else 9
    ours = run_logprob(head, path=path, entropy=False)
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


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_target_poisons_its_row_alone(path):
    head = random_head(20, 16, 50)
    for bad in (-1, 50, -100):
        targets = head.targets.clone()
        targets[5] = bad
        logps, _ = linear_logprob.linear_logprob(head.hidden, head.weight, targets, path=path)
        assert logps.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("frozen", (("hidden",), ("weight",), ("hidden", "weight"), ("weight", "bias")))
@pytest.mark.parametrize("chunk_rows", (16, 8192))
@pytest.mark.parametrize("path", PATHS)
def test_frozen(path, chunk_rows, frozen):
    head = random_head(37, 16, 50, bias=True)
    full = run_grpo(head, DAPO, path=path, chunk_rows=chunk_rows)
    leaves = head.leaves()
    for name in frozen:
        leaves[name].requires_grad_(False)
    loss, _ = linear_grpo.linear_grpo_loss(*leaves.values(), head.rows(DAPO), DAPO, path=path, chunk_rows=chunk_rows)
    loss.backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is None) if name in frozen else torch.equal(leaf.grad, full[name])


@pytest.mark.parametrize("chunk_rows", (16, 8192))
@pytest.mark.parametrize("path", PATHS)
def test_grad_output_and_retain_graph(path, chunk_rows):
    head = random_head(37, 16, 50, bias=True)
    scalar = policy_scalar(head, DAPO)
    tripled = run_grpo(head, DAPO, path=path, chunk_rows=chunk_rows, factor=3.0)
    del tripled["loss"]
    check(tripled, head, lambda *args: 3 * scalar(*args))
    leaves = head.leaves()
    loss, _ = linear_grpo.linear_grpo_loss(*leaves.values(), head.rows(DAPO), DAPO, path=path, chunk_rows=chunk_rows)
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_several_chunks_are_rounded_once(monkeypatch):
    """Formed before grad_output is known, they stay fp32 until it is: 3 round(x) is not round(3 x)."""
    head, kept = random_head(70, 24, 50, torch.float16), []
    head.targets[:] = (head.hidden.float() @ head.weight.float().T).argmax(-1)  # E <= 1: fp16 holds it
    original = head_gradients.HeadGradients.sums

    def watched(self):
        kept.extend(x.clone() for x in original(self) if x is not None)
        return original(self)

    monkeypatch.setattr(head_gradients.HeadGradients, "sums", watched)
    ours = run_grpo(head, DAPO, path="anchored", chunk_rows=32, factor=3.0)
    assert [x.dtype for x in kept] == [torch.float32] * 2
    for name, total in zip(("hidden", "weight"), kept, strict=True):
        assert torch.equal(ours[name], (3 * total).half()) and not torch.equal(ours[name], 3 * total.half())


def test_retain_graph_with_an_entropy_gradient():
    head, leaves = random_head(20, 16, 50), None
    leaves = head.leaves()
    logps, h = linear_logprob.linear_logprob(*leaves.values(), head.targets, return_entropy=True, path="anchored")
    loss = weighted(head)(logps, h)
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(leaves.values()))))


@pytest.mark.parametrize("path", PATHS)
def test_strides(path):
    """A slice of a wider hidden, a transposed weight, an expanded row of targets."""
    head = random_head(37, 16, 50)
    wide = torch.randn(37, 40)
    wide[:, 8:24] = head.hidden
    straight = run_logprob(head, path=path)
    hidden, weight = wide[:, 8:24].requires_grad_(), head.weight.T.contiguous().T.requires_grad_()
    assert not hidden.is_contiguous() and not weight.is_contiguous()
    logps, h = linear_logprob.linear_logprob(hidden, weight, head.targets, return_entropy=True, path=path)
    grads = torch.autograd.grad(weighted(head)(logps, h), (hidden, weight))
    torch.testing.assert_close(logps, straight["logps"])
    torch.testing.assert_close(grads[0], straight["hidden"])
    torch.testing.assert_close(grads[1], straight["weight"])


def test_a_row_of_any_stride():
    """torch calls one row contiguous whatever its stride; bulk copies refuse a pitch of 0."""
    row = torch.randn(16).as_strided((1, 16), (0, 1))
    assert row.is_contiguous() and row.contiguous().stride() == (0, 1)
    assert launch.rows_contiguous(row).stride() == (16, 1) and torch.equal(launch.rows_contiguous(row), row)
    column = torch.randn(16, 1).T
    assert launch.rows_contiguous(column).stride() == (16, 1)
    wide = torch.randn(5, 40)[:, 8:24]
    assert launch.rows_contiguous(wide) is wide


@pytest.mark.parametrize("path", PATHS)
def test_every_launch_is_on_the_device_of_its_tensors(path, monkeypatch):
    """Triton launches on the current device, whatever device the tensors are on."""
    from triton.runtime.interpreter import GridExecutor

    inside, launches = [], []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            inside.append(self.tensor)

        def __exit__(self, *_):
            inside.pop()

    call = GridExecutor.__call__

    def watched(self, *args, **kwargs):
        launches.append(len(inside))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    head = random_head(70, 16, 50)
    bonus = torch.full((70,), 0.3 / 70)
    run_grpo(head, Objective(beta=0.1, entropy_coef=0.3), path=path, chunk_rows=32, entropy_weights=bonus)
    run_logprob(head, path=path)
    logits = (head.hidden @ head.weight.T).requires_grad_()
    for inplace in (False, True):
        given = logits.clone()
        loss, _ = logits_grpo.logits_grpo_loss(given, head.rows(DAPO), DAPO, inplace=inplace)
        torch.autograd.grad(2 * loss, logits)
    assert len(launches) > 20 and min(launches) == 1 and not inside


@pytest.mark.parametrize("path", PATHS)
def test_two_runs_give_the_same_bits(path):
    head = random_head(70, 16, 50, bias=True)
    first, second = (run_grpo(head, DAPO, path=path, chunk_rows=32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("path", PATHS)
def test_no_rows(path):
    head = random_head(37, 16, 50, bias=True)
    none = torch.arange(0)
    leaves = head.leaves()
    rows = PolicyRows(none, head.targets[:0], 1.0, head.advantages[:0], head.weights[:0], None, None, None)
    loss, outputs = linear_grpo.linear_grpo_loss(*leaves.values(), rows, Objective(), path=path)
    assert loss.item() == 0 and len(outputs["logps"]) == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, list(leaves.values())))
    logps, _ = linear_logprob.linear_logprob(leaves["hidden"][:0], leaves["weight"], none, path=path)
    assert logps.shape == (0,) and (torch.autograd.grad(logps.sum(), leaves["weight"])[0] == 0).all()


def test_no_grad_does_no_gradient_work(monkeypatch):
    head = random_head(37, 16, 50)
    kept = []
    original = linear_logprob.rows_fwd
    monkeypatch.setattr(
        linear_logprob,
        "rows_fwd",
        lambda head, a, exps=None, *more: kept.append(exps) or original(head, a, exps, *more),
    )
    leaves = head.leaves()
    with torch.no_grad():
        linear_grpo.linear_grpo_loss(*leaves.values(), None, head.rows(DAPO), DAPO, path="anchored")
        linear_logprob.linear_logprob(*leaves.values(), head.targets, path="anchored")
    assert kept == [None, None]


def test_products_run_once_in_a_checkpointed_region(monkeypatch):
    """The one-chunk form forms gradients in the backward: the first pass of a checkpoint costs its forward alone."""
    head, counts = random_head(37, 16, 50), {"hidden_product": 0, "weight_product": 0}
    for name in counts:
        original = getattr(head_gradients, name)

        def counted(*args, original=original, name=name):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(head_gradients, name, counted)
    leaves = head.leaves()

    def region(hidden, weight):
        return linear_grpo.linear_grpo_loss(hidden, weight, None, head.rows(DAPO), DAPO, path="anchored")[0]

    torch.utils.checkpoint.checkpoint(region, *leaves.values(), use_reentrant=False).backward()
    assert counts == {"hidden_product": 1, "weight_product": 1}
    torch.testing.assert_close(leaves["weight"].grad, run_grpo(head, DAPO, path="anchored")["weight"])


def test_one_chunk_of_exponentials_at_a_time(monkeypatch):
    head, alive = random_head(128, 16, 50), []
    original = linear_logprob.empty_exps

    def tracked(*args):
        import weakref

        assert not any(reference() is not None for reference in alive), "two chunks of exponentials at once"
        exps = original(*args)
        if exps.shape[0]:
            alive.append(weakref.ref(exps.untyped_storage()))
        return exps

    monkeypatch.setattr(linear_logprob, "empty_exps", tracked)
    run_grpo(head, DAPO, path="anchored", chunk_rows=32)
    assert len(alive) == 4


def test_fp32_gradients_of_an_fp16_weight():
    head = random_head(37, 24, 50, torch.float16)
    rows, _ = linear_logprob.linear_logprob_fwd(
        head.hidden, head.weight, None, head.targets, 1.0, None, None, False, False, False, 64, None
    )
    _, dw, _ = linear_logprob.linear_logprob_bwd(
        head.hidden, head.weight, None, head.targets, 1.0, None, None, rows, head.grad_logps, None,
        [False, True, False], torch.float32, 64, None,
    )  # fmt: skip
    assert dw.dtype == torch.float32
    assert error("weight", dw, truth(head, weighted(head, False))["weight"]) < 1e-3


def test_row_offsets_pass_2_to_the_31():
    """Three rows, 2^30 elements apart: 4 GB of address space, of which a few pages are touched."""
    head = random_head(3, 16, 50, torch.float16)
    far = torch.empty_strided((3, 16), (2**30, 1), dtype=torch.float16)
    far.copy_(head.hidden)
    near, _ = linear_logprob.linear_logprob(head.hidden, head.weight, head.targets)
    assert torch.equal(linear_logprob.linear_logprob(far, head.weight, head.targets)[0], near)
    exps = torch.empty_strided((3, 50), (2**30, 1), dtype=torch.float16)
    rows, _ = linear_logprob.linear_logprob_fwd(
        head.hidden, head.weight, None, head.targets, 1.0, None, None, False, False, False, 64, None
    )
    stats = head_rows.Rows(*rows).normalized()
    plain_head = linear_logprob.Head(head.hidden, head.weight, None, head.targets, 1.0, None, None).checked()
    linear_exp.linear_exp_fwd(plain_head, stats.anchor, exps, patch=stats.patch, sums=False)
    p = (head.hidden.float() @ head.weight.float().T).softmax(-1)
    p[torch.arange(3), head.targets] -= 1
    torch.testing.assert_close(exps.float(), p, atol=2e-3, rtol=0)


def test_exponentials_past_2_to_the_31():
    """The anchored way over a pitch of 2^30: the product's store, the target's entry, the entropy's pass."""
    head = random_head(3, 16, 50, torch.float16)
    head.targets[:] = (head.hidden.float() @ head.weight.float().T).argmax(-1)
    arguments = linear_logprob.Head(head.hidden, head.weight, None, head.targets, 1.0, None, None).checked()
    far = torch.empty_strided((3, 50), (2**30, 1), dtype=torch.float16)
    near = linear_logprob.empty_exps(3, 50, far)
    rows = [linear_logprob.rows_fwd(arguments, True, exps, True) for exps in (far, near)]
    assert torch.equal(*rows) and torch.equal(far, near)
    stats = head_rows.Rows(*rows[0])
    for exps in (far, near):
        head_rows.entropy_bwd(exps, head.targets, stats, head.grad_logps, head.grad_entropy, exps)
    assert torch.equal(far, near)


def test_a_pitch_for_bulk_copies():
    """E and what an entropy gradient makes of it: rows of any length begin at 128 bytes."""
    head = random_head(5, 16, 50)
    rows, exps = linear_logprob.linear_logprob_fwd(
        head.hidden, head.weight, None, head.targets, 1.0, None, None, True, True, True, 64, None
    )
    out = linear_logprob.head_entropy_bwd(exps, head.targets, rows, head.grad_logps, head.grad_entropy)
    assert exps.stride() == out.stride() == (64, 1)
