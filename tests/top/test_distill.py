"""The command distill: prompts, the file that supervised training reads, and its mistakes."""

import json
import re

import pytest
import tiny
from mistakes import check
from ranks import start

from fastgrpo import distill
from fastgrpo.data.rows import Rows
from fastgrpo.distill import parse
from fastgrpo.evaluation import heldout

OWN = """
def right(completions, prompts, **columns):
    return [float(len(text) % 2 == len(prompt) % 2) for text, prompt in zip(completions, prompts)]

def wrong(completions, **columns):
    return [0.0] * len(completions)

def raises(prompts, **columns):
    if "c" in prompts:
        raise RuntimeError("no verdict on c")
    return [1.0] * len(prompts)
"""
# The command as the fixture `given` has it, for other processes.
SMALL = """
import sys
from fastgrpo import distill
from fastgrpo.evaluation import heldout

distill.CHUNK = 2
heldout.stop_token_ids = lambda policy, tokenizer: tuple(range(1, 100))
sys.exit(distill.main())
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    tiny.save(tmp_path / "model")
    prompts = ["ab", "c", "ab", "defg", "c"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (tmp_path / "distilling_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(distill, "CHUNK", 2)  # so that three prompts need two rounds
    # A model with random weights hardly ever draws its end token.
    monkeypatch.setattr(heldout, "stop_token_ids", lambda policy, tokenizer: tuple(range(1, 100)))
    return (
        f"{tmp_path / 'model'} --task dataset --dataset_name {tmp_path / 'train.jsonl'} --device cpu "
        f"--max_completion_length 6 --num_generations 6 --output {tmp_path / 'out.jsonl'} "
        "--reward_funcs distilling_rewards:right"
    ).split()


def test_what_is_right_is_written_in_the_form_that_supervised_training_reads(given, tmp_path, capsys):
    assert distill.main(given) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows and {row["prompt"] for row in rows} <= {"ab", "c", "defg"}
    for row in rows:
        assert list(row) == ["prompt", "completion", "reward", "rewards"] and row["rewards"] == {"right": 1.0}
        assert len(row["completion"]) % 2 == len(row["prompt"]) % 2
    kept = [(row["prompt"], row["completion"]) for row in rows]
    assert len(set(kept)) == len(kept) and max(map([p for p, _ in kept].count, ("ab", "c", "defg"))) <= 4
    told = dict(re.findall(r"^  (\w[\w ]*?)  +([\d,]+)$", capsys.readouterr().out, re.MULTILINE))
    assert told["prompts"] == "3" and told["drawn"] == "18" and int(told["kept"]) == len(rows)
    assert sum(int(count) for name, count in told.items() if name not in ("prompts", "drawn")) == 18
    again = [*given[:-3], str(tmp_path / "again.jsonl"), *given[-2:]]
    assert distill.main(again) == 0  # the same seed draws the same
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_the_teacher_has_the_layers_of_a_training_run(given, monkeypatch):
    """`apply_liger` decides by the device and the package; here it is only seen to be asked."""
    asked = []
    monkeypatch.setattr("fastgrpo.policy.load.apply_liger", lambda model, wanted: asked.append((model, wanted)))
    assert distill.main(given) == 0
    assert [(type(model).__name__, wanted) for model, wanted in asked] == [("Qwen2ForCausalLM", None)]


def test_each_prompt_is_completed_once_and_a_limit_chooses_at_random():
    rows = Rows([{"prompt": text} for text in "abacb"], lambda index: f"row {index}")
    every = distill.chosen_rows(rows, parse(["M"]))
    assert [row["prompt"] for row in every] == ["a", "b", "c"] and every.where(2) == "row 3"
    chosen = [
        "".join(
            row["prompt"] for row in distill.chosen_rows(rows, parse(["M", "--max_prompts", "2", "--seed", str(n)]))
        )
        for n in range(20)
    ]
    assert set(chosen) == {"ab", "ac", "bc"} and len(distill.chosen_rows(rows, parse(["M", "--max_prompts", "9"]))) == 3


def test_nothing_is_kept(given, tmp_path, capfd):
    check(
        distill.main, [*given[:-1], "distilling_rewards:wrong"], r"none of 18 completions is kept \(18 wrong\)", capfd
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_mistakes(given, tmp_path, capfd):
    (tmp_path / "out.jsonl").write_text("mine\n")
    check(distill.main, given, "out.jsonl exists already; choose another --output", capfd)
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"
    check(distill.main, [str(tmp_path / "none"), *given[1:]], "none", capfd)
    check(distill.main, given[:-2], "has no reward functions of its own: pass --reward_funcs", capfd)


def test_two_processes_keep_what_one_keeps(given, tmp_path, capsys):
    """The second chunk has one prompt, so that rank 1 has none."""
    assert distill.main(given) == 0
    told = capsys.readouterr().out
    (tmp_path / "small.py").write_text(SMALL)
    given[given.index("--output") + 1] = str(tmp_path / "two.jsonl")
    with start([tmp_path / "small.py", *given]) as job:
        assert job.wait() == 0, job.told()
        two, other = job.rank(0), job.rank(1)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert told.replace("out.jsonl", "two.jsonl") in two and not other


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_ends_all_of_them(given, tmp_path):
    """The prompts are ab, c and defg; c is drawn by rank 1."""
    (tmp_path / "small.py").write_text(SMALL)
    with start([tmp_path / "small.py", *given[:-1], "distilling_rewards:raises"]) as job:
        assert job.wait() == 1, job.told()  # of torchrun, whatever the code of a rank
        assert "no verdict on c" in job.rank(1) and "rank 1 failed: ValueError" in job.rank(0)
    assert not (tmp_path / "out.jsonl").exists()
