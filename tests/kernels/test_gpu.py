"""The losses by Triton on a GPU at real sizes, in bf16: accuracy, determinism, memory, no wait for the device."""

import math
from types import SimpleNamespace

import pytest
import torch

from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.kernel_checks.cases import FACTORS, SLACK, error

pytestmark = pytest.mark.gpu

SHAPES = [(8192, 896, 151936), (16384, 2048, 151936), (8192, 4096, 128256)]  # N, D, V
MIB = 2**20
TRUTH_ROWS = 1024  # rows whose fp64 logits are held at once


@pytest.fixture(autouse=True)
def release():
    yield
    torch.cuda.empty_cache()


def random_head(n, d, v):
    with torch.device("cuda"):
        return SimpleNamespace(
            hidden=torch.randn(n, d).bfloat16(), weight=(torch.randn(v, d) * 4 / d**0.5).bfloat16(),
            targets=torch.randint(v, (n,)), advantages=torch.randn(n), weights=torch.rand(n) / n,
        )  # fmt: skip


def head_of(n, d, v):
    """Return a head whose tokens have an entropy of a few nats, half of them with a likely target."""
    head = random_head(n, d, v)
    for part in torch.arange(n, device="cuda").split(TRUTH_ROWS):
        likely = (head.hidden[part] @ head.weight.T).argmax(-1)
        head.targets[part] = torch.where(part % 2 == 0, likely, head.targets[part])
    with torch.no_grad():
        logps = linear_logprob(head.hidden, head.weight, head.targets, backend="triton")
    head.old_logps = logps + 0.2 * torch.randn_like(logps)
    head.ref_logps = logps + 0.2 * torch.randn_like(logps)
    return head


def arguments(head, **more):
    return {"targets": head.targets, "advantages": head.advantages, "old_logps": head.old_logps,
            "ref_logps": head.ref_logps, "token_weights": head.weights, "beta": 0.1, **more}  # fmt: skip


def run(head):
    hidden, weight = (x.detach().requires_grad_() for x in (head.hidden, head.weight))
    out = linear_grpo_loss(hidden, weight, backend="triton", **arguments(head))
    out.loss.backward()
    return out, {"hidden": hidden.grad, "weight": weight.grad}


def measure(head, ours):
    """Return the errors of ours and of plain PyTorch (bf16 operands, fp32 logits, bf16 dz) against fp64, by chunks."""
    n, objective = len(head.targets), {"epsilon": 0.2, "beta": 0.1}
    weight32, weight64 = head.weight.float(), head.weight.double()
    dw = {"true": torch.zeros_like(weight64), "plain": torch.zeros_like(weight32)}
    kept = {name: {"true": [], "plain": []} for name in ("logps", "hidden")}
    for part in torch.arange(n, device="cuda").split(TRUTH_ROWS):
        h, t = head.hidden[part], head.targets[part]
        for kind, weight in (("true", weight64), ("plain", weight32)):
            dtype = weight.dtype
            z = h.double() @ weight.T if kind == "true" else torch.mm(h, head.weight.T, out_dtype=torch.float32)
            z.requires_grad_()
            logps = z.log_softmax(-1).gather(-1, t[:, None])[:, 0]
            ratio = (logps - head.old_logps[part].to(dtype)).exp()
            a, w = head.advantages[part].to(dtype), head.weights[part].to(dtype)
            low, high = 1 - objective["epsilon"], 1 + objective["epsilon"]
            d = head.ref_logps[part].to(dtype) - logps
            row = -torch.min(ratio * a, ratio.clamp(low, high) * a) + objective["beta"] * (torch.expm1(d) - d)
            (dz,) = torch.autograd.grad((w * row).sum(), z)
            if kind == "plain":
                dz = dz.bfloat16()
                kept["hidden"][kind].append((dz @ head.weight).double())
                dw[kind] += torch.mm(dz.T, h, out_dtype=torch.float32)
            else:
                kept["hidden"][kind].append(dz @ weight)
                dw[kind].addmm_(dz.T, h.double())
            kept["logps"][kind].append(logps.detach().double())
            del z, dz, logps, row, ratio
    pairs = {name: {kind: torch.cat(parts) for kind, parts in both.items()} for name, both in kept.items()}
    pairs["weight"] = {"true": dw["true"], "plain": dw["plain"].bfloat16()}
    return {
        name: (error(name, ours[name], both["true"]), error(name, both["plain"], both["true"]))
        for name, both in pairs.items()
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(shape):
    head = head_of(*shape)
    out, grads = run(head)
    for name, (mine, plain) in measure(head, {"logps": out.logps, **grads}).items():
        print(f"{shape} {name}: {mine:.2e}, plain {plain:.2e}")
        assert mine <= FACTORS[name] * plain + SLACK, (name, mine, plain)


@pytest.mark.parametrize("rows", (8192, 16384 + 40))
def test_two_runs_give_the_same_bits(rows):
    head = head_of(rows, 896, 151936)
    (a, a_grads), (b, b_grads) = run(head), run(head)
    assert torch.equal(a.loss, b.loss) and torch.equal(a.logps, b.logps)
    assert all(torch.equal(a_grads[name], b_grads[name]) for name in a_grads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_peak_memory(shape):
    n, d, v = shape
    head = head_of(*shape)
    run(head_of(256, d, v))  # workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(head)
    gradients = 2 * n * d + 2 * v * d
    used = torch.cuda.max_memory_allocated() - before - gradients
    allowed = 2 * min(n, 8192) * v + (4 * v * d if n > 8192 else 0) + 256 * MIB
    assert used <= allowed, (used / MIB, allowed / MIB)


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("n", (4096, 20000))
def test_no_wait_for_the_device(n, level):
    head = head_of(n, 896, 32000)
    lengths = torch.full((n // 500,), 500)
    lengths[-1] += n - lengths.sum()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    rows = (sequences % 3 > 0).nonzero()[:, 0]
    hidden, weight = (x.detach().requires_grad_() for x in (head.hidden, head.weight))
    options = arguments(head, rows=rows, cu_seqlens=cu_seqlens, importance_sampling_level=level, num_items_in_batch=n)
    del options["token_weights"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = linear_grpo_loss(hidden, weight, backend="triton", **options)
        (out.loss / 3).backward()
        masked = {**options, "mask": torch.ones(n, device="cuda"), "rows": None}
        linear_grpo_loss(hidden, weight, backend="triton", **masked).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.grad.isfinite().all()


def test_torch_compile():
    head = head_of(16384, 896, 32000)

    def loss(hidden, weight):
        return linear_grpo_loss(hidden * 1.0, weight, backend="triton", **arguments(head)).loss

    leaves = [x.detach().requires_grad_() for x in (head.hidden, head.weight)]
    theirs = torch.autograd.grad(loss(*leaves), leaves)
    ours = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_anchor_is_bit_equal_to_the_product(shape):
    """The anchor must be rounded as the main product rounds, or log-probs err one-sidedly by up to 1e-4.

    At this temperature log2(e) / T is 2^30 in fp32, so that x2 = (y - c) 2^30 is exact, and any difference of one bit
    sends exp2(x2) away from the 1 that equal bits give.
    """
    from fastgrpo.kernels.head import Head as HeadArguments
    from fastgrpo.kernels.head import anchor_fwd, empty_exps, linear_exp_fwd

    n, d, v = min(shape[0], 8192), *shape[1:]
    temperature = 1 / torch.tensor(2.0**30 * math.log(2), dtype=torch.float32).item()
    head = random_head(n, d, v)
    given = HeadArguments(head.hidden, head.weight, None, head.targets, temperature, None, None).checked()
    exps = empty_exps(n, v, head.weight)
    linear_exp_fwd(given, anchor_fwd(given), exps)
    different = (exps.gather(1, head.targets[:, None]) != 1).sum().item()
    assert different == 0, f"{different} of {n} anchors are not the product's bits"
