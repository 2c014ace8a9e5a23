"""The reward functions of GSM8K: correctness, right digits, right steps, format and length.

An empty completion gets the smallest possible sum, `-LENGTH_PENALTY`, so a model cannot learn to write nothing.

They are called as in TRL: ``reward(prompts, completions, completion_ids=..., trainer_state=..., **columns)``.
Completions are strings or lists of messages. `answer` holds the references: texts such as ``#### 42``, or only the
answer. Each argument except the trainer state has one item per completion, and so has the result; another length raises
ValueError.
"""

import re
from fractions import Fraction
from typing import Any

from fastgrpo.rewards.answers import answers_match, completion_text, read_number
from fastgrpo.rewards.countdown import expression_value

FORMAT_STEP = 0.1
SOFT_LIMIT = 0.8  # length_reward begins to fall at this share of the completion limit
LENGTH_PENALTY = FORMAT_STEP  # as much as one tag is worth: a long completion with two tags still earns a reward

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
CALCULATOR = re.compile("<<[^<>]*>>")  # GSM8K's solutions repeat each calculation in these: 48/2 = <<48/2=24>>24
_REWRITES = [
    (CALCULATOR, ""),
    (re.compile(r"[$]|,(?=[0-9]{3})"), ""),
    (re.compile(r"×|(?<![A-Za-z])[xX](?![A-Za-z])"), "*"),
    (re.compile("÷"), "/"),
    (re.compile("[–−]"), "-"),
    (re.compile(r"(?<=[0-9]) [A-Za-z ]+(?= [-+*/=])"), ""),  # units: 7 blocks + 3 blocks
]
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_STEP = re.compile(  # an expression, and what follows its sign =, which may be the next expression of a chain
    r"(?<![-+*/(). 0-9])([-+*/(). 0-9]++)"
    rf"(?== ?(-?{_NUMBER}(?: ?[-+*/] ?{_NUMBER})*)(?!\.?[0-9]| ?[-+*/(%]))"
)


def correctness(prompts: list, completions: list, answer: list, **columns: list) -> list[float | None]:
    r"""Return 1.0 for the value of the reference, and 0.0 for another or an unreadable value.

    Return None, which leaves the completion unjudged, if the reference has no digit or cannot be read.

    Examples:
        >>> correctness(["6 x 7?"] * 2, ["<answer>42</answer>", "#### 41"], answer=["6 x 7 = 42\n#### 42"] * 2)
        [1.0, 0.0]
    """
    verdicts = (
        answers_match(completion_text(completion), "" if reference is None else str(reference))
        for completion, reference in zip(completions, answer, strict=True)
    )
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def format_reward(prompts: list, completions: list, **columns: list) -> list[float]:
    """Return 0.1 for each tag of ``<think>...</think><answer>...</answer>``, and 0.1 for a number in the answer.

    A tag counts if it appears exactly once, and on the right side of its partner. The number counts if the last
    ``<answer>``, closed or not, holds a number that ``read_number`` reads.

    Examples:
        >>> format_reward(["6 x 7?"] * 2, ["<think>6 x 7</think><answer>42</answer>", "42"])
        [0.5, 0.0]
    """
    return [_format_steps(completion_text(completion)) * FORMAT_STEP for completion in completions]


format_reward.full_mark = 5 * FORMAT_STEP  # the format rate of an evaluation is the share of completions that get this


def _format_steps(text: str) -> int:
    steps = 0
    for name in ("think", "answer"):
        opening, closing = f"<{name}>", f"</{name}>"
        start, end = text.find(opening), text.find(closing)
        steps += text.count(opening) == 1 and (end == -1 or start < end)
        steps += text.count(closing) == 1 and -1 < start < end
    answers = _ANSWER.findall(text)
    return steps + bool(answers and read_number(answers[-1]) is not None)


def digits_reward(prompts: list, completions: list, answer: list, **columns: list) -> list[float]:
    """Return the share of right digits, aligned at the last digit.

    Reads the number that `format_reward` counts; references must be whole numbers. Missing digits, and digits beyond
    the length of the reference, are wrong. Returns 0.0 if the completion or its reference holds no whole number.

    Examples:
        >>> digits_reward(["?"] * 3, ["<answer>43</answer>", "<answer>3</answer>", "23"], ["#### 23"] * 3)
        [0.5, 0.5, 0.0]
    """
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        answers = _ANSWER.findall(completion_text(completion))
        given, wanted = _digits(answers[-1] if answers else ""), _digits(str(reference))
        right = sum(a == b for a, b in zip(reversed(given), reversed(wanted), strict=False))
        rewards.append(right / max(len(given), len(wanted)) if given and wanted else 0.0)
    return rewards


def _digits(text: str) -> str:
    """Return the whole number at the end of a text, or an empty text."""
    value = read_number(text)
    return str(value) if value is not None and value.denominator == 1 else ""


def steps_reward(prompts: list, completions: list, **columns: list) -> list[float]:
    """Return 1.0 if a completion has calculations such as ``48 / 2 = 24``, and all of them are right, else 0.0.

    A result with decimals may be rounded. Units after numbers are skipped. A calculation that cannot be read, such as
    one with a variable or a percentage, is ignored. Of GSM8K's own solutions, 95% get 1.0.

    Examples:
        >>> steps_reward(["?"] * 3, ["48 / 2 = 24, so 24 + 48 = 72", "48 / 2 = 26, so 72", "72"])
        [1.0, 0.0, 0.0]
    """
    return [float(_steps_right(completion_text(completion))) for completion in completions]


def _steps_right(text: str) -> bool:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    verdicts = []
    for expression, result in _STEP.findall(text):
        value, expected = expression_value(expression, terms := []), expression_value(result, [])
        if value is not None and expected is not None and len(terms) > 1:
            last_place = Fraction(1, 10 ** len(result.partition(".")[2]))
            verdicts.append(value == expected or ("." in result and abs(value - expected) < last_place))
    return bool(verdicts) and all(verdicts)


def length_reward(
    prompts: list, completions: list, *, completion_ids: list[list[int]], trainer_state: Any, **columns: list
) -> list[float]:
    """Punish a completion near the length limit, or an empty one.

    The reward is 0.0 up to ``SOFT_LIMIT`` of the limit and falls linearly to ``-LENGTH_PENALTY`` at the limit. This is
    the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) on a smaller scale. An empty completion
    gets ``-LENGTH_PENALTY`` too: otherwise it would be the best answer to a problem that the model cannot solve.

    The limit, in tokens, is `trainer_state.max_completion_length`. Raises ValueError if it is not positive.

    Examples:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(max_completion_length=10)
        >>> length_reward(["?"] * 3, ["..."] * 3, completion_ids=[[0] * 8, [0] * 9, [0] * 10], trainer_state=state)
        [0.0, -0.05, -0.1]
    """
    limit = getattr(trainer_state, "max_completion_length", None)
    if limit is None or limit <= 0:
        raise ValueError(f"length_reward needs a positive trainer_state.max_completion_length, not {limit!r}")
    soft_limit = SOFT_LIMIT * limit
    return [
        LENGTH_PENALTY * min(0.0, max(-1.0, (soft_limit - len(ids)) / (limit - soft_limit)))
        if completion_text(completion).strip()
        else -LENGTH_PENALTY
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]
