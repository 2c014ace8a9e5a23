"""Checks that prompts fit the policy. Every row is checked before the first step, so that none ends a run midway."""

from collections.abc import Iterable

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import shortened, to_prompt
from fastgrpo.data.records import Prompt
from fastgrpo.policy.model import Policy


def check_prompts(prompts: Iterable[Prompt], policy: Policy, max_tokens: int) -> None:
    """Refuse prompts that the policy cannot hold.

    Args:
        prompts: The prompts.
        policy: The policy.
        max_tokens: The most tokens of a completion: the setting max_completion_length.

    Raises:
        ValueError: For the reasons of `Policy.check_prompt`; the error shows the beginning of the prompt.
    """
    for prompt in prompts:
        policy.check_prompt(prompt.ids, max_tokens, f"the prompt {shortened(prompt.prompt)}", "max_completion_length")


def check_rows(rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase, policy: Policy, max_tokens: int) -> None:
    """Tokenize every row and check its prompt.

    Args:
        rows: Data rows.
        tokenizer: The policy's tokenizer.
        policy: The policy.
        max_tokens: The most tokens of a completion.

    Raises:
        ValueError: For the reasons of `to_prompt` and `check_prompts`.
    """
    for row in tqdm(rows, desc="check prompts", delay=2, leave=False):
        check_prompts([to_prompt(row, tokenizer)], policy, max_tokens)
