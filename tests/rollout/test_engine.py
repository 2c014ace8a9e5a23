"""Generation: greedy tokens against transformers' own generate, log-probs against a teacher-forced forward, draws."""

import pytest
import tiny
import torch
from drawing import PROMPTS, greedy_of_transformers

from fastgrpo.data.records import Sample
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.rollout import engine as engine_module
from fastgrpo.rollout.attention import GroupDecode
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams, filter_logps


class Untrusted(GroupDecode):
    """The kernel's provider where its self-check fails: the plain parts take over."""

    def _trusted(self, query, cache, scale):
        return False


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("group_size", [1, 3, 16])
def test_greedy_equals_generate(backend, architecture, group_size):
    model = tiny.model(architecture)
    stop = (1, 20, 33)
    sampling = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=stop)
    rollouts = backend(model).generate(PROMPTS, group_size, sampling)
    reasons = set()
    for i, prompt in enumerate(PROMPTS):
        expected = greedy_of_transformers(model, prompt, 24, stop)
        for rollout in rollouts[i * group_size : (i + 1) * group_size]:
            assert rollout.ids == expected
            assert rollout.finish_reason == ("stop" if expected[-1] in stop else "length")
            reasons.add(rollout.finish_reason)
    assert len(rollouts) == len(PROMPTS) * group_size


def test_both_finish_reasons(backend):
    model = tiny.model()
    first = greedy_of_transformers(model, PROMPTS[0], 40, ())
    stop = (first[7],)
    rollouts = backend(model).generate(PROMPTS, 2, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=stop))
    assert rollouts[0].ids == first[: first.index(stop[0]) + 1]
    assert rollouts[0].finish_reason == "stop"
    by_length = [rollout for rollout in rollouts if rollout.finish_reason == "length"]
    assert by_length and all(len(rollout.ids) == 40 and stop[0] not in rollout.ids for rollout in by_length)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampled_logps_equal_a_teacher_forced_forward(backend, temperature):
    model = tiny.model("llama")
    sampling = SamplingParams(temperature=temperature, max_tokens=30, stop_token_ids=(1, 2, 3, 4, 5), seed=7)
    rollouts = backend(model, max_num_seqs=13).generate(PROMPTS, 6, sampling)
    assert len({len(rollout.ids) for rollout in rollouts}) > 3  # rows left at different times
    samples = [Sample(PROMPTS[i // 6], rollout.ids, 1.0) for i, rollout in enumerate(rollouts)]
    for logps, rollout in zip(score(Policy.of(model), samples, Scoring(temperature, 100)), rollouts, strict=True):
        assert rollout.logps.dtype == torch.float32
        torch.testing.assert_close(logps, rollout.logps, atol=1e-5, rtol=0)


def test_the_models_own_generation_settings_change_no_draw(backend):
    """Only stop tokens are read from them (`stop_token_ids`): under a penalty or a filter that nobody asked for, draws
    and log-probs would not be the policy's."""
    plain, model = tiny.model(), tiny.model()
    own = {"repetition_penalty": 1.9, "typical_p": 0.3, "min_p": 0.2, "no_repeat_ngram_size": 1, "eos_token_id": 5}
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=12, seed=3)
        expected, seen = (backend(each).generate(PROMPTS, 2, sampling) for each in (plain, model))
        assert [rollout.ids for rollout in seen] == [rollout.ids for rollout in expected]
        assert all(torch.equal(a.logps, b.logps) for a, b in zip(seen, expected, strict=True))
    assert model.generation_config.repetition_penalty == 1.9


def test_the_seed_decides(backend):
    rollouts = backend(tiny.model())

    def ids(seed):
        sampling = SamplingParams(max_tokens=12, stop_token_ids=(1,), seed=seed)
        return [rollout.ids for rollout in rollouts.generate(PROMPTS, 4, sampling)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_without_a_seed_torchs_global_one_decides(backend):
    rollouts = backend(tiny.model())

    def ids():
        return [rollout.ids for rollout in rollouts.generate(PROMPTS, 2, SamplingParams(max_tokens=12))]

    torch.manual_seed(5)
    first = ids()
    assert ids() != first
    torch.manual_seed(5)
    assert ids() == first


@pytest.mark.parametrize("filters", [{"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}], ids=str)
def test_the_mass_that_filters_kept(backend, filters):
    model = tiny.model("llama")
    rollouts = backend(model, max_num_seqs=7)
    rollouts.generate(PROMPTS, 3, SamplingParams(max_tokens=4, seed=1))  # lanes that kept no such record
    sampling = SamplingParams(temperature=1.3, max_tokens=12, stop_token_ids=[1, 2, 3], seed=1, **filters)
    for i, rollout in enumerate(rollouts.generate(PROMPTS, 3, sampling)):
        prompt = PROMPTS[i // 3]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + rollout.ids])).logits[0, len(prompt) - 1 : -1]
        kept = filter_logps(torch.log_softmax(logits / 1.3, -1), **filters).exp()
        mass = (rollout.logps - rollout.sampler_logps).exp()
        torch.testing.assert_close(mass, kept.sum(-1), atol=1e-5, rtol=0)
        assert (kept[range(len(rollout.ids)), rollout.ids] > 0).all()
    greedy = SamplingParams(temperature=0, max_tokens=4)
    assert all(rollout.sampler_logps is rollout.logps for rollout in rollouts.generate(PROMPTS, 1, greedy))


@pytest.mark.parametrize("attention", ["sdpa", "products"])
def test_draws_do_not_depend_on_the_batch(attention):
    model, sampling = tiny.model("qwen3"), SamplingParams(max_tokens=20, stop_token_ids=(1, 2, 3), seed=4)
    together = RolloutEngine(model, attention=attention).generate(PROMPTS, 3, sampling)
    few = RolloutEngine(model, max_num_seqs=4, attention=attention)
    for i in reversed(range(4)):
        few.add_request(PROMPTS[i], 3, sampling, request_id=i)
    outputs = {}
    while few.has_unfinished_requests():
        outputs |= few.step()
    for i in range(4):
        assert [rollout.ids for rollout in outputs[i]] == [rollout.ids for rollout in together[3 * i : 3 * i + 3]]


def test_auto_changes_the_layout_from_rollout_to_rollout(monkeypatch):
    monkeypatch.setattr("fastgrpo.rollout.attention.FEW_COPIES", 2 * sum(map(len, PROMPTS)))
    model, sampling = tiny.model("llama"), SamplingParams(max_tokens=20, seed=4)
    engine, layouts = RolloutEngine(model), []
    for group in (4, 1, 3, 4):
        drawn = engine.generate(PROMPTS, group, sampling)
        fresh = RolloutEngine(model, attention="sdpa").generate(PROMPTS, group, sampling)
        assert [rollout.ids for rollout in drawn] == [rollout.ids for rollout in fresh]
        layouts.append(engine.geometry.flat)
    assert layouts == [False, True, True, False]


def test_a_shorter_limit_changes_no_draw():
    model = tiny.model()
    longer, shorter = (
        RolloutEngine(model).generate(PROMPTS, 3, SamplingParams(max_tokens=length, seed=4)) for length in (20, 7)
    )
    assert [rollout.ids[:7] for rollout in longer] == [rollout.ids for rollout in shorter]


def test_head_gives_fp32_logits_of_a_bf16_model():
    model = tiny.model().bfloat16()
    states = torch.randn(5, 32, dtype=torch.bfloat16)
    logits = Policy.of(model).logits(states)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, states.float() @ Policy.of(model).head.weight.float().T)


@pytest.mark.parametrize("attention", ["sdpa", "products", "triton"])
@pytest.mark.parametrize("how", [{}, {"top_k": 9, "repetition_penalty": 1.3}], ids=str)
def test_tokens_appended_at_once_equal_tokens_appended_one_at_a_time(monkeypatch, attention, how):
    model, sampling = tiny.model("qwen3"), SamplingParams(max_tokens=20, seed=6, **how)
    answers = {1: [5, 9, 9, 4, 31], 4: [8], 2: [17, 2]}  # by lane
    if attention == "triton":
        monkeypatch.setattr(engine_module, "make_provider", lambda *_: Untrusted())
    rollouts = []
    for at_once in (True, False):
        engine = RolloutEngine(model, attention="auto" if attention == "triton" else attention)
        for i, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(prompt, 2, sampling, request_id=i)
        for _ in range(3):
            engine.step()
        for given in [answers] if at_once else [{lane: [token]} for lane, ids in answers.items() for token in ids]:
            engine.append(given)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= engine.step()
        rollouts.append([each for i in sorted(outputs) for each in outputs[i]])
    for lane, (together, single) in enumerate(zip(*rollouts, strict=True)):
        given = answers.get(lane, [])
        assert together.ids == single.ids and len(together.ids) == 20 and together.ids[4 : 4 + len(given)] == given
        torch.testing.assert_close(together.logps, single.logps, atol=1e-5, rtol=0)
        own = [t for t in range(20) if not 4 <= t < 4 + len(given)]
        samples = [Sample(PROMPTS[lane // 2], together.ids, 1.0)]
        (forced,) = score(Policy.of(model), samples, Scoring(1.0, 100))
        torch.testing.assert_close(together.logps[own], forced[own], atol=1e-5, rtol=0)
        assert not together.logps[4 : 4 + len(given)].any()
