"""The reward functions of GSM8K: a correct value, the asked format, and a completion that ends in time.

Each is called as TRL calls its own: ``reward(prompts, completions, completion_ids=..., trainer_state=..., **columns)``
with one item of every argument per completion, and returns one reward per completion.
"""

import re

from fastgrpo.rewards.answers import answers_match, completion_text, read_number

FORMAT_STEP = 0.1
SOFT_LIMIT = 0.8  # of the completion limit: where length_reward begins to fall

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)


def correctness(prompts: list, completions: list, answer: list, **columns) -> list[float | None]:
    r"""Reward 1.0 for the reference's value, 0.0 for another or none that can be read.

    Args:
        prompts: not used.
        completions: strings, or lists of messages.
        answer: the data set's own column: a text such as ``... #### 42``, or a bare answer or number.
        columns: not used.

    Returns:
        1.0 or 0.0 a completion; None, which leaves the row out, where its reference holds no number.

    Raises:
        ValueError: there are not as many references as completions.

    Example:
        >>> correctness(["6 x 7?"] * 2, ["<answer>42</answer>", "#### 41"], answer=["6 x 7 = 42\n#### 42"] * 2)
        [1.0, 0.0]
    """
    verdicts = (
        answers_match(completion_text(completion), "" if reference is None else str(reference))
        for completion, reference in zip(completions, answer, strict=True)
    )
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def format_reward(prompts: list, completions: list, **columns) -> list[float]:
    """Reward 0.1 for each tag of ``<think>...</think><answer>...</answer>`` and 0.1 for a number in the answer.

    A tag counts where it appears exactly once, on its side of its partner: an opening tag with no closing tag before
    it, a closing tag with an opening tag before it. The number counts where the last ``<answer>``, closed or not,
    holds one that ``read_number`` reads.

    Args:
        prompts: not used.
        completions: strings, or lists of messages.
        columns: not used.

    Returns:
        From 0.0 to 0.5 a completion.

    Example:
        >>> format_reward(["6 x 7?"] * 2, ["<think>6 x 7</think><answer>42</answer>", "42"])
        [0.5, 0.0]
    """
    return [_format_steps(completion_text(completion)) * FORMAT_STEP for completion in completions]


format_reward.full_mark = 5 * FORMAT_STEP  # evaluation counts the completions that get it: the format rate


def _format_steps(text: str) -> int:
    steps = 0
    for name in ("think", "answer"):
        opening, closing = f"<{name}>", f"</{name}>"
        start, end = text.find(opening), text.find(closing)
        steps += text.count(opening) == 1 and (end == -1 or start < end)
        steps += text.count(closing) == 1 and -1 < start < end
    answers = _ANSWER.findall(text)
    return steps + bool(answers and read_number(answers[-1]) is not None)


def length_reward(
    prompts: list, completions: list, *, completion_ids: list[list[int]], trainer_state, **columns
) -> list[float]:
    """Punish a completion that comes near the completion limit, where it would be cut off.

    The reward is 0.0 up to ``SOFT_LIMIT`` of the limit and falls linearly to -1.0 at the limit, so that it never pays
    to say less than a solution needs (the soft overlong punishment of DAPO, https://arxiv.org/abs/2503.14476).

    Args:
        prompts: not used.
        completions: not used.
        completion_ids: the tokens of every completion.
        trainer_state: its ``max_completion_length`` is the limit, in tokens.
        columns: not used.

    Returns:
        From -1.0 to 0.0 a completion.

    Raises:
        ValueError: the trainer state has no positive limit.

    Example:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(max_completion_length=10)
        >>> length_reward(["?"] * 3, ["..."] * 3, completion_ids=[[0] * 8, [0] * 9, [0] * 10], trainer_state=state)
        [0.0, -0.5, -1.0]
    """
    limit = getattr(trainer_state, "max_completion_length", None)
    if limit is None or limit <= 0:
        raise ValueError(f"length_reward needs a positive trainer_state.max_completion_length, not {limit!r}")
    soft_limit = SOFT_LIMIT * limit
    return [min(0.0, max(-1.0, (soft_limit - len(ids)) / (limit - soft_limit))) for ids in completion_ids]
