"""The task of small functions: its rows, what the warm start shows of them, and whole runs of it."""

import json
import re

import pytest
import tiny
from jails import needs_namespaces

from fastgrpo import train
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import TrainConfig
from fastgrpo.policy.characters import character_tokenizer
from fastgrpo.rewards.sandbox import program_of
from fastgrpo.tasks import code
from fastgrpo.tasks.code import functions, to_row, value, written

STEPS = (("+", 2), ("*", 3), ("-", 4))


def test_a_function_and_its_program():
    assert [value(STEPS, x) for x in (0, 1, -3)] == [2, 5, -7]
    assert written(STEPS) == "```\ndef f(x):\n return (x+2)*3-4\n```"
    assert written(STEPS, careful=False) == "```\ndef f(x):\n return x+2*3-4\n```"
    for plain in ((("*", 2), ("*", 3), ("-", 4)), (("+", 2), ("+", 3), ("-", 4))):
        assert written(plain) == written(plain, careful=False)


def test_functions_are_told_apart_and_careful_programs_are_right():
    """Python itself computes the program's expression, here from a tree that is no more than numbers and signs."""
    learned, held_out = functions()
    assert len({*learned, *held_out}) == code.LEARNED + code.HELD_OUT and len(held_out) == code.HELD_OUT
    differ = 0
    for function in (*learned[:200], *held_out):
        row = to_row(function, None)
        assert re.fullmatch(r"([+*-][1-9]){3}:", row["prompt"])
        for careful in (True, False):
            expression = written(function, careful).split("return ")[1].removesuffix("\n```")
            assert re.fullmatch(r"[x+*()1-9-]+", expression)
            program = eval(f"lambda x: {expression}")  # of characters that can do no more
            right = all(program(x) == value(function, x) for x in code.ARGUMENTS)
            assert right or not careful
            differ += not right
        assert row["tests"] == [{"assert": f"assert f({x}) == {value(function, x)}"} for x in code.ARGUMENTS]
    assert 0.35 < differ / 500 < 0.55  # brackets are needed in four of nine functions


def test_the_warm_start_shows_no_held_out_function():
    learned, held_out = functions()
    rows = code.examples()
    assert {row["prompt"] for row in rows} == {to_row(each, None)["prompt"] for each in learned}
    assert not {row["prompt"] for row in rows} & {to_row(each, None)["prompt"] for each in held_out}
    needed = [
        row["completion"] == written(each)
        for row, each in zip(rows, learned, strict=True)
        if written(each) != written(each, careful=False)
    ]
    assert abs(sum(needed) / len(needed) - code.CAREFUL) < 0.03
    tokenizer = character_tokenizer(code.CHARACTERS)
    limit = parse(["--task", "code"]).max_completion_length
    for row in rows[:50]:
        ids = tokenizer(row["completion"])["input_ids"]
        assert tokenizer.decode(ids) == row["completion"] and len(ids) < limit
        assert program_of(row["completion"]) is not None


@needs_namespaces
def test_prompts_follow_the_tokenizer():
    _, own = code.make_model(0)
    assert to_row(STEPS, None)["prompt"] == to_row(STEPS, own)["prompt"] == "+2*3-4:"
    plain = to_row(STEPS, tiny.tokenizer())["prompt"]
    assert "in this order: add 2, multiply by 3, subtract 4. Return" in plain and plain.endswith("```\n")
    (message,) = to_row(STEPS, tiny.tokenizer(chat=True))["prompt"]
    assert message == {"role": "user", "content": plain.removesuffix("\n")}
    task = code.build(TrainConfig(task="code"), None)
    assert len(task.test()) == code.HELD_OUT and len(task.train()) == code.LEARNED
    assert [function.__name__ for function in task.reward_funcs] == ["sandbox_python"]


def test_data_sets_are_refused():
    with pytest.raises(ValueError, match="task=code makes its own data; use dataset_name with --task gsm8k"):
        code.build(TrainConfig(task="code", dataset_name="x"), None)


def run(tmp_path, flags):
    argv = f"--task code --device cpu --output_dir {tmp_path / 'run'} --logging_steps 1 {flags}".split()
    assert train.main(argv) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    return rows, samples, json.loads((tmp_path / "run" / "summary.json").read_text())


@needs_namespaces
def test_two_steps_of_its_own_model(tmp_path, monkeypatch, without_curves):
    """The recipe, with a warm start of a few steps."""
    monkeypatch.setitem(code.WARM_START, "steps", 4)
    flags = "--max_steps 2 --prompts_per_step 2 --num_generations 4 --max_eval_samples 4"
    rows, samples, summary = run(tmp_path, flags)
    assert summary["steps"] == 2 and summary["accuracy_before"] is not None
    assert "rewards/sandbox_python/mean" in next(row for row in rows if "reward" in row)
    assert len(samples) == 2 * 2 * 4 and all("sandbox_python/tests" in sample for sample in samples)


@needs_namespaces
def test_a_step_of_a_language_model(tmp_path, without_curves):
    model = tiny.save(tmp_path / "model", chat=True)
    flags = f"--model_name_or_path {model} --max_steps 1 --prompts_per_step 2 --num_generations 2"
    _, samples, summary = run(tmp_path, flags + " --max_completion_length 4 --max_eval_samples 2")
    assert "Write a Python function" in json.dumps(samples[0]["prompt"]) and summary["steps"] == 1


@needs_namespaces
@pytest.mark.slow
def test_grpo_learns_to_set_brackets(tmp_path):
    _, _, summary = run(tmp_path, "--seed 0")
    assert summary["accuracy_before"] < 0.65 and summary["accuracy_after"] >= 0.75
