"""The built-in tasks: arithmetic, GSM8K, sums, data sets of one's own, and short runs of every task."""

import json
import os
from dataclasses import replace

import pytest
import tiny
from jails import needs_namespaces
from paths import DATA
from runs import lines

from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import TrainConfig
from fastgrpo.data.prompts import with_system
from fastgrpo.rewards.gsm8k import digits_reward
from fastgrpo.tasks import arithmetic, dataset, find_task, gsm8k, sums
from fastgrpo.train import main

pytestmark = pytest.mark.usefixtures("without_curves")

SAMPLE = DATA / "gsm8k-64.jsonl"
WHOLE = os.environ.get("FASTGRPO_GSM8K")


def trained(folder, flags):
    assert main(f"--output_dir {folder} --device cpu --logging_steps 1 {flags}".split()) == 0
    return lines(folder), lines(folder, "samples.jsonl"), json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("task, flags, metrics", [
    ("arithmetic", "", {"rewards/correctness/mean"}),
    ("bandit", "--reward_funcs preferred", {"true_reward"}),
    ("calculator", "", {"rewards/correctness/mean", "tools/calc/calls"}),
    pytest.param("code", "", {"rewards/sandbox_python/mean"}, marks=needs_namespaces),
    ("countdown", "--max_completion_length 12", {"rewards/correctness/mean", "curriculum/level"}),
    ("treasure", "", {"rewards/Treasure/mean", "tools/open/calls", "tools/take/calls"}),
    ("pizza", "--num_generations 3 --eval_num_generations 2", {"rewards/likes_pizza/mean"}),
])  # fmt: skip
def test_two_steps_of_its_own_model(tmp_path, monkeypatch, task, flags, metrics):
    module = find_task(task)
    for size in ("PROBLEMS", "HUNTS"):
        monkeypatch.setattr(module, size, 40, raising=False)
    whole = module.build(TrainConfig(task=task), None)
    shown = whole.supervised()
    few_rows = replace(whole, supervised=lambda: shown[:32], test=lambda: whole.test()[:4])
    monkeypatch.setattr(module, "build", lambda *_: few_rows)
    monkeypatch.setitem(module.WARM_START, "steps", 4)
    few = "--max_steps 2 --prompts_per_step 2"
    rows, samples, summary = trained(tmp_path, f"--task {task} {few} {flags}")
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2] and metrics <= steps[0].keys()
    assert summary["steps"] == 2 and summary["accuracy_before"] is not None
    assert len(samples) == 2 * 2 * (3 if task == "pizza" else parse(["--task", task]).num_generations)
    assert samples[0]["prompt"] in [row.get("prompt") or row["messages"][:1] for row in shown]


@pytest.mark.parametrize("task, words, flags", [
    pytest.param("code", "Write a Python function", "", marks=needs_namespaces),
    ("countdown", "Using the numbers [", "--reward_funcs format_reward pool_rewards:process"),
    ("gsm8k", "assistant", f"--dataset_name {SAMPLE} --beta 0.04 --reward_weights 1.0 0.5 0.1 --top_p 0.95"),
    pytest.param("gsm8k", "assistant", f"--dataset_name {WHOLE}",
                 marks=[pytest.mark.slow, pytest.mark.skipif(WHOLE is None, reason="FASTGRPO_GSM8K names no folder")]),
])  # fmt: skip
def test_a_step_of_a_language_model(tmp_path, task, words, flags):
    model = tiny.save(tmp_path / "model", chat=True)
    few = "--max_steps 1 --prompts_per_step 2 --num_generations 2 --max_completion_length 4 --max_eval_samples 2"
    rows, samples, summary = trained(tmp_path / "run", f"--task {task} --model_name_or_path {model} {few} {flags}")
    assert words in json.dumps(samples[0]["prompt"]) and summary["steps"] == 1
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").exists()
    assert (summary["accuracy_before"] is None) == (str(SAMPLE) in flags)
    names = {name.split("/")[1] for row in rows if "reward" in row for name in row if name.startswith("rewards/")}
    own = {"gsm8k": {"correctness", "format_reward", "length_reward"}, "countdown": {"format_reward", "process"}}
    assert names == own.get(task, names)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("task, before, after", [("code", 0.65, 0.75), ("countdown", 0.3, 0.6)])
def test_grpo_learns_the_task(tmp_path, task, before, after):
    rows, _, summary = trained(tmp_path, f"--task {task} --seed 0")
    assert summary["accuracy_before"] < before and summary["accuracy_after"] >= after
    lengths = [row["completions/mean_length"] for row in rows if "reward" in row]
    assert task != "countdown" or lengths[-1] > 1.5 * lengths[0]  # it tries on


def test_a_task_that_makes_its_own_data_refuses_other_data():
    own = ["arithmetic", "bandit", "calculator", "code", "countdown", "pizza", "reasoning_gym", "sums", "treasure"]
    for task in own:
        with pytest.raises(ValueError, match="dataset_name"):
            find_task(task).build(TrainConfig(task=task, dataset_name="x"), tiny.tokenizer())
        with pytest.raises(ValueError, match=f"task must be one of .*{task}"):
            find_task("answers")


def test_arithmetic_trains_on_no_held_out_pair():
    pairs, held_out = arithmetic.carry_pairs()
    assert len(set(held_out)) == arithmetic.HELD_OUT
    assert all(a % 10 + b % 10 >= 10 and min(a, b) >= 10 for a, b in held_out)
    assert not {frozenset(pair) for pair in pairs} & {frozenset(pair) for pair in held_out}
    assert all(a % 10 + b % 10 >= 10 for a, b in pairs) and len(pairs) > 2500
    texts = {(47, 38): "7+8=15 4+3+1=8 85", (41, 32): "1+2=3 4+3=7 73", (99, 99): "9+9=18 9+9+1=19 198"}
    for (a, b), text in texts.items():
        assert arithmetic.written(a, b) == text
        assert arithmetic.correctness([], [text, text + "0"], [str(a + b)] * 2) == [1.0, 0.0]


def test_the_warm_start_sees_no_held_out_pair():
    shown, (_, held_out) = arithmetic.examples(seed=0), arithmetic.carry_pairs()
    prompts = {row["prompt"] for row in shown}
    assert len(prompts) > 1000
    assert not prompts & {f"{a}+{b}=" for pair in held_out for a, b in (pair, pair[::-1])}
    a, b = map(int, shown[0]["prompt"][:-1].split("+"))
    assert shown[0]["completion"] == arithmetic.written(a, b)


@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_gsm8k_prompts_follow_the_tokenizer(system_prompt):
    config = TrainConfig(task="gsm8k", dataset_name=str(SAMPLE), system_prompt=system_prompt)
    plain, chat = gsm8k.build(config, tiny.tokenizer()), gsm8k.build(config, tiny.tokenizer(chat=True))
    row = chat.train().take(1)[0]
    worked, system = [] if system_prompt else [*gsm8k.WORKED], system_prompt or gsm8k.SYSTEM_PROMPT
    roles = ["system", *["user", "assistant"][: len(worked)], "user"]
    texts = [system, *worked, row["question"]]
    assert row["prompt"] == [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    shown = "Problem: {}\nSolution: {}\n\n".format(*worked) if worked else ""
    assert plain.train().take(1)[0]["prompt"] == f"{system}\n\n{shown}Problem: {row['question']}\nSolution: "
    assert [function.__name__ for function in plain.reward_funcs] == ["correctness", "format_reward", "length_reward"]
    assert plain.test() is None
    question, answer = gsm8k.WORKED
    assert gsm8k.correctness([question], [answer], ["#### 42"]) == [1.0]
    assert gsm8k.format_reward([question], [answer]) == [gsm8k.format_reward.full_mark]


def test_demonstrations_are_gsm8k_s_own_solutions_in_the_template():
    for task, tokenizer in ((gsm8k, tiny.tokenizer()), (gsm8k, tiny.tokenizer(chat=True)), (sums, tiny.tokenizer())):
        name = str(SAMPLE) if task is gsm8k else None
        built = task.build(TrainConfig(task="gsm8k", dataset_name=name), tokenizer)
        shown, rows = built.supervised(), built.train().rows
        texts = [row["completion"] for row in shown]
        assert [row["prompt"] for row in shown] == [row["prompt"] for row in rows]
        assert set(gsm8k.correctness([], texts, [row["answer"] for row in rows])) == {1.0}
        assert set(gsm8k.format_reward([], texts)) == {gsm8k.format_reward.full_mark}
        assert sum(built.steps_reward([], texts)) >= 0.9 * len(texts) and "<<" not in str(texts)
    solved = {"prompt": "?", "answer": "He has 2 + 3 = $<<2+3=5>>5.\n#### 5"}
    told = "<think>He has 2 + 3 = $5.</think><answer>5</answer>"
    assert gsm8k.demonstration(solved) == {"prompt": "?", "completion": told}
    with pytest.raises(ValueError, match="no solution before ####"):
        gsm8k.demonstration({"prompt": "?", "answer": "5"})


def test_gsm8k_rows_need_their_columns():
    with pytest.raises(ValueError, match="question and answer"):
        gsm8k.to_row({"text": "?"}, "", False)
    for column, value in (("question", None), ("question", " \n"), ("answer", 42)):
        with pytest.raises(ValueError, match=f"the {column} must be"):
            gsm8k.to_row({"question": "1+1?", "answer": "#### 2", column: value}, "", True)


def test_sums_are_right_and_no_held_out_pair_is_trained_on():
    def numbers(row):
        a, sign, b = row["question"][8:-1].split()
        return int(a), sign, int(b)

    trained, held_out = gsm8k.sums()
    assert len({row["question"] for row in held_out}) == gsm8k.HELD_OUT_SUMS
    pairs = [{(a, b) for a, _, b in map(numbers, rows)} for rows in (trained, held_out)]
    assert not pairs[0] & pairs[1] and len(trained) == 2 * len(pairs[0]) == 2980
    assert len(pairs[0] | pairs[1]) == 98 * 19 - 18 * 19 // 2 - 1  # all but the pair of the worked problem
    assert {sign for _, sign, _ in map(numbers, held_out)} == {"+", "-"}
    for row in trained[:25] + held_out[:25]:
        a, sign, b = numbers(row)
        value = a + b if sign == "+" else a - b
        assert 2 <= b <= a <= gsm8k.LARGEST_TERM and b <= gsm8k.LARGEST_SECOND
        texts = [f"<answer>{value}</answer>", f"<answer>{value + 1}</answer>"]
        assert gsm8k.correctness([], texts, [row["answer"]] * 2) == [1.0, 0.0]
    task = sums.build(TrainConfig(task="sums", system_prompt="Be brief."), tiny.tokenizer())
    assert task.test()[0]["prompt"].startswith("Be brief.\n\nProblem: What is ")
    assert len(task.train()) == len(trained) and len(task.test()) == gsm8k.HELD_OUT_SUMS
    assert digits_reward in task.reward_funcs and gsm8k.correctness in task.reward_funcs


def test_a_system_prompt_goes_before_a_prompt_and_before_messages():
    system, messages = {"role": "system", "content": "S"}, [{"role": "user", "content": "hi"}]
    whole, other = [system, *messages], [{"role": "system", "content": "other"}, *messages]
    for prompt, told in ((None, None), (7, 7), ([], []), ("hi", "S\n\nhi"), (messages, whole), (other, whole)):
        row = with_system({"prompt": prompt, "messages": messages, "x": 1}, "S")
        assert row == {"prompt": told, "messages": whole, "x": 1}
    assert with_system({"prompt": "hi"}, "S", chat=True) == {"prompt": whole}


def test_a_task_reads_only_the_requested_split(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "hi", "question": "1+1?", "answer": "#### 2"}\n')
    for module in (dataset, gsm8k):
        task = module.build(TrainConfig(task="dataset", dataset_name=str(tmp_path)), tiny.tokenizer())
        assert len(task.test()) == 1
        with pytest.raises(ValueError, match="has no split 'train'"):
            task.train()
    with pytest.raises(ValueError, match="--dataset_name"):
        dataset.build(TrainConfig(task="dataset"), None)
    assert dataset.build(TrainConfig(task="dataset", environment="my_tools:Guess"), None).train() is None
