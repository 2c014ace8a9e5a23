"""What a step trains on: dynamic sampling, oversampling, lengths, and how they are counted."""

import dataclasses
import json
import random

import pytest
import tiny
import torch

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.rewards.call import Rewards, reward_matrix
from fastgrpo.rewards.overlong import make_soft_overlong_punishment
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.run.profiling import STAGES
from fastgrpo.trainer.collect import first_finished

pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


def planned(pattern):
    """A row a character; the rewards of a group differ where it is 1."""
    return [{"prompt": f"{i:02d}", "spread": character == "1"} for i, character in enumerate(pattern)]


def by_plan(completions, spread, **_):
    return [float(i % 2) if differs else 0.25 for i, differs in enumerate(spread)]


def make_trainer(folder, tmp_path, pattern, reward=by_plan, **settings):
    defaults = {
        "output_dir": str(tmp_path / "run"), "max_steps": 2, "prompts_per_step": 4, "num_generations": 4,
        "max_completion_length": 6, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
        "device": "cpu", "gradient_checkpointing": False, "shuffle_dataset": False, "dynamic_sampling": 10,
    }  # fmt: skip
    return GRPOTrainer(str(folder), reward, GRPOConfig(**{**defaults, **settings}), planned(pattern))


def stepped(trainer):
    """(metrics, all samples) of one step."""
    kept, make = [], trainer.collector
    trainer.collector = lambda state: kept.append(make(state)) or kept[-1]
    values = trainer.step()
    trainer.collector = make
    return values, kept[0][0]


def rows_of(experience, trainer):
    """The number of the row of each group that the step trained on."""
    first = [sample for sample in experience if sample.trained][::4]
    return [int(trainer.tokenizer.decode(sample.prompt_ids)) for sample in first]


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def untimed(run):
    return [{k: v for k, v in row.items() if "time" not in k and "/s" not in k} for row in lines(run)]


def test_groups_without_spread_are_replaced(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, "1001" + "01" + "1" + "1" * 7)
    values, experience = stepped(trainer)
    assert rows_of(experience, trainer) == [0, 3, 5, 6]
    assert values["dynamic_sampling/num_gen_batches"] == 3
    assert values["dynamic_sampling/dropped_groups"] == 3 and values["dynamic_sampling/filled_groups"] == 0
    # All that was drawn is measured, and has passed.
    assert values["frac_informative"] == pytest.approx(4 / 7) == 1 - values["frac_reward_zero_std"]
    assert values["reward"] == pytest.approx((4 * 0.5 + 3 * 0.25) / 7)
    assert values["accuracy"] == pytest.approx(4 / 7 / 2)
    lengths = [len(rollout.ids) for rollout in experience]
    assert len(lengths) == 28 and values["completions/mean_length"] == sum(lengths) / 28
    assert trainer.state.num_tokens == values["num_tokens"] == sum(lengths) + 2 * 28
    assert trainer.source.drawn == 7 and trainer.state.epoch == 7 / 14
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert [row["group"] for row in samples] == [i // 4 for i in range(28)]
    assert [row["group"] for row in samples if row["advantage"]] == [i for i in (0, 3, 5, 6) for _ in range(4)]
    values, experience = stepped(trainer)
    assert rows_of(experience, trainer) == [7, 8, 9, 10] and trainer.state.epoch == 11 / 14
    assert values["dynamic_sampling/num_gen_batches"] == 1 and values["dynamic_sampling/dropped_groups"] == 0


def test_the_bound_ends_a_step_and_dropped_groups_fill_up(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, "0100" + "000" + "0" * 7, dynamic_sampling=2)
    before = [p.clone() for p in trainer.model.parameters()]
    values, experience = stepped(trainer)
    assert rows_of(experience, trainer) == [0, 1, 2, 3]
    assert values["dynamic_sampling/num_gen_batches"] == 2
    assert values["dynamic_sampling/dropped_groups"] == 3 and values["dynamic_sampling/filled_groups"] == 3
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    before = [p.clone() for p in trainer.model.parameters()]
    values, experience = stepped(trainer)
    assert rows_of(experience, trainer) == [7, 8, 9, 10] and values["dynamic_sampling/filled_groups"] == 4
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_dropped_groups_do_not_count_in_the_normalizer_and_those_that_fill_up_do(folder, tmp_path, loss_type):
    trainer = make_trainer(folder, tmp_path, "1001" + "0000", dynamic_sampling=2, loss_type=loss_type)
    updated, update = [], trainer.updates
    trainer.updates = lambda groups, with_entropy: updated.append(update(groups, with_entropy)) or updated[0]
    _, experience = stepped(trainer)
    trained = updated[0][0]
    assert len(trained) == 16 and len(experience) == 24
    tokens = sum(len(sample.ids) for sample in trained)
    for sample in trained:
        expected = 1 / tokens if loss_type == "dapo" else 1 / 16 / len(sample.ids)
        torch.testing.assert_close(sample.weights, torch.full_like(sample.weights, expected))
    assert [i for i, sample in enumerate(experience) if sample.trained] == [*range(16)]


def test_those_that_train_together_are_scaled_together(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, "1001" + "11" + "1" * 8, scale_rewards="batch")
    _, experience = stepped(trainer)
    advantages = torch.tensor([sample.advantage for sample in experience if sample.trained])
    rewards = torch.tensor([0.0, 1.0] * 8)
    torch.testing.assert_close(advantages, (rewards - 0.5) / (rewards.std() + 1e-4), atol=1e-6, rtol=0)


def test_without_a_group_to_drop_it_is_the_step_without(folder, tmp_path):
    make_trainer(folder, tmp_path / "on", "1" * 8).train()
    make_trainer(folder, tmp_path / "off", "1" * 8, dynamic_sampling=0).train()
    on, off = untimed(tmp_path / "on" / "run"), untimed(tmp_path / "off" / "run")
    assert [{k: v for k, v in row.items() if not k.startswith("dynamic_sampling/")} for row in on] == off
    names = [(tmp_path / name / "run" / "samples.jsonl").read_bytes() for name in ("on", "off")]
    assert names[0] == names[1]


@pytest.mark.parametrize("given", [0, 3, 5])
def test_a_source_gives_as_many_rows_as_it_is_asked_for(folder, tmp_path, given):
    trainer = make_trainer(folder, tmp_path, "1" * 8, dynamic_sampling=0)
    trainer.source.take = lambda count: planned("1" * given)
    match = rf"the source of training rows \(ShuffledRows\) gave {given} rows for take\(4\); let it begin again"
    with pytest.raises(ValueError, match=match):
        trainer.step()


@pytest.mark.parametrize("backend", ["fast", "hf"])
def test_every_batch_draws_from_a_seed_of_its_own(folder, tmp_path, backend):
    trainer = make_trainer(
        folder, tmp_path, "0" * 4, lambda completions, **_: [0.0] * len(completions), rollout_backend=backend,
        dynamic_sampling=3,
    )  # fmt: skip
    _, experience = stepped(trainer)
    drawn = [tuple(rollout.ids) for rollout in experience]  # three times the same four prompts
    assert len(drawn) == 48 and len(set(drawn)) == 48


def test_refills_may_go_without_a_reward_and_lack_columns(folder, tmp_path):
    def reward(completions, spread, prompts, log_metric, log_extra, **_):
        first = len(completions) == 16
        log_metric("batch", len(completions))
        if first:
            log_extra("mark", list(range(16)))
        return by_plan(completions, spread) if first else [None] * len(completions)

    trainer = make_trainer(folder, tmp_path, "1110" + "0" * 10, reward, dynamic_sampling=3)
    values, experience = stepped(trainer)
    assert values["dynamic_sampling/num_gen_batches"] == 3 and values["batch"] == (16 + 4 + 4) / 3
    assert [completion.extras for completion in experience] == [{"mark": mark} for mark in [*range(16), *[None] * 8]]
    assert values["reward"] == pytest.approx((3 * 0.5 + 0.25) / 4)
    nothing = make_trainer(folder, tmp_path / "b", "1" * 8, lambda completions, **_: [None] * len(completions))
    with pytest.raises(ValueError, match="all rewards are None"):
        nothing.step()


def test_errors_of_all_batches_are_counted(folder, tmp_path):
    def flawed(completions, spread, **_):
        return [float("nan"), *by_plan(completions, spread)[1:]]

    trainer = make_trainer(folder, tmp_path, "1000" + "111", flawed, reward_errors="skip")
    values, _ = stepped(trainer)
    assert values["dynamic_sampling/num_gen_batches"] == 2 and values["rewards/flawed/errors"] == 2


def noisy(completions, spread, **_):
    """Draws from a global generator, as rewards may."""
    return [r + random.random() * (r != 0.25) for r in by_plan(completions, spread)]


def test_a_run_is_the_same_again_and_goes_on_where_it_stopped(folder, tmp_path):
    settings = {
        "dynamic_sampling": 3, "oversampling_factor": 1.5, "soft_punish_cache": 2,
        "save_steps": 1, "shuffle_dataset": True,
    }  # fmt: skip

    def run(name, **changes):
        trainer = make_trainer(folder, tmp_path / name, "1001011", noisy, **{**settings, **changes})
        # Half of the vocabulary ends a completion: lengths differ.
        trainer.collector.sampling = dataclasses.replace(trainer.sampling, stop_token_ids=tuple(range(0, 258, 2)))
        trainer.train()
        return tmp_path / name / "run"

    def state(run):
        (_, path), *_ = reversed(checkpoints(run).items())
        kept = json.loads((path / "trainer_state.json").read_text())
        weights = (path / "model.safetensors").read_bytes()
        return weights, {name: kept[name] for name in ("global_step", "epoch", "num_tokens", "source")}

    whole = run("whole", max_steps=4)
    run("stopped", max_steps=2)
    stopped = run("stopped", max_steps=4, resume_from_checkpoint="auto")
    assert sum(row["dynamic_sampling/dropped_groups"] for row in lines(whole)) > 0
    assert sum(row["oversampling/aborted_groups"] for row in lines(whole)) > 0
    taken = state(whole)[1]["source"]["drawn"]
    assert state(whole)[1]["epoch"] == taken / 7 and taken > 4 * 6
    assert untimed(stopped) == untimed(whole)
    assert (stopped / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert state(stopped) == state(whole)


@pytest.mark.parametrize("seats", [256, 9])
def test_the_first_groups_to_finish_are_kept_as_they_would_have_been(seats):
    model = tiny.model()
    prompts = [[5 + i, 9, 20 + i][: 1 + i % 3] for i in range(8)]
    sampling = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(2, 8)), seed=3)
    engine = RolloutEngine(model, max_num_seqs=seats)
    rollouts = engine.generate(prompts, 3, sampling)
    every = [[rollout.ids for rollout in rollouts[i : i + 3]] for i in range(0, 24, 3)]
    groups, lost = first_finished(engine, dict(enumerate(prompts)), 3, sampling, 3)
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


def test_an_error_while_drawing_leaves_the_engine_idle():
    engine = RolloutEngine(tiny.model())
    with pytest.raises(ValueError, match="exceeds the model's context"):
        first_finished(engine, {0: [5, 6], 1: [7] * 256}, 2, SamplingParams(max_tokens=4, seed=0), 1)
    assert not engine.has_unfinished_requests()


def test_oversampling_keeps_as_many_groups_as_asked_for(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, "1" * 20, dynamic_sampling=0, oversampling_factor=1.6)
    trainer.collector.sampling = dataclasses.replace(trainer.sampling, stop_token_ids=tuple(range(0, 258, 3)))
    values, experience = stepped(trainer)
    assert sum(sample.trained for sample in experience) == 16 and len(experience) == 16  # of 6.4, rounded up
    assert values["oversampling/aborted_groups"] == 3 and trainer.source.drawn == 7
    assert trainer.state.epoch == 7 / 20
    finished = sum(len(rollout.ids) + 2 for rollout in experience)
    assert values["num_tokens"] == finished + values["oversampling/aborted_tokens"]
    assert values["oversampling/aborted_tokens"] >= 12
    assert not any(name.startswith("dynamic_sampling/") for name in values)


def test_groups_are_oversampled_exactly():
    def started(factor, count):
        return GRPOConfig(oversampling_factor=factor).oversampled(count)

    assert [started(1.0, 8), started(1.1, 10), started(1.5, 3), started(1.01, 8), started(2, 8)] == [8, 11, 5, 9, 16]


def test_soft_overlong_punishment_is_trls():
    trl = pytest.importorskip("trl.rewards", reason="TRL is not installed (extra: bench)")
    ids = [[7] * n for n in range(1, 15)]
    for cache in (1, 4, 12):
        mine, theirs = make_soft_overlong_punishment(12, cache), trl.get_soft_overlong_punishment(12, cache)
        assert mine(completion_ids=ids) == theirs(completion_ids=ids)


def test_soft_overlong_punishment_stands_beside_the_rewards(folder, tmp_path):
    def nothing(completions, **_):
        return [None if i == 1 else 0.5 for i in range(len(completions))]

    trainer = make_trainer(
        folder, tmp_path, "1111", [nothing, by_plan], soft_punish_cache=4, reward_weights=[2.0, 0.0],
        dynamic_sampling=0,
    )  # fmt: skip
    trainer.collector.sampling = dataclasses.replace(trainer.sampling, stop_token_ids=tuple(range(0, 258, 3)))
    values, experience = stepped(trainer)
    punished = [-max(len(rollout.ids) - 2, 0) / 4 for rollout in experience]
    assert len(set(punished)) > 2 and -1 in punished
    assert values["rewards/soft_overlong_punishment/mean"] == pytest.approx(sum(punished) / 16)
    assert values["reward"] == pytest.approx(sum(2 * 0.5 * (i != 1) + p for i, p in enumerate(punished)) / 16)
    assert values["accuracy"] == 0  # that of the first function
    assert lines(tmp_path / "run", "samples.jsonl")[0]["rewards"]["soft_overlong_punishment"] == punished[0]
    config = GRPOConfig(soft_punish_cache=4)
    with pytest.raises(ValueError, match="reward_weights has 3 entries for 2 reward functions"):
        Rewards([nothing, by_plan], [1, 1, 1], shaping=[make_soft_overlong_punishment(6, config.soft_punish_cache)])


def test_a_completion_that_nothing_judges_is_not_punished_either(folder, tmp_path):
    trainer = make_trainer(
        folder, tmp_path, "1" * 8, lambda completions, **_: [None] * len(completions), soft_punish_cache=4
    )
    with pytest.raises(ValueError, match="all rewards are None: <lambda> gave none of 16"):
        trainer.step()
    half = make_trainer(
        folder, tmp_path / "b", "1" * 8, lambda completions, **_: [None, 1.0] * (len(completions) // 2),
        soft_punish_cache=4, dynamic_sampling=0,
    )  # fmt: skip
    _, experience = stepped(half)
    per_function = reward_matrix(experience)
    assert per_function[::2].isnan().all() and not per_function[1::2].isnan().any()


def test_groups_whose_completions_are_all_masked_teach_nothing(folder, tmp_path):
    """Overlong filtering and dynamic sampling: a truncated group is replaced too."""
    trainer = make_trainer(folder, tmp_path, "1" * 12, mask_truncated_completions=True, dynamic_sampling=3)
    trainer.collector.sampling = dataclasses.replace(trainer.sampling, stop_token_ids=(), max_tokens=3)
    before = [p.clone() for p in trainer.model.parameters()]
    values, experience = stepped(trainer)
    assert values["completions/clipped_ratio"] == 1 and values["frac_informative"] == 1
    assert values["dynamic_sampling/num_gen_batches"] == 3 and values["dynamic_sampling/filled_groups"] == 4
    assert rows_of(experience, trainer) == [0, 1, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_all_of_it_at_once(folder, tmp_path):
    trainer = make_trainer(
        folder, tmp_path, "1001011", oversampling_factor=1.5, soft_punish_cache=3, mask_truncated_completions=True,
        updates_per_rollout=2, num_iterations=2, beta=0.05,
    )  # fmt: skip
    trainer.collector.sampling = dataclasses.replace(trainer.sampling, stop_token_ids=tuple(range(0, 258, 6)))
    updated, update = [], trainer.updates
    trainer.updates = lambda groups, with_entropy: updated.append(update(groups, with_entropy)) or updated[0]
    values, experience = stepped(trainer)
    masked = [sample for sample in updated[0][0] if sample.masked]
    truncated = [rollout for rollout in experience if rollout.truncated]
    assert 0 < len(masked) <= len(truncated) == len(experience) * values["completions/clipped_ratio"]
    assert all(not sample.weights.any() for sample in masked)
    weight = sum(sample.weights.sum().item() for sample in updated[0][0])
    assert weight == pytest.approx(2)  # 1 for each update: masked tokens do not count in DAPO's normalizer
    assert sum(sample.trained for sample in experience) == 16 and values["grad_norm"] > 0
    assert sum(values[f"time/{stage}"] for stage in STAGES) == pytest.approx(values["step_time"], rel=0.03)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"dynamic_sampling": 1}, "dynamic_sampling=1 draws no second batch"),
        ({"dynamic_sampling": -1}, "dynamic_sampling must be at least 0"),
        ({"oversampling_factor": 0.9}, "oversampling_factor must be at least 1"),
        ({"oversampling_factor": float("inf")}, "oversampling_factor must be finite"),
        ({"oversampling_factor": float("nan")}, "oversampling_factor must be finite"),
        ({"oversampling_factor": 2, "rollout_backend": "hf"}, "use rollout_backend=fast, or oversampling_factor=1"),
        ({"soft_punish_cache": -1}, "soft_punish_cache must be at least 0"),
        ({"soft_punish_cache": 513}, "soft_punish_cache=513 must be at most max_completion_length=512"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        GRPOConfig(**settings)
