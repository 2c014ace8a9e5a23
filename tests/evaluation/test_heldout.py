"""The progress of an evaluation; tests/top/test_evaluate.py tests its values and its output."""

import pytest
import tiny

from fastgrpo.data.records import TrainerState
from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.rewards.call import Rewards
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.prompts import Prompts


def test_reports_progress_from_the_first_token_to_the_end():
    """Its rate is known long before the first completion has ended, and greedy completions and draws fill it once."""
    told, rows = [], [{"prompt": text} for text in ("ab", "cde", "f")]
    engine = RolloutEngine(tiny.model(vocab_size=258), max_num_seqs=4)
    rewards = Rewards([lambda completions, **_: [0.0] * len(completions)])
    state, sampling = TrainerState(0, 0, 0.0, 6), SamplingParams(max_tokens=6, seed=0)
    evaluate(engine, Prompts(tiny.tokenizer()), rows, rewards, sampling, state, told.append, 2)
    assert sum(told) == pytest.approx(1) and 0 < told[0] < 0.2 and len(told) > 10
