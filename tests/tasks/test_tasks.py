"""The built-in tasks: arithmetic, GSM8K, sums, and data sets of one's own."""

import json
import os

import pytest
import tiny
from paths import DATA

from fastgrpo.config.settings import TrainConfig
from fastgrpo.rewards.gsm8k import digits_reward
from fastgrpo.tasks import arithmetic, dataset, find_task, gsm8k, make_policy, sums
from fastgrpo.train import main

pytestmark = pytest.mark.usefixtures("without_curves")

SAMPLE = DATA / "gsm8k-64.jsonl"


def test_held_out_pairs_are_on_no_level_and_all_carry():
    *levels, held_out = arithmetic.pairs_by_level()
    assert len(set(held_out)) == arithmetic.HELD_OUT
    assert all(a % 10 + b % 10 >= 10 and min(a, b) >= 10 for a, b in held_out)
    for level in levels:
        assert level and not {frozenset(pair) for pair in level} & {frozenset(pair) for pair in held_out}
    hardest = levels[-1]
    assert all(a % 10 + b % 10 >= 10 for a, b in hardest)
    assert len(hardest) > 2500


@pytest.mark.parametrize(
    "a, b, text", [(47, 38, "7+8=15 4+3+1=8 85"), (41, 32, "1+2=3 4+3=7 73"), (99, 99, "9+9=18 9+9+1=19 198")]
)
def test_written_sums(a, b, text):
    assert arithmetic.written(a, b) == text
    assert arithmetic.correctness([], [text, text + "0"], [str(a + b)] * 2) == [1.0, 0.0]


def test_the_warm_start_sees_no_held_out_pair(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("fastgrpo.tasks.sft", lambda model, examples, **_: seen.extend(examples))  # it alone learns
    path = make_policy(arithmetic, tmp_path / "model", TrainConfig(device="cpu"), lambda *_: None)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = {tokenizer.decode(example.prompt_ids) for example in seen}
    *_, held_out = arithmetic.pairs_by_level()
    assert len(prompts) > 1000
    assert not prompts & {f"{a}+{b}=" for pair in held_out for a, b in (pair, pair[::-1])}
    prompt, completion = tokenizer.decode(seen[0].prompt_ids), seen[0].ids
    a, b = (int(number) for number in prompt[:-1].split("+"))
    assert tokenizer.decode(completion, skip_special_tokens=True) == arithmetic.written(a, b)
    assert completion[-1] == tokenizer.eos_token_id


def test_gsm8k_prompts_follow_the_tokenizer():
    config = TrainConfig(task="gsm8k", dataset_name=str(SAMPLE))
    chat = gsm8k.build(config, tiny.tokenizer(chat=True))
    row = chat.train().take(1)[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "user"]
    texts = [message["content"] for message in row["prompt"]]
    assert texts == [gsm8k.SYSTEM_PROMPT, *gsm8k.WORKED, row["question"]]
    plain = gsm8k.build(config, tiny.tokenizer())
    question, answer = gsm8k.WORKED
    assert plain.train().take(1)[0]["prompt"] == (
        f"{gsm8k.SYSTEM_PROMPT}\n\nProblem: {question}\nSolution: {answer}\n\nProblem: {row['question']}\nSolution: "
    )
    assert [function.__name__ for function in plain.reward_funcs] == ["correctness", "format_reward", "length_reward"]
    assert plain.test() is None


def test_gsm8k_system_prompt():
    config = TrainConfig(task="gsm8k", dataset_name=str(SAMPLE), system_prompt="Be brief.")
    row = gsm8k.build(config, tiny.tokenizer(chat=True)).train().take(1)[0]
    assert [message["content"] for message in row["prompt"]] == ["Be brief.", row["question"]]
    plain = gsm8k.build(config, tiny.tokenizer()).train().take(1)[0]
    assert plain["prompt"] == f"Be brief.\n\nProblem: {plain['question']}\nSolution: "


def test_the_worked_problem_earns_every_reward():
    question, answer = gsm8k.WORKED
    assert gsm8k.correctness([question], [answer], ["#### 42"]) == [1.0]
    assert gsm8k.format_reward([question], [answer]) == [gsm8k.format_reward.full_mark]


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
        assert gsm8k.correctness([""], [f"<answer>{value}</answer>"], [row["answer"]]) == [1.0]
        assert gsm8k.correctness([""], [f"<answer>{value + 1}</answer>"], [row["answer"]]) == [0.0]


def test_the_task_of_sums_has_the_prompt_and_the_rewards_of_gsm8k():
    for tokenizer in (tiny.tokenizer(chat=True), tiny.tokenizer()):
        task = sums.build(TrainConfig(task="sums"), tokenizer)
        row = task.test()[0]
        assert row == gsm8k.to_row(row, None, tokenizer.chat_template is not None)
        assert len(task.train()) == len(gsm8k.sums()[0]) and len(task.test()) == gsm8k.HELD_OUT_SUMS
    config = TrainConfig(task="gsm8k", dataset_name=str(SAMPLE))
    assert task.reward_funcs == [*gsm8k.build(config, tokenizer).reward_funcs, digits_reward]
    brief = sums.build(TrainConfig(task="sums", system_prompt="Be brief."), tokenizer).test()[0]
    assert brief["prompt"].startswith("Be brief.\n\nProblem: What is ")
    with pytest.raises(ValueError, match="task=sums makes its own data; use dataset_name with --task gsm8k"):
        sums.build(TrainConfig(task="sums", dataset_name="x"), tokenizer)


def test_gsm8k_rows_need_their_columns():
    with pytest.raises(ValueError, match="columns question and answer, got text"):
        gsm8k.to_row({"text": "?"}, "", False)
    good = {"question": "1+1?", "answer": "#### 2"}
    for column in good:
        for value, shown in ((None, "None"), ("", "''"), (" \n", r"' \\n'"), (["a"], r"\['a'\]"), (42, "42")):
            with pytest.raises(ValueError, match=f"the {column} must be a text that is not empty, got {shown}$"):
                gsm8k.to_row({**good, column: value}, "", True)


def test_rows_keep_their_lines_in_a_task(tmp_path):
    """Also with a system prompt before each prompt."""
    path = tmp_path / "train.jsonl"
    row = json.dumps({"prompt": "hi", "question": "1+1?", "answer": "2"})
    path.write_text(f"\n{row}\n\n{row}\n")
    for system_prompt in (None, "S"):
        config = TrainConfig(task="dataset", dataset_name=str(path), system_prompt=system_prompt)
        rows = dataset.build(config, None).train().rows
        assert rows.where(1) == f"{path}:4" and rows[1]["prompt"] == ("hi" if system_prompt is None else "S\n\nhi")
    config = TrainConfig(task="gsm8k", dataset_name=str(path))
    rows = gsm8k.build(config, tiny.tokenizer()).train().rows
    assert rows.where(len(rows) - 1) == f"{path}:4"


@pytest.mark.parametrize("prompt", [None, 7, []])
def test_a_system_prompt_leaves_what_is_no_prompt_as_it_is(prompt):
    row = {"prompt": prompt}
    assert dataset._with_system(row, "S") == row


def test_a_system_prompt_goes_before_a_prompt_and_before_messages():
    talk = [{"role": "user", "content": "hi"}]
    both = dataset._with_system({"prompt": "hi", "messages": talk}, "S")
    assert both == {"prompt": "S\n\nhi", "messages": [{"role": "system", "content": "S"}, *talk]}


def test_data_sets_of_ones_own(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "x": 1}) + "\n")
    task = dataset.build(TrainConfig(task="dataset", dataset_name=str(path), system_prompt="S"), None)
    assert task.train().take(1)[0] == {
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        "x": 1,
    }
    plain = dataset._with_system({"prompt": "hi"}, "S")
    assert plain["prompt"] == "S\n\nhi"
    with pytest.raises(ValueError, match="needs --dataset_name"):
        dataset.build(TrainConfig(task="dataset"), None)


def test_unknown_task():
    assert find_task("gsm8k") is gsm8k
    with pytest.raises(
        ValueError, match="arithmetic, bandit, code, countdown, dataset, gsm8k, pizza, sums, got 'answers'"
    ):
        find_task("answers")


@pytest.mark.parametrize("whole", [False, True], ids=["64 rows", "the real files"])
def test_five_steps_on_gsm8k_with_a_small_qwen2(tmp_path, whole):
    """The real job, from the command line: chat template, three rewards, evaluation, checkpoint."""
    name = str(SAMPLE)
    if whole:
        name = os.environ.get("FASTGRPO_GSM8K")
        if name is None:
            pytest.skip("FASTGRPO_GSM8K does not name the folder of the real train.jsonl and test.jsonl")
    model = tiny.save(tmp_path / "model", chat=True)
    code = main(
        f"--task gsm8k --model_name_or_path {model} --dataset_name {name} --output_dir {tmp_path / 'run'} "
        "--max_steps 5 --prompts_per_step 2 --num_generations 4 --max_completion_length 24 "
        "--learning_rate 1e-3 --logging_steps 1 --beta 0.04 --max_eval_samples 4 --device cpu "
        "--reward_weights 1.0 0.5 0.1 --top_p 0.95 --top_k 100".split()
    )
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    for name in ("correctness", "format_reward", "length_reward"):
        assert f"rewards/{name}/mean" in steps[0]
    assert (tmp_path / "run" / "checkpoint-5" / "model.safetensors").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["accuracy_before"] is not None) is whole


def test_rewards_are_chosen_by_name(tmp_path, monkeypatch):
    model = tiny.save(tmp_path / "model", chat=True)
    (tmp_path / "rewards_by_name.py").write_text(
        "def brevity(completions, **_):\n    return [-1.0 for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code = main(
        f"--task gsm8k --model_name_or_path {model} --dataset_name {SAMPLE} --output_dir {tmp_path / 'run'} "
        "--max_steps 1 --prompts_per_step 1 --num_generations 2 --max_completion_length 4 --logging_steps 1 "
        "--device cpu "
        "--reward_funcs format_reward rewards_by_name:brevity".split()
    )
    assert code == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["rewards/brevity/mean"] == -1.0 and "rewards/correctness/mean" not in row


def test_a_task_reads_the_data_it_is_asked_for(tmp_path):
    """A folder without train.jsonl can be evaluated, and one without test.jsonl can be trained on."""
    (tmp_path / "test.jsonl").write_text('{"prompt": "hi", "question": "1+1?", "answer": "#### 2"}\n')
    for module in (dataset, gsm8k):
        task = module.build(TrainConfig(task="dataset", dataset_name=str(tmp_path)), tiny.tokenizer())
        assert len(task.test()) == 1
        with pytest.raises(ValueError, match="has no split 'train'"):
            task.train()


def test_arithmetic_refuses_data_it_would_not_read():
    with pytest.raises(ValueError, match="use system_prompt with --task gsm8k"):
        arithmetic.build(TrainConfig(system_prompt="Be brief."), None)
