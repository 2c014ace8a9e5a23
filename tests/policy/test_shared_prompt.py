"""One prompt for all its completions: the same loss, log-probs and gradients as a prompt each, at fewer tokens."""

from functools import partial

import pytest
import tiny
import torch

from fastgrpo.data.records import Batch, Sample
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.objective import Objective
from fastgrpo.policy import varlen
from fastgrpo.policy.device import cast
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, make_reference, score
from fastgrpo.policy.varlen import PaddedAttention
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import GRPOUpdate, Learner

ARCHITECTURES = ("qwen2", "qwen3", "llama")


def make_groups(seed=0):
    """Ragged groups: one of a single sample, one with completions of one token, one with nothing but such."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(2, 64, (n,), generator=generator).tolist()

    groups = []
    for prompt, completions in ((9, (4, 1, 7, 2)), (3, (5,)), (1, (3, 3, 8)), (6, (1, 1)), (14, (2, 6))):
        prompt = ids(prompt)
        advantages = torch.randn(len(completions), generator=generator).tolist()
        groups.append([Sample(prompt, ids(n), a) for n, a in zip(completions, advantages, strict=True)])
    return groups


def flat(groups):
    return [sample for group in groups for sample in group]


def make_model(architecture, **options):
    """In fp64, the norms too, which transformers computes in fp32: what is left between two forwards is rounding."""
    model = tiny.model(architecture, **options).double()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(rms_norm, module.weight, module.variance_epsilon)
    return model


def rms_norm(weight, epsilon, states):
    return weight * states * (states.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernel", ["cpu", "math"])
def test_log_probs_and_gradients(architecture, checkpointing, kernel, monkeypatch):
    monkeypatch.setattr(varlen, "kernel_for", lambda query: PaddedAttention(kernel))
    model = make_model(architecture, gradient_checkpointing=checkpointing)
    samples = flat(make_groups())
    weight, bias, _ = Policy.of(model).head
    mixed = torch.randn(sum(len(sample.ids) for sample in samples), dtype=torch.float64)
    results = []
    for share_prompt in (True, False):
        batch = Batch.pack(samples, "cpu", share_prompt)
        assert bool(batch.branches) == share_prompt
        logps = linear_logprob(Policy.of(model).completion_states(batch), weight, batch.targets, bias=bias)
        assert logps.dtype == torch.float64
        (logps * mixed).sum().backward()
        results.append((logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        model.zero_grad()
    (logps, gradients), (expected_logps, expected) = results
    torch.testing.assert_close(logps, expected_logps, atol=1e-10, rtol=1e-10)
    assert len(expected) > 10
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(gradients[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


def test_log_probs_against_transformers():
    """The packing of both kinds could be wrong in the same way: here is each sequence alone through its own forward."""
    model = make_model("qwen2")
    samples = flat(make_groups())
    for sample, logps in zip(samples, score(Policy.of(model), samples, Scoring(1.0, 10_000)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sample.prompt_ids + sample.ids])).logits[0]
        every = logits.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        expected = every.gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
        torch.testing.assert_close(logps, expected, atol=1e-10, rtol=1e-10)


def make_update(share_prompt, max_tokens=10_000, checkpointing=False, **settings):
    objective = Objective(beta=0.1)
    model = make_model("llama", gradient_checkpointing=checkpointing)
    reference = make_reference(Policy.of(model), objective.beta)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * 0.02)
    optimizer = MasterAdamW(model, learning_rate=1e-3)
    schedule = make_schedule(optimizer, "constant", warmup_steps=0, total_steps=9)
    learner = Learner(
        Policy.of(model), optimizer, schedule, max_grad_norm=1.0, max_tokens=max_tokens, share_prompt=share_prompt
    )
    return GRPOUpdate(Policy.of(model), reference, learner, objective, temperature=0.9, **settings)


@pytest.mark.parametrize("max_tokens, checkpointing", [(10_000, False), (10_000, True), (30, False), (12, False)])
def test_updates_with_old_and_reference_log_probs(max_tokens, checkpointing):
    """Two passes over two minibatches, whole and split into micro-batches, amid groups too."""
    settings = {"updates_per_rollout": 2, "num_iterations": 2}
    update = make_update(True, max_tokens, checkpointing, **settings)
    expected = make_update(False, **settings)
    metrics, expected_metrics = update(make_groups())[1], expected(make_groups())[1]
    assert expected_metrics["kl"] > 1e-3 and expected_metrics["grad_norm"] > 1e-3
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for name, parameter in expected.policy.module.named_parameters():
        torch.testing.assert_close(update.policy.module.get_parameter(name), parameter, atol=1e-9, rtol=1e-9, msg=name)


class TokenCount:
    """Tokens that go through a model's first layer."""

    def __init__(self, model):
        self.tokens = 0
        model.base_model.layers[0].register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.tokens += args[0].shape[1]


@pytest.mark.parametrize("share_prompt", [True, False])
def test_tokens_through_the_layers(share_prompt):
    """P + sum(C_i - 1) a group, for the policy, the old log-probs and the reference; or a prompt a sample."""
    update = make_update(share_prompt, updates_per_rollout=2)
    policy, reference = TokenCount(update.policy.module), TokenCount(update.reference.policy.module)
    groups = make_groups()
    update(groups)

    def tokens(groups):
        prompts = (len(group[0].prompt_ids) * (1 if share_prompt else len(group)) for group in groups)
        return sum(prompts) + sum(len(sample.ids) - 1 for sample in flat(groups))

    assert reference.tokens == tokens(groups)
    assert policy.tokens == tokens(groups) + tokens(groups[2:])  # the second minibatch has old log-probs to be made


def test_samples_that_left_take_their_branches_along():
    update = make_update(True)
    policy = TokenCount(update.policy.module)
    update.teaches = lambda sample: len(sample.ids) > 3
    update(make_groups())
    assert policy.tokens == (9 + 3 + 6) + (3 + 4) + (1 + 7) + (14 + 5)


def test_a_sliding_window_holds_prompt_and_branch():
    model = tiny.model("mistral", sliding_window=8)
    samples = [Sample([5, 6, 7, 8], [9] * n, 0.0) for n in (5, 3)]
    assert Policy.of(model).completion_states(Batch.pack(samples, "cpu")).isfinite().all()
    samples.append(Sample([5, 6, 7, 8], [9] * 6, 0.0))
    with pytest.raises(ValueError, match=r"9 tokens exceeds the sliding window of 8"):
        Policy.of(model).completion_states(Batch.pack(samples, "cpu"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Flash Attention defaults to a non-deterministic algorithm")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_on_cuda_in_bf16(architecture):
    """Against the same weights in fp64 on the CPU: sharing is no less exact than a prompt a sample."""
    model = tiny.model(architecture, hidden_size=64)
    exact = score(
        Policy.of(tiny.model(architecture, hidden_size=64).double()), flat(make_groups()), Scoring(1.0, 10_000)
    )
    cast(model.to("cuda"), torch.bfloat16)
    errors = []
    for share_prompt in (True, False):
        logps = score(Policy.of(model), flat(make_groups()), Scoring(1.0, 10_000, share_prompt))
        errors.append(torch.cat([a.cpu() - b for a, b in zip(logps, exact, strict=True)]).abs().mean())
    assert errors[0] < 1.5 * errors[1] + 1e-3
