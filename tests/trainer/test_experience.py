"""What a step trains on: dynamic sampling, oversampling, lengths, and how they are counted."""

import dataclasses
import json
import math
import random

import pytest
import runs
import tiny
from drawing import first_groups
from resumed import assert_same_run
from runs import lines
from trl.rewards import get_soft_overlong_punishment

from fastgrpo.data.records import Prompt
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.profiling import STAGES

pytestmark = pytest.mark.usefixtures("without_curves")


def by_plan(completions, spread, **_):
    return [float(i % 2) if differs else 0.25 for i, differs in enumerate(spread)]


def make_trainer(saved, tmp_path, pattern, reward=by_plan, **settings):
    defaults = {"lr_scheduler_type": "constant", "shuffle_dataset": False, "dynamic_sampling": 10}
    given = {"model": str(saved), "learning_rate": 1e-2, **defaults, **settings}
    rows = [{"prompt": f"{i:02d}", "spread": character == "1"} for i, character in enumerate(pattern)]
    return runs.make_trainer(tmp_path, reward, rows, **given)


def stepped(trainer):
    kept, collect = [], trainer.collect
    trainer.collect = lambda: kept.append(collect()) or kept[-1]
    values = trainer.step()
    trainer.collect = collect
    return values, kept[0][0]


def stop_at(trainer, every):
    """Let every so-manieth token end a completion, so that lengths differ."""
    trainer.collector.sampling = dataclasses.replace(trainer.sampling, stop_token_ids=tuple(range(0, 258, every)))


def rows_of(experience, trainer):
    first = [sample for sample in experience if sample.trained][::4]
    return [int(trainer.tokenizer.decode(sample.prompt_ids)) for sample in first]


def test_groups_without_spread_are_replaced(saved, tmp_path):
    trainer = make_trainer(saved, tmp_path, "1001" + "01" + "1" + "1" * 7)
    values, experience = stepped(trainer)
    assert rows_of(experience, trainer) == [0, 3, 5, 6]
    assert values["dynamic_sampling/num_gen_batches"] == 3
    assert values["dynamic_sampling/dropped_groups"] == 3 and values["dynamic_sampling/filled_groups"] == 0
    assert values["frac_informative"] == pytest.approx(4 / 7) == 1 - values["frac_reward_zero_std"]
    assert values["reward"] == pytest.approx((4 * 0.5 + 3 * 0.25) / 7)
    assert values["accuracy"] == pytest.approx(4 / 7 / 2)
    lengths = [len(sample.ids) for sample in experience]
    assert len(lengths) == 28 and values["completions/mean_length"] == sum(lengths) / 28
    assert trainer.state.num_tokens == values["num_tokens"] == sum(lengths) + 2 * 28
    assert trainer.source.drawn == 7 and trainer.state.epoch == 7 / 14
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert [row["group"] for row in samples] == [i // 4 for i in range(28)]
    assert [row["group"] for row in samples if row["advantage"]] == [i for i in (0, 3, 5, 6) for _ in range(4)]
    values, experience = stepped(trainer)
    assert rows_of(experience, trainer) == [7, 8, 9, 10] and trainer.state.epoch == 11 / 14
    assert values["dynamic_sampling/num_gen_batches"] == 1 and values["dynamic_sampling/dropped_groups"] == 0


def test_the_scale_of_advantages_is_that_of_the_trained_groups(saved, tmp_path):
    _, experience = stepped(make_trainer(saved, tmp_path, "1001" + "01" + "1" * 8, scale_rewards="batch"))
    size = 0.5 / (math.sqrt(16 * 0.25 / 15) + 1e-4)  # 16 rewards of 0 and 1
    assert [sample.advantage for sample in experience if sample.trained] == pytest.approx([-size, size] * 8, rel=1e-6)


def test_a_group_is_dropped_if_only_masked_completions_have_advantages(saved, tmp_path):
    def reward(completions, prompts, completion_ids, **_):
        full = [prompt != "00" or len(ids) == 6 for prompt, ids in zip(prompts, completion_ids, strict=True)]
        return [float(i % 2) if given else None for i, given in enumerate(full)]

    trainer = make_trainer(saved, tmp_path, "1" * 10, reward, mask_truncated_completions=True)
    stop_at(trainer, 6)
    values, experience = stepped(trainer)
    first = experience[:4]
    assert {s.informative for s in first if s.truncated} == {True} and not all(s.truncated for s in first)
    assert rows_of(experience, trainer) == [1, 2, 3, 4] and values["dynamic_sampling/dropped_groups"] == 1


def test_the_bound_ends_a_step_and_dropped_groups_fill_up(saved, tmp_path):
    trainer = make_trainer(saved, tmp_path, "0100" + "000" + "0" * 7, dynamic_sampling=2)
    for rows, filled in (([0, 1, 2, 3], 3), ([7, 8, 9, 10], 4)):
        values, experience = stepped(trainer)
        assert rows_of(experience, trainer) == rows
        assert values["dynamic_sampling/num_gen_batches"] == 2
        assert values["dynamic_sampling/filled_groups"] == filled
        assert (values["grad_norm"] > 0) == (filled < 4)


def test_every_batch_draws_from_a_seed_of_its_own(saved, tmp_path):
    trainer = make_trainer(saved, tmp_path, "0" * 4, dynamic_sampling=3)
    _, experience = stepped(trainer)
    drawn = [tuple(sample.ids) for sample in experience]  # three times the same four prompts
    assert len(drawn) == 48 and len(set(drawn)) == 48


def noisy(completions, spread, **_):
    return [r + random.random() * (r != 0.25) for r in by_plan(completions, spread)]


def test_a_run_is_the_same_again_and_goes_on_where_it_stopped(saved, tmp_path):
    settings = {"dynamic_sampling": 3, "oversampling_factor": 1.5, "soft_punish_cache": 2, "shuffle_dataset": True}

    def run(name, **changes):
        trainer = make_trainer(saved, tmp_path / name, "1001011", noisy, save_steps=1, **settings, **changes)
        stop_at(trainer, 2)
        trainer.train()
        return tmp_path / name / "run"

    whole = run("whole", max_steps=4)
    run("stopped", max_steps=2)
    assert_same_run(run("stopped", max_steps=4, resume_from_checkpoint="auto"), whole)
    assert sum(row["dynamic_sampling/dropped_groups"] for row in lines(whole)) > 0
    assert sum(row["oversampling/aborted_groups"] for row in lines(whole)) > 0
    state = json.loads((whole / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["epoch"] == state["source"]["drawn"] / 7 and state["source"]["drawn"] > 4 * 6


@pytest.mark.parametrize("seats", [256, 9])
def test_the_first_groups_to_finish_are_kept_as_they_would_have_been(seats):
    model = tiny.model()
    prompts = [[5 + i, 9, 20 + i][: 1 + i % 3] for i in range(8)]
    sampling = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(2, 8)), seed=3)
    engine = RolloutEngine(model, max_num_seqs=seats)
    rollouts = engine.generate(prompts, 3, sampling)
    every = [[rollout.ids for rollout in rollouts[i : i + 3]] for i in range(0, 24, 3)]
    groups, lost = first_groups(engine, {i: [Prompt(ids, "")] * 3 for i, ids in enumerate(prompts)}, sampling, 3)
    assert not engine.has_unfinished_requests() and len(groups) == 3 and list(groups) == sorted(groups)
    assert all([rollout.ids for rollout in groups[i]] == every[i] for i in groups)
    if seats == 256:  # all run from the beginning: a group ends with its longest completion
        ends = [max(map(len, group)) for group in every]
        last = sorted(ends)[2]
        assert len(set(ends)) > 3 and {ends[i] for i in groups} <= {end for end in ends if end <= last}
        assert lost == sum(min(len(ids), last) for i in range(8) if i not in groups for ids in every[i])
    else:  # three run, five wait
        assert 0 < lost < sum(len(ids) for i in range(8) if i not in groups for ids in every[i])
    assert [rollout.ids for rollout in engine.generate(prompts, 3, sampling)] == [r.ids for r in rollouts]


def test_soft_overlong_punishment_stands_beside_the_rewards(saved, tmp_path):
    def nothing(completions, **_):
        return [None if i == 1 else 0.5 for i in range(len(completions))]

    weights = {"reward_weights": [2.0, 0.0], "dynamic_sampling": 0}
    trainer = make_trainer(saved, tmp_path, "1111", [nothing, by_plan], soft_punish_cache=4, **weights)
    stop_at(trainer, 3)
    values, experience = stepped(trainer)
    punished = [-max(len(sample.ids) - 2, 0) / 4 for sample in experience]
    assert len(set(punished)) > 2 and -1 in punished
    assert punished == get_soft_overlong_punishment(6, 4)(completion_ids=[sample.ids for sample in experience])
    assert values["rewards/soft_overlong_punishment/mean"] == pytest.approx(sum(punished) / 16)
    assert values["reward"] == pytest.approx(sum(2 * 0.5 * (i != 1) + p for i, p in enumerate(punished)) / 16)
    assert values["accuracy"] == 0  # of the first function


def test_all_of_it_at_once(saved, tmp_path):
    updates = {"updates_per_rollout": 2, "num_iterations": 2, "beta": 0.05, "mask_truncated_completions": True}
    trainer = make_trainer(saved, tmp_path, "1001011", oversampling_factor=1.5, soft_punish_cache=3, **updates)
    stop_at(trainer, 6)
    updated, update = [], trainer.updates
    trainer.updates = lambda groups, with_entropy: updated.append(update(groups, with_entropy)) or updated[0]
    values, experience = stepped(trainer)
    masked = [sample for sample in updated[0][0] if sample.masked]
    truncated = [sample for sample in experience if sample.truncated]
    assert 0 < len(masked) <= len(truncated) == len(experience) * values["completions/clipped_ratio"]
    assert all(not sample.weights.any() for sample in masked)
    weight = sum(sample.weights.sum().item() for sample in updated[0][0])
    assert weight == pytest.approx(2)  # 1 for each update: masked tokens do not count in DAPO's normalizer
    assert sum(sample.trained for sample in experience) == 16 and values["grad_norm"] > 0
    assert values["oversampling/aborted_groups"] == trainer.source.drawn - len(experience) // 4 > 0
    finished = sum(len(sample.prompt_ids + sample.ids) for sample in experience)
    assert values["num_tokens"] == finished + values["oversampling/aborted_tokens"] > finished
    assert 0 < sum(values[f"time/{stage}"] for stage in STAGES) <= values["step_time"]
