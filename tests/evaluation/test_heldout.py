"""The output of an evaluation; tests/top/test_evaluate.py tests the measured values."""

import pytest
import tiny

from fastgrpo.data.records import TrainerState
from fastgrpo.evaluation.heldout import Evaluation, beside, comparison, draws_reported, evaluate
from fastgrpo.rewards.call import Rewards
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.prompts import Prompts


def evaluation():
    values = {"eval/accuracy": 0.5, "eval/pass@1": 0.25, "eval/pass@4": 0.75, "eval/mean_length": 12.0, "eval/time": 3}
    rows = [{"draw": draw} for draw in ("greedy", 0, 1, 2, 3)] * 2
    return Evaluation(values, {"eval/accuracy": (0.1, 0.9)}, rows, ["note: something"])


def test_summary_shows_accuracy_pass_at_k_and_notes():
    shown = evaluation()
    assert shown.cell("eval/accuracy") == "0.500 [0.100, 0.900]"
    assert shown.cell("eval/mean_length") == "12.000" and shown.cell("eval/maj@4") == ""
    assert shown.summary().splitlines() == [
        "accuracy 0.500 [0.100, 0.900], pass@1 0.250, pass@4 0.750 (2 prompts, 3.0 s)",
        "note: something",
    ]
    intervals = {"eval/accuracy/ci95_low": 0.1, "eval/accuracy/ci95_high": 0.9}
    assert shown.metrics() == shown.values | intervals
    lines = comparison(["a", "b"], [shown, Evaluation({"eval/mean_length": 3.0}, {}, [], [])])  # the most quoted first
    assert [line[0] for line in lines] == ["metric", "accuracy", "pass@1", "pass@4", "mean_length", "time (s)"]
    assert lines[1][1:] == ["0.500 [0.100, 0.900]", ""]
    assert [draws_reported(count) for count in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_completions_of_the_same_draw_stand_beside_each_other():
    def result(name, right):
        draws = [("greedy", 0), ("greedy", 1), (0, 0), (1, 0), (0, 1), (1, 1)]
        rows = [
            dict(problem=i, draw=draw, prompt=f"p{i}", completion=f"{name}{draw}{i}", right=right) for draw, i in draws
        ]
        return Evaluation({}, {}, rows, [])

    assert beside(["one", "two"], [result("a", True), result("b", False)], 5) == [
        ["prompt", "draw", "one", "two"],
        ["'p0'", "0", "right: a00", "wrong: b00"],
        ["'p1'", "0", "right: a01", "wrong: b01"],
        ["'p0'", "1", "right: a10", "wrong: b10"],
        ["'p1'", "1", "right: a11", "wrong: b11"],
        ["'p0'", "greedy", "right: agreedy0", "wrong: bgreedy0"],
    ]


def test_reports_progress_from_the_first_token_to_the_end():
    """Its rate is known long before the first completion has ended, and greedy completions and draws fill it once."""
    told, rows = [], [{"prompt": text} for text in ("ab", "cde", "f")]
    engine = RolloutEngine(tiny.model(vocab_size=258), max_num_seqs=4)
    rewards = Rewards([lambda completions, **_: [0.0] * len(completions)])
    state, sampling = TrainerState(0, 0, 0.0, 6), SamplingParams(max_tokens=6, seed=0)
    evaluate(engine, Prompts(tiny.tokenizer()), rows, rewards, sampling, state, told.append, 2)
    assert sum(told) == pytest.approx(1) and 0 < told[0] < 0.2 and len(told) > 10
