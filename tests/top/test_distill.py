"""The command distill: prompts, its output for supervised training, and user errors."""

import dataclasses
import json
import re

import pytest
import tiny
from mistakes import check
from paths import ROOT
from ranks import start
from samples import answer

from fastgrpo import distill
from fastgrpo.config.settings import SelectionConfig
from fastgrpo.data.records import Prompt
from fastgrpo.data.rows import Rows
from fastgrpo.distill import REASONS, parse, repetition, select
from fastgrpo.rewards.call import Rewards
from fastgrpo.tasks import dataset

CHUNK = distill.CHUNK
OWN = """
def right(completions, prompts, **columns):
    return [float(len(text) % 2 == len(prompt) % 2) for text, prompt in zip(completions, prompts)]

def wrong(completions, **columns):
    return [0.0] * len(completions)
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    tiny.save(tmp_path / "model", eos_token_id=[*range(1, 100)])  # random weights hardly ever draw a single end token
    prompts = ["ab", "c", "ab", "defg", "c"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (tmp_path / "distilling_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(distill, "CHUNK", 2)  # so that three prompts need two rounds
    return (
        f"{tmp_path / 'model'} --task dataset --dataset_name {tmp_path / 'train.jsonl'} --device cpu "
        f"--max_completion_length 6 --num_generations 6 --output {tmp_path / 'out.jsonl'} "
        "--reward_funcs distilling_rewards:right"
    ).split()


def test_writes_correct_completions_in_the_form_that_sft_reads(given, tmp_path, capsys):
    assert distill.main(given) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows and {row["prompt"] for row in rows} <= {"ab", "c", "defg"}
    for row in rows:
        assert list(row) == ["prompt", "completion", "reward", "rewards"] and row["rewards"] == {"right": 1.0}
        assert len(row["completion"]) % 2 == len(row["prompt"]) % 2
    assert len({(row["prompt"], row["completion"]) for row in rows}) == len(rows)
    told = dict(re.findall(r"^  (\w[\w ]*?)  +([\d,]+)$", capsys.readouterr().out, re.MULTILINE))
    assert told["prompts"] == "3" and told["drawn"] == "18" and int(told["kept"]) == len(rows)
    assert sum(int(count) for name, count in told.items() if name not in ("prompts", "drawn")) == 18
    again = [*given[:-3], str(tmp_path / "again.jsonl"), *given[-2:]]
    assert distill.main(again) == 0  # the same seed draws the same
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_the_task_checks_the_steps(given, tmp_path, capsys, monkeypatch):
    build = dataset.build

    def clean_steps_reward(completions, **columns):
        return [float(len(text) % 2) for text in completions]

    own = {"reward_funcs": [lambda completions, **_: [1.0] * len(completions)], "steps_reward": clean_steps_reward}
    monkeypatch.setattr(dataset, "build", lambda *arguments: dataclasses.replace(build(*arguments), **own))
    assert distill.main(given[:-2]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows and all(len(row["completion"]) % 2 for row in rows) and "wrong step" in capsys.readouterr().out


def test_each_prompt_is_completed_once_and_a_limit_chooses_at_random():
    rows = Rows([{"prompt": text} for text in "abacb"], lambda index: f"row {index}")
    every = distill.chosen_rows(rows, parse(["M"]))
    assert [row["prompt"] for row in every] == ["a", "b", "c"] and every.where(2) == "row 3"
    few = [distill.chosen_rows(rows, parse(["M", "--max_prompts", "2", "--seed", str(seed)])) for seed in range(20)]
    assert {"".join(row["prompt"] for row in chosen) for chosen in few} == {"ab", "ac", "bc"}
    assert len(distill.chosen_rows(rows, parse(["M", "--max_prompts", "9"]))) == 3


def test_reports_wrong_arguments_and_keeps_existing_files(given, tmp_path, capfd):
    check(distill.main, [*given[:-1], "distilling_rewards:wrong"], r"none of 18 completions .*18 wrong", capfd)
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "out.jsonl").write_text("mine\n")
    check(distill.main, given, "out.jsonl exists already", capfd)
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"
    check(distill.main, given[:-2], "--reward_funcs", capfd)
    check(distill.main, [given[0], "--task", "calculator"], "has tools", capfd)


@pytest.mark.slow
def test_two_processes_keep_what_one_keeps(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(distill, "CHUNK", CHUNK)
    assert distill.main(given) == 0
    told = capsys.readouterr().out
    given[given.index("--output") + 1] = str(tmp_path / "two.jsonl")
    with start(["-m", "fastgrpo.distill", *given], PYTHONPATH=f"{ROOT}:{tmp_path}") as job:
        assert job.wait() == 0, job.told()
        two, other = job.rank(0), job.rank(1)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert told.replace("out.jsonl", "two.jsonl") in two and not other


# Which completions are kept, and why the others are not.
LIMITS = SelectionConfig(max_per_prompt=2, repetition_n_grams=2, max_repetition=0.5)


def right(completions, **columns):
    return [float("right" in text or not text) for text in completions]


def neat_format_reward(completions, **columns):
    return [0.1 + 0.2 if "neat" in text else 0.0 for text in completions]


neat_format_reward.full_mark = 0.3


def clean_steps_reward(completions, **columns):
    return [float("step" not in text) for text in completions]


def long(completions, **columns):
    return [len(text) / 100 for text in completions]


def judged(*drawn):
    rewards = Rewards([right, neat_format_reward, clean_steps_reward, long])
    completions = [answer(Prompt([1], prompt), ids, text, reason=reason) for prompt, text, reason, ids in drawn]
    return rewards(completions).completions, rewards


def test_completions_are_dropped_for_these_reasons():
    ids = [1, 2, 3, 4]
    completions, rewards = judged(
        ("a", "wrong neat", "stop", ids),
        ("a", "", "stop", ids[:1]),
        ("a", "right untidy", "stop", ids),
        ("a", "right neat, wrong step", "stop", ids),
        ("a", "right neat, cut", "length", ids),
        ("a", "right neat, again and again", "stop", [1, 2] * 4),
        ("a", "right neat 1", "stop", ids),
        ("a", "right neat 1", "stop", ids),
        ("b", "right neat 1", "stop", ids),  # the same text after another prompt is no duplicate
        ("c", "right neat", "stop", ids),
        ("c", "right neat, longer", "stop", ids),
        ("c", "right neat, the longest", "stop", ids),
    )
    kept, dropped = select(completions, rewards, LIMITS)
    assert [completion.content for completion, _ in kept] == [
        "right neat 1", "right neat 1", "right neat, longer", "right neat, the longest",
    ]  # fmt: skip
    assert dropped == dict.fromkeys(REASONS[1:], 1)
    assert abs(kept[0][1] - (1 + 0.3 + 1 + 0.12)) < 1e-9  # its total reward
    assert repetition([1, 2, 3, 4], 2) == 0.0
    assert repetition([1, 2, 1, 2, 1], 2) == 0.5  # 12 21 12 21
    assert repetition([7] * 9, 1) == 1 - 1 / 9
    assert repetition([1, 2], 3) == 0.0 == repetition([], 1)


def test_the_best_are_kept_and_of_equal_ones_the_first():
    completions, rewards = judged(*(("a", f"right neat {i}", "stop", [1, 2, i]) for i in range(4)))
    kept, dropped = select(completions, rewards, LIMITS)
    assert [completion.content[-1] for completion, _ in kept] == ["0", "1"]
    assert dropped == {"beyond max_per_prompt": 2}
