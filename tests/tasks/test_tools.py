"""The calculator and the treasure hunt: problems, tools, warm starts, and (slow) what GRPO learns."""

import json
import re

import pytest
from runs import lines

from fastgrpo.config.settings import TrainConfig
from fastgrpo.tasks import calculator, make_policy, treasure
from fastgrpo.train import main


def test_each_problem_has_one_answer_and_none_is_held_out_and_learned():
    made = calculator.problems()
    assert len({problem["question"] for problem in made}) == calculator.PROBLEMS + calculator.HELD_OUT == len(made)
    task = calculator.build(TrainConfig(task="calculator"), None)
    assert set("".join(problem["question"] for problem in made)) <= set(calculator.CHARACTERS)
    held_out = {row["prompt"][0]["content"] for row in task.test()}
    assert not held_out & {row["messages"][0]["content"] for row in task.supervised()}
    for problem, row in zip(made, task.test(), strict=False):
        a, b = map(int, re.findall(r"\d+", problem["question"]))
        values = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}
        assert int(row["answer"]) == values[problem["expression"].strip("0123456789")]


@pytest.mark.parametrize("expression", ["7/2", "7/0", "7+", "", "seven", "9**9**9", "__import__('os')"])
def test_the_calculator_refuses_other_expressions(expression):
    assert calculator.calc("23*47-81") == "01000" and calculator.calc("84/7") == "00012"
    with pytest.raises(ValueError, match=r"not whole|not readable"):
        calculator.calc(expression)


def test_a_box_opens_with_its_key_and_the_last_one_holds_gold():
    made = treasure.hunts()
    assert len(made) == len({*made}) == treasure.HUNTS + treasure.HELD_OUT
    hunt = treasure.Treasure()
    hunt.reset("kfq")
    assert [hunt.open(box) for box in "qfkkqf"] == ["locked", "locked", "f", "f", "locked", "q"]
    assert hunt.open("q") == "gold" and (hunt.get_reward(), hunt.done) == (0.0, False)
    assert hunt.take("q") == "gold" and (hunt.get_reward(), hunt.done) == (1.0, True)
    hunt.reset("kfq")
    assert hunt.open("q") == "locked" and hunt.take("f") == "nothing" and (hunt.get_reward(), hunt.done) == (0.0, True)


@pytest.mark.parametrize("task, tools", [(calculator, "calc<eos>"), (treasure, "open<eos>take<eos>")])
def test_the_warm_start_has_the_prompts_of_the_run(tmp_path, monkeypatch, task, tools):
    from transformers import AutoTokenizer

    seen = []
    for size in ("PROBLEMS", "HUNTS"):
        monkeypatch.setattr(task, size, 200, raising=False)
    monkeypatch.setattr("fastgrpo.trainer.supervised.sft", lambda model, examples, **_: seen.extend(examples))
    path = make_policy(task, tmp_path / "model", TrainConfig(device="cpu"), lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer.decode(example.prompt_ids) for example in seen]
    assert tokenizer.chat_template and all(text.startswith(tools) for text in texts)
    assert all(example.ids[-1] == tokenizer.eos_token_id for example in seen)
    longest = max(len(example.prompt_ids) + len(example.ids) for example in seen)
    assert longest < task.make_model(0)[0].config.max_position_embeddings


def learned(folder, flags):
    assert main(f"--output_dir {folder} --device cpu --seed 0 {flags}".split()) == 0
    return json.loads((folder / "summary.json").read_text()), [row for row in lines(folder) if "reward" in row]


@pytest.mark.slow
def test_grpo_learns_to_calculate_with_the_tool_and_not_without(tmp_path):
    summary, steps = learned(tmp_path / "with", "--task calculator")
    assert summary["accuracy_before"] < 0.3 and summary["accuracy_after"] >= 0.9
    assert steps[0]["tools/call_frequency"] < 0.3 and steps[-1]["tools/call_frequency"] > 0.9
    failures = [row["tools/failure_frequency"] for row in steps]
    assert sum(failures[-10:]) / 10 < 0.08 < sum(failures[:10]) / 10
    control, _ = learned(tmp_path / "without", "--task calculator --max_tool_calling_iterations 0")
    assert control["accuracy_after"] < 0.3


@pytest.mark.slow
def test_grpo_learns_to_look_for_the_gold(tmp_path):
    summary, _ = learned(tmp_path, "--task treasure")
    assert summary["accuracy_before"] < 0.5 and summary["accuracy_after"] >= 0.95
