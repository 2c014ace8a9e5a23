"""Packed samples, padded samples and any micro-batches give what each sample gives alone, forward and backward."""

from functools import cache, partial
from unittest import mock

import pytest
import tiny
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from runs import logps_of
from updates import gradients

from benchmarks.architectures import tiny_model
from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.device import cast
from fastgrpo.policy.load import prepare
from fastgrpo.policy.micro_batches import micro_batches
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.policy.varlen import PaddedAttention

SHAPES = ((9, (4, 1, 7, 2)), (3, (5,)), (1, (3, 3, 8)), (6, (1, 1)), (14, (2, 6)))  # a prompt, and its completions


def make_samples(shapes=SHAPES):
    ids = partial(torch.randint, 2, 64, generator=torch.Generator().manual_seed(0))
    groups = [(ids((prompt,)).tolist(), lengths) for prompt, lengths in shapes]
    return [Sample(prompt, ids((n,)).tolist(), 1.0) for prompt, lengths in groups for n in lengths]


def rms_norm(weight, epsilon, states):
    return weight * states * (states.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()


@cache
def exact_model(architecture, checkpointing):
    """In fp64, the norms too, which transformers computes in fp32: what is left between two forwards is rounding."""
    model = tiny.model(architecture, gradient_checkpointing=checkpointing).double()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(rms_norm, module.weight, module.variance_epsilon)
    return model


def alone(model, samples, mixed):
    """Log-probs of each sample by transformers' own forward pass, and the gradients of the sum of mixed * log-prob."""
    logps = []
    for sample, factors in zip(samples, mixed, strict=True):
        logps.append(logps_of(model, sample))
        (logps[-1] * factors).sum().backward()
    return [values.detach() for values in logps], gradients(model)


def in_micro_batches(policy, samples, mixed, budget, share_prompt):
    logps = {}
    for indices in micro_batches(samples, budget, share_prompt):
        found = policy.logps(Batch.pack([samples[i] for i in indices], "cpu", share_prompt))
        (found * torch.cat([mixed[i] for i in indices])).sum().backward()
        logps |= dict(zip(indices, found.detach().split([len(samples[i].ids) for i in indices]), strict=True))
    return [logps[i] for i in range(len(samples))], gradients(policy.module)


LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1,
                   max_size=4)  # fmt: skip


ARCHITECTURES = ["qwen2", "qwen3", "llama", "mistral", "smollm3"]


@pytest.mark.parametrize(
    "architecture, how", [*((name, "shared") for name in ARCHITECTURES), ("qwen3", "repeated"), ("llama", "padded")]
)
@settings(max_examples=4, phases=[Phase.generate])  # to shrink what fails takes minutes
@given(LENGTHS, st.sampled_from([10_000, 30, 12, 1]), st.booleans(), st.sampled_from(["cpu", "math"]))
def test_packed_log_probs_and_gradients_equal_padded_ones(architecture, how, shapes, budget, checkpointing, kernel):
    model, samples = exact_model(architecture, checkpointing), make_samples(((1, (3, 2)), *shapes, SHAPES[0]))
    mixed = [torch.randn(len(sample.ids), dtype=torch.float64) for sample in samples]
    expected_logps, expected = alone(model, samples, mixed)
    with mock.patch("fastgrpo.policy.varlen.kernel_for", lambda query: PaddedAttention(kernel)):
        policy = Policy(model, own_attention=how == "padded")
        logps, found = in_micro_batches(policy, samples, mixed, budget, how != "repeated")
    torch.testing.assert_close(logps, expected_logps, atol=1e-10, rtol=1e-10)
    assert found.keys() == expected.keys() and len(found) > 10
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


def special_model(name, **how):
    """A model that packed attention cannot run: a cap low enough to bend the scores, or a window of 6 tokens."""
    caps = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "sliding_window": 256}
    model = tiny_model("gemma2", **caps) if name == "soft cap" else tiny_model("mistral", sliding_window=6)
    return prepare(model, **how)


@torch.no_grad()
@pytest.mark.parametrize("name, knob", [("soft cap", "attn_logit_softcapping"), ("window", "sliding_window")])
def test_the_models_own_attention_has_its_cap_and_its_window(name, knob):
    ids, model = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]]), special_model(name, own_attention=True).module
    before = model.base_model(ids, use_cache=False).last_hidden_state
    for owner in [*model.modules(), *(module.config for module in model.modules() if hasattr(module, "config"))]:
        if hasattr(owner, knob):
            setattr(owner, knob, None)
    assert (before - model.base_model(ids, use_cache=False).last_hidden_state).abs().max() > 0.01


def packed(sequences):
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return ids, positions, PackedAttention([len(sequence) for sequence in sequences], "cpu")


def test_a_sliding_window_holds_prompt_and_branch():
    policy = special_model("window")
    assert policy.window == policy.longest == 6 and not policy.own_attention
    states = policy.states(*packed([[5, 6, 7, 8], [9, 10]]))
    expected = policy.module.base_model(torch.tensor([[9, 10]]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(states[4:], expected, atol=2e-5, rtol=1e-4)
    samples = [Sample([5, 6, 7, 8], [9] * n, 0.0) for n in (3, 2)]
    assert policy.completion_states(Batch.pack(samples, "cpu")).isfinite().all()
    samples.append(Sample([5, 6, 7, 8], [9] * 4, 0.0))
    with pytest.raises(ValueError, match="sliding window of 6"):
        policy.completion_states(Batch.pack(samples, "cpu"))
    policy.check_prompt([5] * 4, 2, "the prompt")
    with pytest.raises(ValueError, match="sliding window of 6"):
        policy.check_prompt([5] * 4, 3, "the prompt")
    own = special_model("window", own_attention=True)
    assert own.own_attention and own.window is None


def test_layers_are_checkpointed_only_where_there_is_a_backward():
    policy = Policy.of(tiny.model(gradient_checkpointing=True))
    layer, calls = policy.module.base_model.layers[0], []
    layer._gradient_checkpointing_func = lambda f, *a, **k: calls.append(1) or f(*a, **k)
    with torch.no_grad():
        policy.states(*packed([[5, 6, 7]]))
    assert not calls
    policy.states(*packed([[5, 6, 7]]))
    assert calls == [1] and not any(module.training for module in policy.module.modules())


def test_dropout_is_off_everywhere():
    model = tiny.model(attention_dropout=0.5, gradient_checkpointing=True)
    assert torch.equal(*[Policy.of(model).states(*packed([[5, 6, 7]])) for _ in range(2)])
    model.extra = torch.nn.Sequential(torch.nn.Dropout(0.5))
    prepare(model)
    assert model.extra[0].p == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Flash Attention defaults to a non-deterministic algorithm")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_packed_equals_padded_on_cuda_in_bf16(architecture):
    model, samples = tiny.model(architecture, hidden_size=64), make_samples()
    exact = score(Policy.of(tiny.model(architecture, hidden_size=64).double()), samples, Scoring(1.0, 10_000))
    cast(model.to("cuda"), torch.bfloat16)
    errors = []
    for share_prompt in (True, False):
        logps = score(Policy.of(model), samples, Scoring(1.0, 10_000, share_prompt))
        errors.append(torch.cat([a.cpu() - b for a, b in zip(logps, exact, strict=True)]).abs().mean())
    assert errors[0] < 1.5 * errors[1] + 1e-3
