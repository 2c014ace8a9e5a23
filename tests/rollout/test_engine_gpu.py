"""The engine on a CUDA device, in bf16: graphs, providers, log-probs, host syncs."""

import dataclasses

import pytest
import tiny
import torch
from drawing import finish, ids_of

from fastgrpo.data.records import Sample
from fastgrpo.policy.device import cast
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.rollout.attention import PROVIDERS, _obstacle
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.mapped import works
from fastgrpo.rollout.sampling import SamplingParams

pytestmark = pytest.mark.gpu
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 1024,
}  # fmt: skip


def model_and_prompts(dtype=torch.bfloat16, **shape):
    model = tiny.model("qwen2", **SHAPE | shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2)
    prompts = torch.randint(5, 1000, (12, 100), generator=torch.Generator().manual_seed(0))
    cast(model.cuda(), dtype)
    return model, [prompt[: 20 + 6 * i].tolist() for i, prompt in enumerate(prompts)]


def provider_or_skip(name):
    obstacle = _obstacle(name, torch.device("cuda"), torch.bfloat16, 64)
    if obstacle:
        pytest.skip(f"{name} {obstacle}")


@pytest.mark.parametrize("attention", PROVIDERS)
def test_graphs_change_no_token(attention):
    provider_or_skip(attention)
    model, prompts = model_and_prompts()
    greedy = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=tuple(range(40)), seed=2)
    options = {"max_num_seqs": 40, "attention": attention}
    eager, graphed = (RolloutEngine(model, **options, enforce_eager=eager) for eager in (True, False))
    for sampling in (greedy, dataclasses.replace(greedy, temperature=1.2)):
        penalized = dataclasses.replace(sampling, repetition_penalty=1.4)
        for how in (sampling, penalized, sampling, penalized):
            expected, seen = (engine.generate(prompts, 8, how) for engine in (eager, graphed))
            assert ids_of(seen) == ids_of(expected)
            for one, other in zip(seen, expected, strict=True):
                torch.testing.assert_close(one.sampler_logps, other.sampler_logps, atol=1e-5, rtol=0)
    assert graphed.graphs.graphs and not eager.graphs.graphs


@pytest.mark.parametrize("attention", PROVIDERS)
def test_logps_are_as_near_as_two_forwards_of_other_shapes(attention):
    provider_or_skip(attention)
    model, prompts = model_and_prompts()
    rollouts = RolloutEngine(model, attention=attention).generate(prompts, 8, SamplingParams(max_tokens=80, seed=1))
    samples = [Sample(prompts[i // 8], rollout.ids, 1.0) for i, rollout in enumerate(rollouts)]
    together = torch.cat(score(Policy.of(model), samples, Scoring(1.0, 10**6)))
    alone = torch.cat(score(Policy.of(model), samples, Scoring(1.0, 1, share_prompt=False)))
    drawn = torch.cat([rollout.logps for rollout in rollouts]).cuda()
    bound = (together - alone).abs()
    gap = (drawn - together).abs()
    assert gap.mean() <= 1.5 * bound.mean() + 1e-5
    assert gap.max() <= 2 * bound.max() + 1e-4


@pytest.mark.parametrize("sleeps", [False, True])
def test_fp32_logps_equal_a_teacher_forced_forward(sleeps):
    model, prompts = model_and_prompts(torch.float32, num_hidden_layers=16)  # 128 tokens a page of 2 MiB
    engine, preempted = RolloutEngine(model, enable_sleep_mode=sleeps), 0
    engine.budget = 120 * 2**21  # 15 of the 48 completions at full length
    for stops, grows in ((9, False), (2, True), (9, True)):
        rollouts = engine.generate(prompts, 4, SamplingParams(max_tokens=900, stop_token_ids=range(stops), seed=stops))
        samples = [Sample(prompts[i // 4], rollout.ids, 1.0) for i, rollout in enumerate(rollouts)]
        scored = torch.cat(score(engine.policy, samples, Scoring(1.0, 20_000)))
        torch.testing.assert_close(torch.cat([each.logps for each in rollouts]).cuda(), scored, atol=2e-5, rtol=0)
        assert bool(engine.geometry.pages) == grows and len(rollouts) == 48
        preempted += engine.metrics().get("rollout/preemptions", 0)
        held, free = engine.beside, torch.cuda.mem_get_info()[0]
        if sleeps:
            engine.sleep()
            assert engine.beside == 0 and torch.cuda.mem_get_info()[0] >= free + held > free
    del engine
    assert preempted and (sleeps or torch.cuda.mem_get_info()[0] > free)


def test_graphs_follow_weights_filters_and_geometry():
    assert works(torch.device("cuda", 0))
    model, prompts = model_and_prompts()
    model = add_lora(model, r=4, target_modules="all-linear")
    eager, graphed = (RolloutEngine(model, enforce_eager=eager, enable_sleep_mode=True) for eager in (True, False))
    greedy, drawn = SamplingParams(temperature=0, max_tokens=24), SamplingParams(max_tokens=24, top_p=0.9, seed=2)

    def check(n, sampling):
        expected, seen = (engine.generate(prompts, n, sampling) for engine in (eager, graphed))
        assert ids_of(seen) == ids_of(expected)
        captured, held, (free, _) = len(graphed.graphs.graphs), graphed.mapped.bytes, torch.cuda.mem_get_info()
        for engine in (graphed, eager):
            engine.sleep()
        assert len(graphed.graphs.graphs) == captured > 0 and torch.cuda.mem_get_info()[0] >= free + held > free

    for n, sampling in ((8, drawn), (1, greedy), (8, drawn), (8, greedy)):
        check(n, sampling)
    tiny.stir(model, std=0.02)
    check(8, greedy)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.05
    check(8, greedy)


def test_a_step_that_waits_for_the_device_names_the_remedy(monkeypatch):
    model, prompts = model_and_prompts()
    engine, rotary = RolloutEngine(model), model.base_model.rotary_emb  # it looks for syncs before its first step
    forward = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, positions: forward(x, positions + 0 * positions.sum().item()))
    with pytest.raises(ValueError, match="use --rollout_backend eager"):
        engine.generate(prompts, 2, SamplingParams(temperature=0, max_tokens=24))


def test_no_host_sync_in_a_prefill_and_between_looks():
    model, prompts = model_and_prompts()
    sampling = SamplingParams(max_tokens=60, seed=1, top_k=50, top_p=0.9, min_p=0.01)
    engine = RolloutEngine(model, max_num_seqs=96)
    engine.generate(prompts, 8, sampling)  # kernels are compiled
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, 8, sampling, request_id=i)
    engine._begin()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._admit()
        for _ in range(8):
            engine._decode(96)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    finish(engine)
