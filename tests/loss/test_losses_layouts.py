"""The losses over layouts, dtypes and micro-batches: padded or packed, whole or in parts, the result is the same."""

from dataclasses import replace

import oracle
import pytest
import torch

from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("per_token", [False, True], ids=["advantages-B", "advantages-BT"])
def test_padded_and_packed_agree(level, per_token):
    """hidden [B, T, D] with [B, T] tensors, and hidden [N, D] with [N] tensors, both requiring grad."""
    case = oracle.make_case((5, 5, 5), per_token_temperature=True)
    if not per_token:
        case = replace(case, advantages=torch.randn(3).double())
    knobs = {"loss_type": "grpo", "importance_sampling_level": level, "beta": 0.1}
    packed, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    padded = {name: tensor.view(3, 5) for name, tensor in case.rest().items() if tensor.shape == (15,)}
    padded["advantages"] = case.advantages.view(3, 5) if per_token else case.advantages
    hidden = case.hidden.view(3, 5, -1).clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    output = linear_grpo_loss(hidden, weight, **padded, **knobs)
    output.loss.backward()
    assert torch.equal(output.loss, packed.loss)
    assert torch.equal(output.logps, packed.logps.view(3, 5)) and torch.equal(output.active, case.mask.view(3, 5))
    assert torch.equal(hidden.grad, gradients["hidden"].view(3, 5, -1)) and torch.equal(
        weight.grad, gradients["weight"]
    )


def test_padded_grpo_loss_agrees_with_packed():
    logps, old = torch.randn(2, 3, 4).unbind()
    for advantages in (torch.randn(3), torch.randn(3, 4)):
        padded = grpo_loss(logps, old, advantages, loss_type="grpo")
        flat = advantages if advantages.ndim == 1 else advantages.flatten()
        packed = grpo_loss(logps.flatten(), old.flatten(), flat, cu_seqlens=[0, 4, 8, 12], loss_type="grpo")
        assert torch.equal(padded.loss, packed.loss) and torch.equal(padded.logps.flatten(), packed.logps)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_targets_of_any_integer_type(dtype):
    case = oracle.make_case(dtype=torch.float32)
    expected, gradients = oracle.run(case, linear_grpo_loss)
    output, actual = oracle.run(replace(case, targets=case.targets.to(dtype)), linear_grpo_loss)
    assert torch.equal(output.loss, expected.loss) and torch.equal(actual["weight"], gradients["weight"])
    logps = linear_logprob(case.hidden, case.weight, case.targets.to(dtype))
    assert torch.equal(logps, linear_logprob(case.hidden, case.weight, case.targets))


@pytest.mark.parametrize("name", ["advantages", "old_logps", "ref_logps", "temperature", "token_weights", "mask"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@oracle.CHUNKS
def test_per_token_tensors_of_another_float_type(monkeypatch, name, dtype, chunk):
    """fp32 or bf16 hidden states beside fp64 rewards, or bf16 log-probs of a sampler."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(dtype=torch.float32, per_token_temperature=True)
    arguments = {**case.rest(), "token_weights": torch.rand(16), "beta": 0.1}
    arguments[name] = arguments[name].to(dtype)
    head = case.head()
    output = linear_grpo_loss(**head, **arguments)
    output.loss.backward()
    rounded = linear_grpo_loss(**case.head(), **{**arguments, name: arguments[name].float()})
    assert output.loss.dtype == output.logps.dtype == torch.float32
    torch.testing.assert_close(output.loss, rounded.loss)
    assert head["hidden"].grad.isfinite().all()


@oracle.CHUNKS
@pytest.mark.parametrize("knobs", oracle.OBJECTIVES)
def test_sum_over_micro_batches_is_the_whole_batch(monkeypatch, knobs, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(bias=True)
    weights = Objective(**knobs).token_weights(case.mask, case.cu_seqlens)
    whole, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    head, losses = case.head(), []
    for first, last in ((0, 1), (1, 3), (3, 4)):
        start, end = case.cu_seqlens[first].item(), case.cu_seqlens[last].item()
        part = {name: value[start:end] for name, value in case.rest().items()
                if isinstance(value, torch.Tensor) and name != "cu_seqlens"}  # fmt: skip
        output = linear_grpo_loss(
            head["hidden"][start:end],
            head["weight"],
            bias=head["bias"],
            **part,
            cu_seqlens=case.cu_seqlens[first : last + 1] - start,
            token_weights=weights[start:end],
            temperature=case.temperature,
            **knobs,
        )
        output.loss.backward()
        losses.append(output.loss.detach())
    torch.testing.assert_close(sum(losses), whole.loss.detach())
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)


def test_dapo_sums_over_micro_batches_by_num_items_in_batch():
    case = oracle.make_case((6, 6), masked=0.3)
    whole, _ = oracle.run(case, linear_grpo_loss)
    halves = []
    for part in (slice(0, 6), slice(6, 12)):
        per_token = {name: value[part] for name, value in case.rest().items() if getattr(value, "shape", 0) == (12,)}
        halves.append(linear_grpo_loss(case.hidden[part], case.weight, **per_token, temperature=case.temperature,
                                       num_items_in_batch=case.mask.sum()).loss)  # fmt: skip
    torch.testing.assert_close(sum(halves), whole.loss.detach())
