"""Models that packed attention cannot run train by their own attention over padded sequences."""

import pytest
import tiny
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.load import prepare
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

SHAPE = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
WINDOW = 6


def make_model(name, **how):
    torch.manual_seed(0)
    if name == "soft cap":  # low enough to bend scores of this size
        config = Gemma2Config(
            **SHAPE, final_logit_softcapping=2.0, attn_logit_softcapping=0.5, sliding_window=256,
            query_pre_attn_scalar=8,
        )  # fmt: skip
        model = Gemma2ForCausalLM(config)
    else:
        model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return prepare(model, **how)


def make_samples():
    """Groups of several completions, of one, and of completions of a single token."""
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(2, 258, (n,), generator=generator).tolist()

    groups = [(ids(9), (4, 1, 17)), (ids(2), (5,)), (ids(6), (1, 1)), (ids(30), (2, 8))]
    return [Sample(prompt, ids(n), 1.0) for prompt, lengths in groups for n in lengths]


@pytest.mark.parametrize("name", ["soft cap", "window"])
@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_states_and_gradients_are_those_of_each_sequence_alone(name, share_prompt, checkpointing):
    policy = make_model(name, gradient_checkpointing=checkpointing, own_attention=True)
    model, samples = policy.module, make_samples()
    states = policy.completion_states(Batch.pack(samples, "cpu", share_prompt))
    mixed = torch.randn_like(states)
    (states * mixed).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    alone = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.ids])
        out = model.base_model(ids, use_cache=False).last_hidden_state[0]
        alone.append(out[len(sample.prompt_ids) - 1 : -1])
    alone = torch.cat(alone)
    torch.testing.assert_close(states, alone, atol=2e-5, rtol=1e-4)
    (alone * mixed).sum().backward()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, atol=1e-3, rtol=1e-3, msg=parameter)


def test_the_cap_and_the_window_count():
    """Without the cap or the window the states differ, so the tests above would notice if either were left out."""
    ids = torch.tensor([make_samples()[0].prompt_ids])
    for name, knob in (("soft cap", "attn_logit_softcapping"), ("window", "sliding_window")):
        model = make_model(name, own_attention=True).module
        with torch.no_grad():
            before = model.base_model(ids, use_cache=False).last_hidden_state
            for module in (model, *model.modules()):
                for owner in (module, getattr(module, "config", None)):
                    if hasattr(owner, knob):
                        setattr(owner, knob, None)
            after = model.base_model(ids, use_cache=False).last_hidden_state
        assert (before - after).abs().max() > 0.01, name


def test_within_its_window_a_model_is_packed():
    policy = make_model("window")
    assert not policy.own_attention
    assert not prepare(tiny.model(), own_attention=True).own_attention
    sampling = SamplingParams(max_tokens=3, seed=0)
    engine = RolloutEngine(policy)
    assert len(engine.generate([[5, 6, 7]], 2, sampling)) == 2
    with pytest.raises(
        ValueError, match=r"4 tokens; with max_tokens=3 it exceeds the sliding window of 6 .*--rollout_backend hf"
    ):
        engine.generate([[5, 6, 7], [5, 6, 7, 8]], 2, sampling)
    assert len(engine.generate([[5, 6, 7]], 2, sampling)) == 2  # the refused requests have left the engine


@pytest.mark.parametrize("name", ["soft cap", "window"])
def test_two_training_steps(tmp_path, name):
    def reward(completions, **_):
        return [float(len(set(text))) for text in completions]

    settings = GRPOConfig(
        output_dir=str(tmp_path / "run"), rollout_backend="hf", max_steps=2, prompts_per_step=2, num_generations=4,
        max_completion_length=12, learning_rate=1e-2, lr_scheduler_type="constant", beta=0.1, device="cpu",
        gradient_checkpointing=False,
    )  # fmt: skip
    model = make_model(name, own_attention=True).module
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rows = [{"prompt": "hello "}, {"prompt": "abc"}]
    trainer = GRPOTrainer(model, reward, settings, rows, processing_class=tiny.tokenizer())
    values = [trainer.step() for _ in range(2)]
    assert all(value["rollout/logp_gap"] < 1e-5 and value["grad_norm"] > 0 for value in values)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if name == "soft cap":
        with pytest.raises(ValueError, match="soft-capped attention: use --rollout_backend hf"):
            make_model(name)
