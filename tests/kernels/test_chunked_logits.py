"""The loss of logits that are already there: against the reference, against the fused head, and what it keeps."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fastgrpo import Objective, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernels import head_torch, reference

B, T, V, D = 4, 5, 17, 6
LENGTHS = torch.tensor([5, 3, 0, 4])
KNOBS = {
    "dapo": {},
    "gspo-k3": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.2},
    "cispo-corrected": {"loss_type": "cispo", "epsilon_high": 2.0, "beta": 0.2, "use_bias_correction_kl": True},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.2},
}


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = noise(B, T, D), noise(V, D)
    number = torch.float64 if dtype == torch.float64 else torch.float32
    rest = {
        "mask": torch.arange(T) < LENGTHS[:, None],
        "old_logps": (noise(B, T) * 0.3 - 2.8).to(number),
        "sampler_logps": (noise(B, T) * 0.3 - 2.8).to(number),
        "temperature": (noise(B, T).square() + 0.5).to(number),
    }
    targets = torch.randint(V, (B, T), generator=generator)
    advantages = torch.tensor([1.0, -0.6, 0.8, 0.0], dtype=number)
    ref = (noise(B, T) * 0.3 - 2.8).to(number)
    return hidden.to(dtype), weight.to(dtype), targets, advantages, rest, ref


def arguments(name, rest, ref):
    knobs = KNOBS[name]
    return {**rest, **knobs, **({"ref_logps": ref} if "beta" in knobs else {})}


@pytest.mark.parametrize("inplace", [False, True], ids=["new-gradient", "inplace"])
@pytest.mark.parametrize("size", [100, 4])
@pytest.mark.parametrize("name", KNOBS)
def test_equals_the_reference_and_the_head(monkeypatch, name, size, inplace):
    monkeypatch.setattr(head_torch, "chunk_rows", lambda vocab_size: size)
    hidden, weight, targets, advantages, rest, ref = problem()
    objective, mask = Objective(**KNOBS[name]), rest["mask"].flatten()
    kept, starts = mask.nonzero()[:, 0], torch.arange(B + 1) * T
    logits = (hidden @ weight.T).requires_grad_()
    weights = objective.token_weights(mask, starts, dtype=torch.float64)[kept]
    loss, logps, _ = reference.logits_grpo_loss(
        logits.flatten(0, 1)[kept], targets.flatten()[kept], advantages.repeat_interleave(T)[kept], weights, objective,
        ref_logps=ref.flatten()[kept], lengths=LENGTHS,
        entropy_weights=objective.entropy_weights(mask, dtype=torch.float64)[kept],
        **{key: rest[key].flatten()[kept] for key in ("old_logps", "sampler_logps", "temperature")},
    )  # fmt: skip
    (3 * loss).backward()

    own = logits.detach().clone().requires_grad_()
    own.data[~rest["mask"]] = torch.nan  # never read
    out = logits_grpo_loss(own * 1, targets, advantages, inplace=inplace, **arguments(name, rest, ref))
    (3 * out.loss).backward()
    assert torch.allclose(out.loss, loss, rtol=1e-10, atol=0)
    assert torch.allclose(own.grad, logits.grad, rtol=0, atol=1e-10 * logits.grad.abs().max().item())
    expected = torch.zeros_like(out.logps).masked_scatter(rest["mask"], logps)
    assert torch.allclose(out.logps, expected.masked_fill(~out.active, 0), rtol=1e-10, atol=0)

    head = linear_grpo_loss(hidden, weight, targets, advantages, **arguments(name, rest, ref))
    assert torch.allclose(out.loss, head.loss, rtol=1e-12, atol=0) and torch.equal(out.active, head.active)
    assert out.metrics.keys() == head.metrics.keys()
    for key, value in head.metrics.items():
        assert torch.allclose(out.metrics[key].double(), value.double(), rtol=1e-10, atol=1e-14), key


def test_packed_layout():
    hidden, weight, targets, advantages, rest, _ = problem()
    logits, mask = (hidden @ weight.T).requires_grad_(), rest["mask"]
    logits_grpo_loss(logits, targets, advantages, loss_type="grpo", **rest).loss.backward()
    packed = logits.detach()[mask].requires_grad_()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
    per_token = {name: value[mask] for name, value in rest.items()}
    out = logits_grpo_loss(packed, targets[mask], advantages, loss_type="grpo", cu_seqlens=cu_seqlens, **per_token)
    out.loss.backward()
    assert torch.allclose(packed.grad, logits.grad[mask], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_logits_round_once(dtype):
    """The gradient is the exact one of the rounded logits, rounded to their dtype."""
    hidden, weight, targets, advantages, rest, _ = problem(dtype)
    logits = (hidden @ weight.T).requires_grad_()
    logits_grpo_loss(logits, targets, advantages, **rest).loss.backward()
    exact = logits.detach().double().requires_grad_()
    logits_grpo_loss(exact, targets, advantages, **rest).loss.backward()
    assert logits.grad.dtype == dtype
    half_ulp = torch.finfo(dtype).eps / 2
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=half_ulp * 1.01, atol=1e-7)


def test_second_backward_works_without_inplace_and_is_refused_with_it():
    hidden, weight, targets, advantages, rest, _ = problem()
    for inplace in (False, True):
        leaf = (hidden @ weight.T).requires_grad_()
        out = logits_grpo_loss(leaf * 1, targets, advantages, inplace=inplace, **rest)
        (first,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
        if inplace:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(out.loss, leaf)
        else:
            assert torch.equal(torch.autograd.grad(out.loss, leaf)[0], first)


def test_inplace_writes_the_gradient_over_the_logits():
    hidden, weight, targets, advantages, rest, _ = problem()
    leaf = (hidden @ weight.T).requires_grad_()
    logits = leaf * 1
    storage = logits.data_ptr()
    (gradient,) = torch.autograd.grad(
        logits_grpo_loss(logits, targets, advantages, inplace=True, **rest).loss, logits, retain_graph=True
    )
    assert gradient.data_ptr() == storage and torch.equal(logits.detach(), gradient)
    logits = leaf * 1
    before = logits.detach().clone()
    logits_grpo_loss(logits, targets, advantages, **rest).loss.backward()
    assert torch.equal(logits.detach(), before)
    assert torch.equal(leaf.grad, gradient)


def memory(call):
    """(peak, left): bytes that torch's CPU allocator had given out at most, and still has with the result alive."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    alive = list(accumulate(nbytes for _, _, nbytes in changes))
    return result, max(alive), alive[-1]


@pytest.mark.parametrize("entropy_coef, chunks", [(0.0, 1), (0.1, 2)])
@pytest.mark.parametrize("inplace", [False, True], ids=["new-gradient", "inplace"])
def test_memory_is_a_chunk_beside_one_gradient(monkeypatch, inplace, entropy_coef, chunks):
    rows, vocab, size = 256, 4096, 16
    monkeypatch.setattr(head_torch, "chunk_rows", lambda vocab_size: size)
    whole, chunk = rows * vocab * 2, size * vocab * 4
    leaf = torch.randn(rows, vocab).bfloat16().requires_grad_()
    targets, advantages = torch.randint(vocab, (rows,)), torch.randn(rows)
    logits = leaf * 1
    knobs = {"inplace": inplace, "entropy_coef": entropy_coef}
    out, peak, left = memory(lambda: logits_grpo_loss(logits, targets, advantages, **knobs))
    assert peak <= 1.2 * chunks * chunk and left <= 0.2 * chunk
    _, peak, left = memory(lambda: torch.autograd.grad(out.loss, logits))
    gradient = 0 if inplace else whole
    # the chunk's gradient is there once more in the logits' dtype, on its way into the whole one
    assert peak <= gradient + (chunks + 0.7) * chunk and abs(left - gradient) <= 0.2 * chunk


def test_logits_of_minus_infinity_are_legal():
    """A vocabulary entry that is ruled out: probability 0, gradient 0, no NaN, in the entropy bonus either."""
    hidden, weight, targets, advantages, rest, _ = problem()
    logits = hidden @ weight.T
    logits[..., 3] = -torch.inf
    targets[targets == 3] = 4
    logits.requires_grad_()
    out = logits_grpo_loss(logits, targets, advantages, entropy_coef=0.3, **rest)
    out.loss.backward()
    assert out.loss.isfinite() and logits.grad.isfinite().all()
    assert (logits.grad[..., 3] == 0).all() and out.metrics["entropy"] > 0


def test_no_row_kept():
    hidden, weight, targets, _, rest, _ = problem()
    logits = (hidden @ weight.T).requires_grad_()
    out = logits_grpo_loss(logits, targets, torch.zeros(B), **rest)
    out.loss.backward()
    assert out.loss == 0 and out.metrics["active_tokens"] == 0 and (logits.grad == 0).all()


def test_no_gradient_work_without_gradient(monkeypatch):
    def never(*args):
        raise AssertionError("the gradient was formed")

    monkeypatch.setattr(head_torch, "logit_gradient_", never)
    hidden, weight, targets, advantages, rest, _ = problem()
    logits = hidden @ weight.T
    assert logits_grpo_loss(logits, targets, advantages, **rest).loss.grad_fn is None
    with torch.no_grad():
        assert not logits_grpo_loss(logits.requires_grad_(), targets, advantages, **rest).loss.requires_grad


def test_errors_name_the_argument():
    hidden, weight, targets, advantages, _, _ = problem()
    logits = hidden @ weight.T
    with pytest.raises(ValueError, match=r"targets must have the shape \(4, 5\), got \(4, 4\)"):
        logits_grpo_loss(logits, targets[:, 1:], advantages)
    with pytest.raises(ValueError, match="logits must be floating point"):
        logits_grpo_loss(targets[..., None], targets, advantages)
    with pytest.raises(ValueError, match="targets must be integers"):
        logits_grpo_loss(logits, targets.double(), advantages)
    with pytest.raises(ValueError, match=r"targets must be in \[0, 17\)"):
        logits_grpo_loss(logits, targets + V, advantages)
