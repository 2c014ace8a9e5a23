"""reasoning-gym as a task. Tests that need the package are slow: it is not in the environment of CI."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import tiny
from runs import lines

from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import TrainConfig
from fastgrpo.tasks import reasoning_gym
from fastgrpo.train import main

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
if INSTALLED:
    from reasoning_gym.factory import DATASETS
TASKS = sorted(DATASETS.keys() - {"composite"}) if INSTALLED else []
# Their scores come from Python's eval, or from sympy's parser, which calls it.
EVALUATED = [
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "number_sorting", "polynomial_multiplication",
    "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
]  # fmt: skip


def needs_gym(test):
    return pytest.mark.slow(pytest.mark.skipif(not INSTALLED, reason="fastgrpo[gym] is not installed")(test))


def built(tasks, tokenizer=None, **settings):
    config = TrainConfig(task="reasoning_gym", reasoning_gym_tasks=tasks, **settings)
    return reasoning_gym.build(config, tokenizer or tiny.tokenizer(chat=True))


def scored(task, rows, texts):
    columns, logged = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}, {}
    score, form = task.reward_funcs
    given = {"prompts": [row["prompt"] for row in rows], "completions": texts, **columns}
    return score(**given, log_metric=logged.__setitem__), form(**given), logged


@pytest.mark.parametrize("text, message", [
    (None, "needs --reasoning_gym_tasks"), ("chain_sum:0", "chain_sum: weight must be positive"),
    ("chain_sum,ab,chain_sum", "twice"), ('{"chain_sum": 2}', "chain_sum must be a dictionary"),
])  # fmt: skip
def test_refuses_tasks_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        built(text)


def test_a_config_file_gives_tasks_as_a_mapping(tmp_path):
    file = tmp_path / "gym.yaml"
    file.write_text("task: reasoning_gym\nreasoning_gym_tasks:\n  chain_sum: {weight: 2, max_terms: 3}\n  ab: {}\n")
    text = parse(["--config", str(file)]).reasoning_gym_tasks
    assert reasoning_gym.chosen(text) == {"chain_sum": (2, 0, {"max_terms": 3}), "ab": (1, 0, {})}


def test_a_missing_package_is_a_user_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for name in ("reasoning_gym.composite", "reasoning_gym.factory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    model = tiny.save(tmp_path / "model")
    assert main(f"--task reasoning_gym --reasoning_gym_tasks ab --model_name_or_path {model} --device cpu".split()) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("not installed: pip install reasoning-gym")


@pytest.mark.parametrize("computes, texts", [
    (False, ("__import__('os').system('x')", "(lambda: 1)()", "x.subs(1, 2)", "9**9**9", "2**(50*50)", "1 << 10**3",
             "9999999!", "[open\n('x')]", "f(x", "2**1000000")),
    (True, ("4*(3 - 2)", "-2*x**3*cos(x) + C", "(x + 1)**(3/2)", "1 2 3", "[['1', '2']]")),
])  # fmt: skip
def test_only_answers_that_compute_are_evaluated(computes, texts):
    assert [text for text in texts if reasoning_gym.only_computes(text) != computes] == []


def test_the_prompt_says_which_tags_are_rewarded():
    asked = {"answer": "<answer> and </answer>", "both": "<think> </think> and <answer> </answer>"}
    texts = ["<think>1</think> <answer>2</answer>\n", "so <answer>2</answer>", "<answer>2</answer> it is", "2",
             "<answer>1</answer><answer>2</answer>", "<answer>2</answer><think></think>"]  # fmt: skip
    right = {
        name: reasoning_gym.format_reward([[{"role": "system", "content": words}]] * len(texts), texts)
        for name, words in asked.items()
    }
    assert right == {"answer": [0.1, 0.1, 0.0, 0.0, 0.0, 0.0], "both": [0.1, 0.0, 0.0, 0.0, 0.0, 0.0]}


@needs_gym
@pytest.mark.parametrize("text, message", [
    ("chain_sums", "no task 'chain_sums'; did you mean 'chain_sum'"), ("word_ladder", "PYTHONHASHSEED=0"),
    ('{"chain_sum": {"max_term": 3}}', "did you mean 'max_terms'"),
])  # fmt: skip
def test_suggests_the_name_that_was_meant(monkeypatch, text, message):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=message):
        built(text)


@needs_gym
def test_training_never_draws_a_held_out_question():
    tasks = '{"chain_sum": {"max_digits": 1, "max_terms": 2}, "leg_counting": {"weight": 3}}'
    task = built(tasks)
    source, held_out = task.train(), task.test()
    drawn = source.take(600)
    assert len(held_out) == 200 and not {row["question"] for row in drawn} & {row["question"] for row in held_out}
    share = sum(row["metadata"]["source_dataset"] == "leg_counting" for row in drawn) / 600
    assert 0.65 < share < 0.85  # the held-out sums are half of all
    resumed = built(tasks).train()
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.take(5) == source.take(5) != built(tasks, seed=1).train().take(5)
    made = [{row["question"] for row in built("chain_sum", seed=seed).train().take(50)} for seed in (0, 1)]
    assert not made[0] & made[1]
    with pytest.raises(ValueError, match="more questions"):
        built('{"chain_sum": {"min_digits": 1, "max_digits": 1, "min_terms": 1, "max_terms": 1}}').train()


@needs_gym
def test_scores_the_text_in_the_last_answer_tags():
    task = built("spell_backward,prime_factorization", system_prompt="direct")
    rows = task.test()[:40]
    right = [f"first <answer>no</answer>, then <answer> {row['answer']} </answer>" for row in rows]
    score, form, logged = scored(task, rows, right)
    assert score == [1.0] * 40 and not any(form)
    assert logged == {"score/spell_backward": 1.0, "score/prime_factorization": 1.0}
    assert max(scored(task, rows, [row["answer"] for row in rows])[0]) == 0.0  # without tags
    assert max(scored(task, rows, ["<answer>x[</answer>"] * 40)[0]) < 0.1  # int() of it fails in their code
    system = rows[0]["prompt"][0]
    assert system["role"] == "system" and system["content"].startswith("Answer the question directly")
    legs = {"solved": 2, "min_animals": 1, "max_animals": 1, "max_instances": 3}
    task = built({"leg_counting": legs}, system_prompt="direct")
    row = task.test()[0]
    assert [message["role"] for message in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert not {message["content"] for message in row["prompt"][1:-1]} & {row["question"] for row in task.test()}
    plain = built("spell_backward", tiny.tokenizer(), system_prompt="Do it.").test()[0]
    assert plain["prompt"] == f"Do it.\n\n{plain['question']}\n"


@needs_gym
def test_answers_are_evaluated_only_where_they_must_be(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "HELD_OUT", 30)
    assert [name for name in TASKS if reasoning_gym._evaluates(DATASETS[name][0])] == EVALUATED
    task = built({name: {} for name in EVALUATED if name not in reasoning_gym.HASHED})
    rows = task.test()
    assert scored(task, rows, [f"<answer>{row['answer']}</answer>" for row in rows])[0] == [1.0] * 30
    assert all(row["answer"] is None or reasoning_gym.only_computes(row["answer"]) for row in rows)
    assert scored(task, rows, ["<answer>[exit()]</answer>"] * 30)[0] == [0.0] * 30


@needs_gym
def test_problems_of_other_tasks_are_the_same_in_every_process():
    code = """import hashlib, sys, reasoning_gym
for name in sys.argv[1:]:
    made = reasoning_gym.create_dataset(name, seed=7, size=9)
    print(name, hashlib.md5(repr([(made[i]["question"], made[i]["answer"]) for i in range(3)]).encode()).hexdigest())"""
    told = [
        subprocess.run(
            [sys.executable, "-c", code, *TASKS], env=os.environ | {"PYTHONHASHSEED": seed}, text=True, check=True,
            stdout=subprocess.PIPE,
        ).stdout.splitlines()
        for seed in "12"
    ]  # fmt: skip
    differ = {one.split()[0] for one, other in zip(*told, strict=True) if one != other}
    assert len(told[0]) == len(TASKS) == 105 and differ == reasoning_gym.HASHED


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), chat=True, max_position_embeddings=32768)


@needs_gym
@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("name", TASKS)
def test_every_task_makes_a_step(tmp_path, monkeypatch, model, name):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # only for the check: nothing resumes here
    monkeypatch.setattr(reasoning_gym, "HELD_OUT", 1)
    monkeypatch.setattr(reasoning_gym, "CHECKED", 1)
    few = "--max_steps 1 --prompts_per_step 1 --num_generations 2 --max_completion_length 4 --device cpu"
    flags = f"--task reasoning_gym --reasoning_gym_tasks {name} --model_name_or_path {model}"
    few += f" --output_dir {tmp_path}/run"
    assert main(f"{flags} {few}".split()) == 0
    step = next(row for row in lines(tmp_path / "run") if "reward" in row)
    assert step["rewards/score_answer/mean"] == step[f"score/{name}"]
