r"""Rewrite the spellings of answers, in LaTeX, Unicode and words, as plain ones.

`plain` spells the numbers and formulas of a text in one way. `formula` takes what is a formula out of words.
"""

import re
import unicodedata

# The text of a model is untrusted input: a number of a million digits must not stall a step.
MAX_ANSWER_LENGTH = 10_000  # characters at the end of an answer that are read, and the last number is among them

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
        # A dash is a sign where nothing that it could join or subtract from stands before it.
        (r"(?<![\w)}\]%])(?<![\w)}\]%] )–(?=[0-9.\\$(])", "-"),
        (rf"(?:{_TEXT})?\{{,\}}", ","),
        (
            r"(?<=[0-9])(?:[\u00a0\u2009\u202f~'’_]|\\[;: ]|\{\\,\}|\\thinspace ?)(?=[0-9]{3}(?![0-9]))"
            r"|\\[,!]|\\(?:left|right|[bB]igg?[lrm]?|displaystyle)(?![A-Za-z])|\\(?:text)?color\{[A-Za-z]*\}",
            "",
        ),
        (r"[\u00a0\u2009\u202f\u3000~]|\\[;: ]|\\q?quad(?![A-Za-z])", " "),
        (rf"\\([%{CURRENCY}])", r"\1"),
        # Units in braces behind a value, and the exponents in degrees and in other units, are no part of the value.
        (r"\^\{?\\circ\}?|[°º˚]|\\degree(?![A-Za-z])", ""),
        (rf"(?:(?<=[0-9}})\]π%x])|(?<=\\pi)) ?{_UNIT}(?: ?(?:/|·|\\cdot)? ?{_UNIT})*", " "),
        (rf"(?:{_TEXT}\{{[^{{}}0-9]*\}}|(?<![A-Za-z\\])(?:[ckdm]?m|in|ft|yd|mi|[a-z]{{4,}})) ?\^\{{?[23]\}}?", " "),
        _UNWRAPPED,
        _UNWRAPPED,  # what is left of one in another
        # A space separates the whole part of a mixed number from its fraction.
        (r"(?<=[0-9])\s*(?=\\[dtc]?frac)", " "),
        (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        # The signs and names of operations in plain text.
        (r"√ ?([0-9.]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√|(?<![\\A-Za-z])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"±", r"\\pm "),
        (r"(?<=[0-9]) : (?=[0-9])", ":"),
        (r"(?<=[0-9]) ?[xX] ?(?=[0-9])", "*"),
        (r"(?<=[0-9)}])\*\*(?=[0-9(])", "^"),
        # At the start of an answer, a sign that is separated from its number by spaces is still its sign.
        (r"\A\s*([-+])\s+", r"\1"),
        # A space separates thousands only where that makes all of an answer one number.
        (
            r"\A([^0-9A-Za-z\\]*[0-9]{1,3})((?: [0-9]{3})+)(?=(?:\.[0-9]+)?(?![0-9])[^0-9]*\Z)",
            lambda match: match[1] + match[2].replace(" ", ""),
        ),
    )
]

# Words, and units of two letters, so that 2xy is a product. Letters of other alphabets and arrows part formulas, too.
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:abc|ABC|xyz|and|or)(?![A-Za-z]))(?:[A-Za-z]{3,}"
    r"|(?i:am|an|as|at|be|by|he|if|in|is|it|no|of|on|pm|so|to|we|st|nd|rd|th|[cdkm]m|[km]g|[cm]l|ft|yd|mi|lb|oz|sq|cu"
    r"|hr|wk|yr|yo)(?![A-Za-z])|(?<=[0-9] )(?!ab|ac|bc|mn|pq|xy|xz|yz)[A-Za-z]{2}(?![A-Za-z]))"
    r"|(?<=[0-9] )an?(?= [A-Za-z])|[^\W\d_A-Za-zπ]+|[=-]>|[→⇒∴]|\\(?:[Rr]ightarrow|implies|therefore|to)(?![A-Za-z])"
)
_DELIMITER = re.compile(r"\\[()\[\]]|\{\}")
_MARKS = " $*_`'\"&,;:"
_ENDS = _MARKS + ".!?。\\/=-–—"
_IGNORED = re.compile(
    # the letter of a choice, and what a value is said to belong to or to be called
    r"\A\([A-Za-z]\) (?=-?[0-9.$\\])|(?<=[0-9]) \([A-Za-z]\)\Z"
    r"|\A *[A-Za-z] *(?:\\in(?![A-Za-z])|∈)|\A *\([^()=0-9]*\) *=|(?<=[A-Za-z])_(?:\w|\{\w{1,9}\})(?= *=)"
)


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
    r"""Take the last formula out of the words of an answer.

    Examples:
        >>> formula(r"**The area is $3\pi$ square feet.**")
        ('3\\pi', True)
    """
    lines = [line for line in text.splitlines() if re.search("[0-9]", line)] or [text]
    parts = _WORD.split(" ".join(_DELIMITER.sub("", lines[-1]).split()))
    last = max((i for i, part in enumerate(parts) if re.search("[0-9]", part)), default=0)
    found = _IGNORED.sub("", parts[last].strip(_MARKS).rstrip(_ENDS).removeprefix(">"))
    return found.strip(_MARKS).rstrip(_ENDS), last > 0 or len(lines) > 1
