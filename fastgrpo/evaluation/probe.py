"""How good a policy is while a warm start teaches it: what a task's `enough` looks at."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import to_prompt
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams


def reaches(
    accuracy: float,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict],
    reward: Callable,
    *,
    max_tokens: int,
    first: int,
    every: int,
) -> Callable[[int], bool]:
    """Make the test whether a policy's greedy completions reach an accuracy."""
    ids = [to_prompt(row, tokenizer).ids for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    engine = RolloutEngine(policy, max_num_seqs=len(rows))
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,))

    def look(step):
        if step < first or step % every:
            return False
        texts = [tokenizer.decode(r.ids, skip_special_tokens=True) for r in engine.generate(ids, 1, greedy)]
        return sum(reward(ids, texts, **columns)) / len(rows) >= accuracy

    return look
