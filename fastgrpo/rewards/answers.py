r"""Read the final answer of a text and compare two answers by value.

The answer of a text is the content of its last marker. A marker is ``#### 42``, ``<answer>42</answer>`` or
``\boxed{42}``. Without a marker the whole text is the answer. The value of an answer is the last number in it, as an
exact fraction. If that number is only part of an expression or a list (``2\sqrt{2}``, ``5 - 3``, ``(1, 2)``),
the answer has no value, and `fastgrpo.rewards.symbolic` compares it.
"""

import functools
import re
import unicodedata
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from fastgrpo.rewards.symbolic import MAX_LENGTH, same_values

# The text of a model is untrusted: a million characters must not stall a step.
MAX_TEXT_LENGTH = 200_000  # the last marker is searched for in so many characters at the end of a text
MAX_NUMBER_LENGTH = 64  # characters

MAX_ANSWER_LENGTH = 10_000  # so many characters are read at the end of an answer, where its last number is

CURRENCY = "$€£¥₹"

# The full-width forms of ASCII, the bold, double-struck and other digits of mathematics, and fractions such as ½.
_CHARACTERS = (
    {0xFF01 + i: 0x21 + i for i in range(94)}
    | {0x1D7CE + i: 0x30 + i % 10 for i in range(50)}
    | {
        ord(char): r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", char).split("⁄"))
        for char in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")

_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt|ord)|emph|operatorname|boldsymbol|bm|[mhf]box|underline)"
    r"(?![A-Za-z])"
)
_UNIT = rf"{_TEXT}\{{(?=[^{{}}0-9A-Za-z]*[A-Za-z])(?! *(?:and|or|[ei]) *\}})[^{{}}0-9]*\}}(?: ?\^\{{?-?[0-9]\}}?)?"
_UNWRAPPED = (re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}"), r" \1 ")

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>]*>>", ""),  # a calculation in GSM8K's solutions
        (r"</?[A-Za-z]\w*>|<\|[^<>|]*\|>", " "),  # tags and special tokens
        (r"(?<![A-Za-z])Rs\.? ?(?=[0-9])", "₹"),
        ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
        ("[−﹣‐‑]", "-"),
        # A dash is a sign if no operand and no word precedes it.
        (r"(?<![\w)}\]%])(?<![\w)}\]%] )–(?=[0-9.\\$(])", "-"),
        (rf"(?:{_TEXT})?\{{,\}}", ","),
        (
            r"(?<=[0-9])(?:[\u00a0\u2009\u202f~'’_]|(?<!\\)\\[;: ]|\{\\,\}|\\thinspace ?)(?=[0-9]{3}(?![0-9]))"
            r"|\\! *|\\,|\\(?:left|right|[bB]igg?[lrm]?|displaystyle)(?![A-Za-z])|\\(?:text)?color\{[A-Za-z]*\}",
            "",
        ),
        (r"[\u00a0\u2009\u202f\u3000~]|(?<!\\)\\[;: ]|\\q?quad(?![A-Za-z])", " "),
        (rf"\\([%{CURRENCY}])", r"\1"),
        # Names of functions and bold vectors are no units.
        (r"\\operatorname\*? *\{ *([A-Za-z]+) *\}(?= *[(\\A-Za-z0-9|])", r"\\\1 "),
        (r"\\(?:mathbf|boldsymbol|bm) *\{ *(?:\\(?:hat|vec) *)?([A-Za-z]) *\}", r" \1 "),
        # Units in braces after a value, and exponents of units, are not part of the value. 60°,120° stay two values.
        (r"(?:\^\{?\\circ\}?|[°º˚]|\\degree(?![A-Za-z]))(,?)", lambda match: match[1] and " ,"),
        (rf"(?:(?<=[0-9}})\]π%x])|(?<=\\pi)) ?{_UNIT}(?: ?(?:/|·|\\cdot)? ?{_UNIT})*", " "),
        # m^2 is a unit only after a number or another unit.
        (r"([0-9/] *|(?<=k)g *·? *|(?<=[0-9] )N *·? *)m ?\^(?:[23]|\{[23]\})", r"\1 "),
        (
            rf"(?:{_TEXT}\{{(?! *[ei] *\}})[^{{}}0-9]*\}}|(?<![A-Za-z\\])(?:[ckdm]m|in|ft|yd|mi|[a-z]{{4,}}))"
            r" ?\^(?:[23]|\{[23]\})",
            " ",
        ),
        _UNWRAPPED,
        _UNWRAPPED,  # again, for nested ones
        # A space separates the whole part of a mixed number from its fraction.
        (r"(?<=[0-9])\s*(?=\\[dtc]?frac)", " "),
        (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        # The signs and names of operations in plain text.
        (r"√ ?([0-9.]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√|(?<![\\A-Za-z])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"±", r"\\pm "),
        (r"(?<=[0-9]) : (?=[0-9])", ":"),
        (r"(?<=[0-9]) ?([AaPp])\. ?[Mm]\.?(?![A-Za-z])", r" \1m"),
        (r"(?<=[0-9]) ?[xX] ?(?=[0-9])", "*"),
        (r"(?<=[0-9)}])\*\*(?=[0-9(])", "^"),
        # At the start of an answer, a sign that is separated from its number by spaces is still its sign.
        (r"\A\s*([-+])\s+", r"\1"),
        # A space separates thousands only if the whole answer is then one number.
        (
            r"\A([^0-9A-Za-z\\]*[0-9]{1,3})((?: [0-9]{3})+)(?=(?:\.[0-9]+)?(?![0-9])[^0-9]*\Z)",
            lambda match: match[1] + match[2].replace(" ", ""),
        ),
    )
]

# Words and units of two letters, but not the product 2xy. Letters of other alphabets and arrows also separate formulas.
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?<!begin\{)(?<!end\{)(?!(?:abc|ABC|xyz|and|or)(?![A-Za-z]))(?:[A-Za-z]{3,}"
    r"|(?i:am|an|as|at|be|by|he|if|in|is|it|no|of|on|pm|so|to|we|st|nd|rd|th|[cdkm]m|[km]g|[cm]l|ft|yd|mi|lb|oz|sq|cu"
    r"|hr|wk|yr|yo)(?![A-Za-z])|(?<=[0-9] )(?!ab|ac|bc|mn|pq|xy|xz|yz)[A-Za-z]{2}(?![A-Za-z]))"
    r"|(?<=[0-9] )an?(?= [A-Za-z])|[^\W\d_A-Za-zπ]+|[=-]>|[→⇒∴]|\\(?:[Rr]ightarrow|implies|therefore|to)(?![A-Za-z])"
)
_DELIMITER = re.compile(r"\\[()\[\]]|\{\}")
_MARKS = " $*_`'\"&,;:"
_ENDS = _MARKS + ".!?。\\/=-–—"
_IGNORED = re.compile(
    # The letter of a choice, and the name before a value: (A) 5, x \in, (area) =.
    r"\A\([A-Za-z]\) (?=-?[0-9.$\\])|(?<=[0-9]) \([A-Za-z]\)\Z"
    r"|\A *[A-Za-z] *(?:\\in(?![A-Za-z])|∈)|\A *\([^()=0-9]*\) *=|(?<=[A-Za-z])_(?:\w|\{\w{1,9}\})(?= *=)"
)

_MARKER = re.compile(r"(?<!#)####(?!#)|\\boxed\s*\{|<answer>", re.IGNORECASE)

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|(?<![\w.)])\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}}(?![0-9A-Za-z]))?"
_NUMBER = re.compile(
    # After an operand or a word, a sign is an operator or a hyphen: 10-3, 5 -3, COVID-19.
    rf"(?:(?<![\w)}}\]%+-])(?<![0-9)}}%] )(?P<sign>[-+]))?"
    rf"(?:[{CURRENCY}] ?(?P<inner_sign>[-+])?)?"
    rf"(?:(?P<whole>{_INTEGER})(?: and)? +(?=[0-9,]+/[0-9]))?"
    rf"(?P<numerator>{_DECIMAL})(?: ?/ ?(?P<denominator>{_DECIMAL}))?"
)

# Text before or after a number that makes it an operand of an expression. Not a hyphen: 5-10 may be a range.
_FUNCTION = r"\\(?!approx|equiv|[lc]?dots|f?box)[A-Za-z]+"
_OPERATOR = r"[+*/×÷·]"
_OPERAND_BEFORE = re.compile(
    rf"(?:[{{^_√]|{_FUNCTION}|[0-9)]\*\*|[0-9][eE][-+]?|[0-9)}}\]%] *{_OPERATOR} *"
    # After a word, "is *42*" is emphasis and "is +3" has a sign. Only "x+3" and "x + 3" are sums.
    rf"|[A-Za-z](?:{_OPERATOR} *| {_OPERATOR} +))[ ({CURRENCY}]*$"
)
_OPERAND_AFTER = re.compile(rf" *(?:[\^√π]|{_FUNCTION})")

# Rewritten only to read a number, not in formulas: \frac{1}{2}\pi is half of pi, and 1/2\pi is not.
_FRACTION = re.compile(rf"\\[dtc]?frac\{{\s*(-?{_DECIMAL})\s*\}}\{{\s*({_DECIMAL})\s*\}}")
# A percentage is compared without its sign. The comma in (1000,200) separates items, the one in 5,000 does not.
_DROPPED = re.compile(rf"%|(?<![A-Za-z])[{CURRENCY}]|[{CURRENCY}](?! ?[0-9])")
_NO_ITEMS = re.compile(r"(?<![0-9,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,)\]}\\])")
_THOUSANDS = re.compile(r"(?<![0-9]{4})(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
# One letter is a unit only if it cannot be a variable: 5 m, but not 5x.
_LETTER_UNIT = re.compile(r"(?<=[0-9]) ?(?:[cdghlmpswABCFGJKLMNVW](?:\^?\{?-?[0-9]\}?)?[ /]?)+\Z")
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])|≈")
# The tokens of formulas. A number at the end of a relation or of several such tokens is only part of the answer.
_TOKEN = re.compile(
    r"\s*((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z]))?"
    r"|\\(?:[dtc]?frac|sqrt|pi|times|cdot|div|pm|mp|infty|cup|lor|[lr]?brac[ek]|[lr]angle|[{}])(?![A-Za-z])"
    r"|[-+*/^()\[\]{}=,;π∞×·÷∪A-Za-z]|(?<=[0-9]):(?=[0-9]))"
)
_RELATION = re.compile(r"[<>≤≥≠∞]|!=|\\(?:[lg](?:eq?|t)|n?eq?|infty|cup|cap)(?![A-Za-z])")
_SIGN = re.compile(r"[_^|!]|\\[A-Za-z]")


class _Answer(NamedTuple):
    """A parsed answer."""

    text: str  # all of it, without spaces
    number: Fraction | None  # its value if it is a number
    exact: Fraction | None  # the value before a sign \approx, if `number` is near it; otherwise `number`
    formula: str  # compared if either answer is not a number
    has_digit: bool


def completion_text(completion: str | list[dict]) -> str:
    """Return the text that the model wrote: a string unchanged, or the assistant's messages joined by newlines.

    The content of a message is a string, a list of parts with a text each, or None. Raises TypeError if the completion
    is neither a string nor a list of messages.

    Examples:
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
    r"""Return the content of the last marker of a text, or the text if it has no marker.

    An open tag or brace extends to the end of the text, and ``####`` to the end of its line. Only the last
    ``MAX_TEXT_LENGTH`` characters are read.

    Examples:
        >>> extract_answer(r"#### 41, no, \boxed{\frac{1}{2}} indeed")
        '\\frac{1}{2}'
    """
    text = text[-MAX_TEXT_LENGTH:]
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
    r"""Return the value of the final answer of a text, or None if it cannot be read.

    Thousands separators, signs, decimals, currency, scientific notation, fractions and mixed numbers are read, plain
    or in LaTeX. A percent sign and a unit are dropped. The value is exact. It is None if the number is part of an
    expression or a list, is divided by zero or is too long. It is also None if the last marker holds no number, even
    after an earlier number: otherwise a text that withdraws its answer would be rewarded.

    Examples:
        >>> read_number("She pays $3.50 a day. #### -$1,234.50")
        Fraction(-2469, 2)
        >>> read_number("The answer is 42, <answer>I do not know</answer>") is None
        True
    """
    return _read(text).number


def final_answer(text: str) -> Fraction | str | None:
    r"""Return the vote of a text in a majority vote: the value of its final answer.

    Without a value, return the content of the last marker without spaces; without an answer, None.

    Examples:
        >>> [final_answer(text) for text in ("so 7/14", r"\boxed{x + 1}", "I do not know")]
        [Fraction(1, 2), 'x+1', None]
    """
    number = read_number(text)
    if number is not None or _last_match(_MARKER, text) is None:
        return number
    return "".join(plain(extract_answer(text)).split()) or None


def answers_match(text: str, reference: str) -> bool | None:
    r"""Return whether the final answers of a text and its reference have the same value.

    Numbers are compared exactly (``0.50`` is ``1/2``, ``0.33`` is not ``1/3``). If either answer is an expression,
    math-verify compares them (`fastgrpo.rewards.symbolic`).

    An answer that cannot be read, or exceeds the limits, is wrong. The result is None if the reference has no digit,
    or is an unreadable expression that differs from the answer.

    Examples:
        >>> answers_match("<answer>75%</answer>", "#### 75")
        True
    """
    answer, expected = _read(text), _read(reference)
    if not expected.has_digit:
        return None
    if answer.number is not None and expected.number is not None:
        return not {answer.number, answer.exact}.isdisjoint({expected.number, expected.exact})
    if answer.text == expected.text:  # equal texts are equal answers
        return True
    verdict = same_values(answer.formula, expected.formula)
    return False if verdict is None and expected.number is not None else verdict


def _read(text: str) -> _Answer:
    """Read the final answer of a text, as a number or as a formula."""
    answer = extract_answer(text)
    return (_parsed if len(answer) <= MAX_LENGTH else _parsed.__wrapped__)(answer)


@functools.lru_cache(4096)  # the completions of a group share a reference, and often the answer
def _parsed(answer):
    text = plain(answer)
    found, follows_words = formula(text)
    pieces = [piece for piece in _APPROXIMATELY.split(found) if re.search("[0-9]", piece)] or [found]
    pieces = [_NO_ITEMS.sub(lambda match: _THOUSANDS.sub("", match[0]), piece) for piece in (pieces[0], pieces[-1])]
    first, last = (_DROPPED.sub("", piece).strip() for piece in pieces)
    number = None if follows_words else _lone_number(last)
    if number is None and (follows_words or not _is_formula(first, last)) and "matrix" not in text:
        number = _last_number(text)
    exact = None if number is None or first == last else _lone_number(first)
    if exact is None or abs(exact - number) * 20 > abs(exact) or exact.denominator == 1:
        exact = number
    return _Answer("".join(text.split()), number, exact, first, re.search("[0-9]", text) is not None)


def _is_formula(found: str, last: str) -> bool:
    """Return whether the number at the end of an answer is only part of a formula, not the result of a sentence."""
    return _SIGN.search(last) is not None or _RELATION.search(last) is not None or _is_expression(found)


def _is_expression(text: str) -> bool:
    """Return whether a text consists of numbers, letters, operators and brackets, as an expression or a list does."""
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        return False
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()) or tokens[-1] in "+-*/^=,(" or tokens[0] in "*/^=,)":
        return False
    numbers = [token[0] in "0123456789." for token in tokens]
    return not any(a and b for a, b in pairwise(numbers)) and text.count("(") + text.count("[") == text.count(
        ")"
    ) + text.count("]")


def _lone_number(found: str) -> Fraction | None:
    """Return the value of a formula that is one number, perhaps with a unit or after a name and a sign =."""
    if len(found) > MAX_LENGTH:
        return None
    left, _, right = found.rpartition("=")
    left = re.sub(r"\([^()]*\)|_\w", "", left)
    if re.search(r"[<>!≤≥≠]\s*\Z", left):  # the sign was >= or !=
        return None
    if re.search("[A-Za-z]", left) and re.search(r"[0-9+*/^-]", left):  # an equation
        return None
    number = _NUMBER.fullmatch(_LETTER_UNIT.sub("", _FRACTION.sub(r"\1/\2", right)).strip(" ()[]{}"))
    return _value(number) if number else None


def _last_number(text: str) -> Fraction | None:
    """Return the last number of a text that was rewritten, or None if it is part of an expression."""
    text = _FRACTION.sub(r"\1/\2", text)
    number = _last_match(_NUMBER, text)
    if number is None:
        return None
    before = text[max(0, number.start() - 40) : number.start()]  # an operator and the spaces around it are shorter
    if _OPERAND_BEFORE.search(before) or _OPERAND_AFTER.match(text, number.end()):
        return None
    return _value(number)


def _value(number: re.Match) -> Fraction | None:
    """Compute a number that was found, or return None if it is too long or divided by zero."""
    if len(number[0]) > MAX_NUMBER_LENGTH:
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


def plain(text: str) -> str:
    r"""Rewrite the spellings of numbers in LaTeX and Unicode as plain ones.

    Examples:
        >>> plain(r"1{,}234\,\text{cm}^2 + 2½")
        '1,234  + 2 \\frac{1}{2}'
    """
    text = text[-MAX_ANSWER_LENGTH:].translate(_CHARACTERS)[-MAX_ANSWER_LENGTH:]
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def formula(text: str) -> tuple[str, bool]:
    r"""Extract the last formula from an answer in words.

    Examples:
        >>> formula(r"**The area is $3\pi$ square feet.**")
        ('3\\pi', True)
    """
    lines = [line for line in text.splitlines() if re.search("[0-9]", line)] or [text]
    if "matrix}" in text:  # its rows may be on several lines
        lines = [text]
    parts = _WORD.split(" ".join(_DELIMITER.sub("", lines[-1]).split()))
    last = max((i for i, part in enumerate(parts) if re.search("[0-9]", part)), default=0)
    found = _IGNORED.sub("", parts[last].strip(_MARKS).rstrip(_ENDS).removeprefix(">"))
    return found.strip(_MARKS).rstrip(_ENDS), last > 0 or len(lines) > 1
