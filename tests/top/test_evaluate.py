"""Held-out evaluation: its metrics, and the command."""

import json
import math
import re
from pathlib import Path

import pytest
import tiny
from ranks import start
from samples import drawn
from tool_runs import ENDS, ROWS, CountingBuilder

from fastgrpo.data.records import TrainerState
from fastgrpo.evaluate import main, parse
from fastgrpo.evaluation.estimators import wilson
from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.gsm8k import correctness, format_reward
from fastgrpo.rollout.backend import RolloutBackend
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.prompts import Prompts

STATE = TrainerState(0, 0, 0.0, 8)


class Script(RolloutBackend):
    """An engine with given completions: the greedy ones, then the sampled ones."""

    def __init__(self, greedy, draws):
        super().__init__(tiny.model(vocab_size=258))
        self.tokenizer, self.texts, self.samplings = tiny.tokenizer(), [greedy, draws], []

    def _stop(self, request):
        raise AssertionError("nothing is aborted")

    def step(self):
        texts = iter(self.texts.pop(0))
        self.samplings.append(self.waiting[0].sampling)
        outputs = {}
        for request in self.waiting:
            ids = [self.tokenizer(next(texts))["input_ids"] for _ in request.limits]
            outputs[request.request_id] = [drawn(i, reason="length" if len(i) > 30 else "stop") for i in ids]
        assert next(texts, None) is None
        self.waiting.clear()
        self.unfinished.clear()
        return outputs


def measured():
    right, wrong = "<think>.</think><answer>42</answer>", "<answer>7</answer>"
    rows = [{"prompt": "6x7?", "answer": "#### 42"}, {"prompt": "6x7 again?", "answer": "#### 42"}]
    engine = Script([right, wrong], [right, right, wrong, "none", wrong, wrong, "42", wrong])
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=50)
    rewards = Rewards([correctness, format_reward])
    return evaluate(engine, Prompts(engine.tokenizer), rows, rewards, sampling, STATE, None, 4), engine


def test_measures_every_metric():
    result, engine = measured()
    expected = {
        "accuracy": 0.5, "reward": 0.5 + (0.5 + 0.3) / 2, "sampled/reward": 3 / 8 + (0.5 * 2 + 0.3 * 4) / 8,
        "rewards/correctness/mean": 0.5, "rewards/format_reward/mean": (0.5 + 0.3) / 2, "format_rate": 0.5,
        "mean_length": (35 + 18) / 2, "clipped_ratio": 0.5, "pass@1": 3 / 8, "pass@2": (5 / 6 + 1 / 2) / 2,
        "pass@4": 1.0,
        "maj@2": ((1 + 2 * 0.5 + 2) / 6 + 3 * 0.5 / 6) / 2,  # a tie counts half, a draw without an answer has no vote
        "maj@4": (1.0 + 0.0) / 2, "sampled/rewards/correctness/mean": 3 / 8,
        "sampled/rewards/format_reward/mean": (0.5 * 2 + 0.3 * 4) / 8, "sampled/format_rate": 2 / 8,
        "sampled/mean_length": (35 * 2 + 18 * 4 + 4 + 2) / 8, "sampled/clipped_ratio": 2 / 8,
    }  # fmt: skip
    assert result.values.pop("eval/time") > 0
    assert result.values == {f"eval/{name}": pytest.approx(value) for name, value in expected.items()}
    greedy, drawn = engine.samplings
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.max_tokens) == (0, 1, 0, 50)
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens) == (0.7, 0.9, 5, 50)


def test_every_mean_has_its_interval():
    result, _ = measured()
    assert set(result.intervals) == set(result.values) - {"eval/time"}
    for name, (low, high) in result.intervals.items():
        assert low <= result.values[name] <= high, name
    metrics = result.metrics()
    assert (metrics["eval/accuracy/ci95_low"], metrics["eval/accuracy/ci95_high"]) == wilson(1, 2)
    assert "accuracy 0.500 [0.095, 0.905]" in result.summary() and "maj@4" in result.summary()


def run(greedy, draws, reward=correctness, **errors):
    engine = Script(greedy, draws)
    rows = [{"prompt": f"{i}?", "answer": "#### 42"} for i in range(len(greedy))]
    count = len(draws) // len(greedy)
    rewards = Rewards(reward, **errors)
    return evaluate(engine, Prompts(engine.tokenizer), rows, rewards, SamplingParams(max_tokens=50), STATE, None, count)


def test_equal_shares_for_every_problem_have_an_interval():
    result = run(["7"] * 3, ["7"] * 12, [correctness, format_reward])
    for name in ("accuracy", "pass@1", "pass@4", "maj@4", "format_rate", "sampled/format_rate"):
        assert result.intervals[f"eval/{name}"] == wilson(0, 3), name


def test_the_accuracy_of_one_prompt_is_that_of_its_draws():
    result = run(["7"], ["42", "7", "7", "7"])
    assert result.values["eval/accuracy"] == result.values["eval/pass@1"] == 0.25
    assert result.intervals == {"eval/accuracy": wilson(1, 4)}  # nothing else is measured more than once
    assert "accuracy 0.250 [0.046, 0.699], pass@1 0.250, pass@4 1.000, maj@4 0.000 (1 prompt, " in result.summary()
    assert run(["7"], []).metrics()["eval/accuracy"] == 0 and not run(["7"], []).intervals


def moody(completions, **_):
    verdicts = {"none": None, "?": float("nan")}
    return [verdicts.get(text, float(text != "The answer is C")) for text in completions]


def test_missing_rewards_votes_and_failures():
    result = run(["a", "none"], [], moody)
    assert result.values["eval/rewards/moody/mean"] == 1.0 and result.values["eval/accuracy"] == 0.5
    assert "eval/format_rate" not in result.values and result.rows[1]["rewards"] == {"moody": None}
    assert not any(math.isnan(value) for value in result.metrics().values())
    result = run(["The answer is B"], ["The answer is B"] * 3 + ["The answer is C"], moody)  # these cannot be counted
    assert result.values["eval/pass@4"] == 1.0 and not any("maj@" in name for name in result.values)
    result = run(["?", "a"], ["?", "?", "a", "?"], moody, on_error="skip")
    assert result.values["eval/rewards/moody/errors"] == 1 and result.values["eval/sampled/rewards/moody/errors"] == 3
    assert result.values["eval/accuracy"] == 0.5
    assert "'moody' failed on 1 of 2 held-out completions" in result.warnings[0]


def test_the_draws_of_an_engine_differ_and_a_prompt_that_it_cannot_hold_is_named():
    engine, rewards = RolloutEngine(tiny.model(vocab_size=258)), Rewards(lambda completions, **_: map(len, completions))
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(1,), seed=3)
    source = Prompts(tiny.tokenizer())
    result = evaluate(engine, source, [{"prompt": "ab"}], rewards, sampling, STATE, None, 8)
    drawn = [row["completion"] for row in result.rows if row["draw"] != "greedy"]
    assert len(drawn) == 8 and len(set(drawn)) > 4
    with pytest.raises(ValueError, match=r"prompt 'xxx.*\.\.\.' has 300 tokens.*context of 256"):
        evaluate(engine, source, [{"prompt": "x" * 300}], rewards, SamplingParams(max_tokens=5), STATE)


def problems(folder):
    """Flags of the command for five problems, without a model and an output."""
    rows = folder / "problems.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(5)))
    flags = f"--task gsm8k --dataset_name {rows} --device cpu --eval_num_generations 2 --temperature 0.9"
    return [*flags.split(), "--system_prompt", ""]


def test_compares_two_models(tmp_path, capfd):
    models = [str(tiny.save(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two"))]
    for model in models:
        file = Path(model) / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "clean_up_tokenization_spaces": True}))
    output = tmp_path / "completions.jsonl"
    argv = [*models, *problems(tmp_path), "--max_eval_samples", "3", "--top_p", "0.9", "--top_k", "20"]
    argv += ["--max_completion_length", "4", "--show", "7", "--output", str(output)]
    assert main(argv) == 0
    table, err = capfd.readouterr()
    assert all(model in table for model in models)
    told = [line for line in re.split("[\r\n]", err) if line.strip() and "%|" not in line]
    assert [line.partition(":")[0] for line in told] == models, err
    for name in ("accuracy", "pass@1", "pass@2", "maj@2", "sampled/rewards/length_reward/mean", "format_rate"):
        assert f"| {name} " in table, name
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["model"] for row in written] == [models[0]] * 9 + [models[1]] * 9
    assert {row["problem"] for row in written} == {0, 1, 2}
    shown = [line.split(" | ")[1].strip() for line in table.splitlines()[2:9]]
    assert shown == ["0"] * 3 + ["1"] * 3 + ["greedy"]  # --show: the draws, and the greedy completions after them
    assert main([*argv[:-1], str(tmp_path / "again.jsonl")]) == 0
    assert (tmp_path / "again.jsonl").read_text() == output.read_text()


def test_evaluates_with_tools(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("fastgrpo.tools.prompts.TurnBuilder", CountingBuilder)
    model, made = tiny.save(tmp_path / "model", chat=True), []
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": ENDS}))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    argv = [str(model), "--task", "dataset", "--dataset_name", str(tmp_path / "rows.jsonl"), "--device", "cpu"]
    argv += ["--reward_funcs", "tool_runs:reward", "--max_completion_length", "40", "--eval_num_generations", "2"]
    argv += ["--environment", "tool_runs:Counter", "--show", "20", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("tool_runs.Counter.__init__", lambda self: made.append(self))
    assert main([*argv, "--reward_weights", "0.5", "--max_num_seqs", "4"]) == 0  # the weight of Counter stays 1
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(rows) == 3 * len(ROWS) and any(row["calls"] for row in rows) and len(made) <= 5
    for row in rows:
        answers = [message["content"] for message in row["completion"] if message["role"] == "tool"]
        assert answers == [call["answer"] for call in row["calls"]][: len(answers)]
        assert row["rewards"]["Counter"] == len(row["calls"]) / 4
    out = capfd.readouterr().out
    names = "reward", "rewards/reward/mean", "rewards/Counter/mean"
    total, own, counter = (float(re.search(rf"\| {name} +\| (\S+)", out)[1]) for name in names)
    assert total == pytest.approx(own / 2 + counter, abs=1.5e-3) and total != pytest.approx(own + counter, abs=1e-2)
    assert re.search(r"count\(\{'n': \d+\}\)\W+tool: x", out)


def test_an_error_leaves_no_empty_file_that_would_stop_the_next_attempt(tmp_path, capsys):
    output, argv = tmp_path / "out.jsonl", [str(tiny.save(tmp_path / "model")), "--task", "gsm8k", "--device", "cpu"]
    argv += ["--max_completion_length", "4", "--output", str(output), "--dataset_name", str(tmp_path / "rows.jsonl")]
    for _ in range(2):
        assert main(argv) == 2
        assert "no such file" in capsys.readouterr().err and not output.exists()
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}')
    assert main(argv) == 0
    assert main(argv) == 2
    assert "out.jsonl exists already" in capsys.readouterr().err and len(output.read_text().splitlines()) == 1


def test_unstated_flags_are_the_tasks():
    assert parse(["m", "--task", "arithmetic"]).max_completion_length == 28
    assert parse(["m", "--task", "arithmetic", "--max_completion_length", "5"]).max_completion_length == 5
    config = parse(["m", "--task", "gsm8k", "--dataset_name", "folder", "--dataset_test_split", "dev"])
    assert (config.models, config.dataset_test_split) == (("m",), "dev")
    assert parse(["m", "--dataset_name", "f.jsonl"]).dataset_test_split == "train"
    assert parse(["m", "--dataset_name", "f.jsonl", "--dataset_test_split", "test"]).dataset_test_split == "test"


@pytest.mark.slow
def test_two_processes_give_the_completions_and_the_table_of_one(tmp_path, capsys):
    argv = [str(tiny.save(tmp_path / "model")), *problems(tmp_path), "--max_completion_length", "6", "--output"]
    assert main([*argv, str(tmp_path / "one.jsonl")]) == 0
    table = capsys.readouterr().out
    with start(["-m", "fastgrpo.evaluate", *argv, tmp_path / "two.jsonl"]) as job:
        assert job.wait() == 0, job.told()
        told, other = job.rank(0), job.rank(1)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    one, two = (re.findall(r"^\|(?! time).*", text, re.MULTILINE) for text in (table, told))
    assert two == one and told.count(": accuracy 0.") == 1 and not other


def test_reports_progress_from_the_first_token_to_the_end():
    told, rows = [], [{"prompt": text} for text in ("ab", "cde", "f")]
    engine = RolloutEngine(tiny.model(vocab_size=258), max_num_seqs=4)
    rewards = Rewards([lambda completions, **_: [0.0] * len(completions)])
    state, sampling = TrainerState(0, 0, 0.0, 6), SamplingParams(max_tokens=6, seed=0)
    evaluate(engine, Prompts(tiny.tokenizer()), rows, rewards, sampling, state, told.append, 2)
    assert sum(told) == pytest.approx(1) and 0 < told[0] < 0.2 and len(told) > 10
