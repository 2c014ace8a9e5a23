"""The task of small functions: rows, examples of the warm start, and whole runs."""

import re

import tiny
from jails import needs_namespaces

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
    (learned, _), rows = functions(), code.examples()
    assert {row["prompt"] for row in rows} == {to_row(each, None)["prompt"] for each in learned}
    pairs = [(row["completion"], each) for row, each in zip(rows, learned, strict=True)]
    needed = [text == written(each) for text, each in pairs if written(each) != written(each, careful=False)]
    assert abs(sum(needed) / len(needed) - code.CAREFUL) < 0.03
    tokenizer, limit = character_tokenizer(code.CHARACTERS), parse(["--task", "code"]).max_completion_length
    for text, _ in pairs[:50]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) < limit and program_of(text) is not None


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
