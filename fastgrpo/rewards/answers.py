r"""Read the final answer of a text and compare two answers by value.

The answer of a text is what its last marker holds. A marker is ``#### 42``, ``<answer>42</answer>`` or
``\boxed{42}``. Without a marker the whole text is the answer. The value of an answer is the last number in it, as an
exact fraction. Where that number is only a part of an expression (``2\sqrt{2}``, ``5 + 3``), the answer has no such
value, and `fastgrpo.rewards.equality` decides.
"""

import re
import unicodedata
from fractions import Fraction

from fastgrpo.rewards.equality import same_values

# The text of a model is untrusted input: a number of a million digits must not stall a step.
MAX_NUMBER_LENGTH = 64  # characters
MAX_ANSWER_LENGTH = 10_000  # characters at the end of an answer that are read, and the last number is among them

_MARKER = re.compile(r"(?<!#)####(?!#)|\\boxed\s*\{|<answer>", re.IGNORECASE)

_CURRENCY = "$€£¥₹"
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|(?<![\w.)])\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}}(?![0-9A-Za-z]))?"
_NUMBER = re.compile(
    # After an operand or a word, a sign is an operator or a hyphen: 10-3, 5 -3, COVID-19.
    rf"(?:(?<![\w)}}\]%+-])(?<![0-9)}}%] )(?P<sign>[-+]))?"
    rf"(?:[{_CURRENCY}] ?(?P<inner_sign>[-+])?)?"
    rf"(?:(?P<whole>{_INTEGER})(?: and)? +(?=[0-9,]+/[0-9]))?"
    rf"(?P<numerator>{_DECIMAL})(?: ?/ ?(?P<denominator>{_DECIMAL}))?"
)

# What makes a number next to it an operand of a larger expression. A hyphen does not, because 5-10 may be a range.
_FUNCTION = r"\\(?:sqrt|pi|times|cdot|div|[dtc]?frac|pm|log|ln|exp|sin|cos|tan|binom|choose|bmod)(?![A-Za-z])"
_OPERATOR = r"[+*/×÷·]"
_OPERAND_BEFORE = re.compile(
    rf"(?:[{{^_√]|{_FUNCTION}|[0-9)]\*\*|[0-9][eE][-+]?|[0-9)}}\]%] *{_OPERATOR} *"
    # After a word, "is *42*" is emphasis and "is +3" has a sign. Only "x+3" and "x + 3" are sums.
    rf"|[A-Za-z](?:{_OPERATOR} *| {_OPERATOR} +))[ ({_CURRENCY}]*$"
)
_OPERAND_AFTER = re.compile(rf" *(?:[\^√π]|{_FUNCTION})")


def _vulgar_fraction(match: re.Match) -> str:
    """Spell a character such as ½ in LaTeX."""
    numerator, denominator = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[−﹣－]", "-"),
        (r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))|\\[,!]|\\(?:left|right)(?![A-Za-z])", ""),
        (r"[\u00a0\u2009\u202f~]|\\[;: ]|\\q?quad(?![A-Za-z])", " "),
        (r"\{,\}", ","),
        (rf"\\([%{_CURRENCY}])", r"\1"),
        # The exponents in degrees and in square or cubic units are no part of the value.
        (r"\^\{?\\circ\}?|°", ""),
        (r"(?:\\(?:text|mathrm)\{[^{}0-9]*\}|(?<![A-Za-z])(?:[ckm]?m|in|ft|yd|mi)) ?\^\{?[23]\}?", " "),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|underline)\{([^{}]*)\}", r" \1 "),
        # A space separates the whole part of a mixed number from its fraction.
        (r"(?<=[0-9])\s*(?=\\[dtc]?frac|[¼-¾⅐-⅞])", " "),
        ("[¼-¾⅐-⅞]", _vulgar_fraction),
        (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        # At the start of an answer, a sign that is separated from its number by spaces is still its sign.
        (r"\A\s*([-+])\s+", r"\1"),
    )
]
# Only where the fraction is the whole answer: \frac{1}{2}\pi is half of pi, and 1/2\pi is not.
_FRACTION = re.compile(rf"\\[dtc]?frac\{{\s*(-?{_DECIMAL})\s*\}}\{{\s*({_DECIMAL})\s*\}}")
# A percentage is compared without its sign, and a comma in 5,000 separates no items.
_DROPPED = re.compile(rf"[%{_CURRENCY}]|(?<=[0-9]),(?=[0-9]{{3}}(?![0-9]))")


def completion_text(completion: str | list[dict]) -> str:
    """Return the text that the model wrote in a plain or a conversational completion.

    Args:
        completion: A string, or messages such as ``[{"role": "assistant", "content": "..."}]``. The content of a
            message is a string, a list of parts with a text each, or None.

    Returns:
        The string, or the texts of the assistant's messages joined by newlines.

    Raises:
        TypeError: The completion is neither a string nor a list.

    Example:
        >>> completion_text([{"role": "assistant", "content": "42"}])
        '42'
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise TypeError(f"a completion is a string or a list of messages, not {type(completion).__name__}")
    contents = [message.get("content") or "" for message in completion if message["role"] == "assistant"]
    return "\n".join(
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in contents
    )


def extract_answer(text: str) -> str:
    r"""Return what the last marker of a text holds, or the text itself where it has no marker.

    A tag or a brace that is left open reaches to the end of the text, and ``####`` to the end of its line.

    Args:
        text: Any text.

    Returns:
        The answer as it stands in the text.

    Example:
        >>> extract_answer(r"#### 41, no, \boxed{\frac{1}{2}} indeed")
        '\\frac{1}{2}'
    """
    marker = _last_match(_MARKER, text)
    if marker is None:
        return text
    rest = text[marker.end() :]
    if marker[0] == "####":
        return rest.lstrip().partition("\n")[0]
    if marker[0].startswith("<"):
        return re.split("</answer>", rest, maxsplit=1, flags=re.IGNORECASE)[0]
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[: brace.start()]
    return rest


def read_number(text: str) -> Fraction | None:
    r"""Return the value of the final answer of a text, or None where it has none that can be read.

    Thousands separators, signs, decimals, currency, scientific notation, fractions and mixed numbers are read, plain
    or in LaTeX. A percent sign and a unit are dropped.

    Args:
        text: Any text.

    Returns:
        The exact value. None where the number is part of an expression, is divided by zero or is too long, and where
        the last marker holds no number, even if a number stands before it: reading that one would reward a text that
        withdraws its answer.

    Examples:
        >>> read_number("She pays $3.50 a day. #### -$1,234.50")
        Fraction(-2469, 2)
        >>> read_number("The answer is 42, <answer>I do not know</answer>") is None
        True
    """
    return _last_number(_normalize(extract_answer(text)))


def final_answer(text: str) -> Fraction | str | None:
    r"""Return what a text votes for in a majority vote.

    Args:
        text: Any text.

    Returns:
        The value of the final answer. Where it has none, what the last marker holds, as a string without spaces. None
        where there is no answer.

    Example:
        >>> [final_answer(text) for text in ("so 7/14", r"\boxed{x + 1}", "I do not know")]
        [Fraction(1, 2), 'x+1', None]
    """
    number = read_number(text)
    if number is not None or _last_match(_MARKER, text) is None:
        return number
    return "".join(_normalize(extract_answer(text)).split()) or None


def answers_match(text: str, reference: str) -> bool | None:
    r"""Tell whether the final answers of a text and of its reference have the same value.

    Numbers are compared exactly (``0.50`` is ``1/2``, ``0.33`` is not ``1/3``). Where either answer is an expression,
    `fastgrpo.rewards.equality` compares them.

    Args:
        text: The text to judge. An answer that is beyond the bounds of `fastgrpo.rewards.expressions` is wrong.
        reference: The text with the right answer.

    Returns:
        Whether they match. None where the reference gives nothing to compare with: it has no digit, or it is an
        expression that cannot be read.

    Example:
        >>> answers_match("<answer>75%</answer>", "#### 75")
        True
    """
    answer, expected = _normalize(extract_answer(text)), _normalize(extract_answer(reference))
    if not re.search("[0-9]", expected):
        return None
    value, expected_value = _last_number(answer), _last_number(expected)
    if value is not None and expected_value is not None:
        return value == expected_value
    verdict = same_values(*(_DROPPED.sub("", side).strip() for side in (answer, expected)))
    return False if verdict is None and expected_value is not None else verdict


def _normalize(text: str) -> str:
    """Rewrite the spellings of numbers in LaTeX and Unicode as plain ones. Only the end of a long text is read."""
    text = text[-MAX_ANSWER_LENGTH:]
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _last_number(text: str) -> Fraction | None:
    """Return the last number of a text that was normalized, or None where it is part of an expression."""
    text = _FRACTION.sub(r"\1/\2", text)
    number = _last_match(_NUMBER, text)
    if number is None or len(number[0]) > MAX_NUMBER_LENGTH:
        return None
    before = text[max(0, number.start() - 40) : number.start()]  # an operator and the spaces around it are shorter
    if _OPERAND_BEFORE.search(before) or _OPERAND_AFTER.match(text, number.end()):
        return None
    whole, numerator, denominator = (
        Fraction((digits or default).replace(",", ""))
        for digits, default in zip(number.group("whole", "numerator", "denominator"), "001", strict=True)
    )
    if denominator == 0:
        return None
    sign = -1 if (number["sign"] == "-") != (number["inner_sign"] == "-") else 1
    return sign * (whole + numerator / denominator)


def _last_match(pattern: re.Pattern, text: str) -> re.Match | None:
    return max(pattern.finditer(text), key=re.Match.start, default=None)
