"""The reader of expressions: what it reads, with which precedence, and that its bounds come before any cost."""

from decimal import Decimal

import pytest

from fastgrpo.rewards import expressions
from fastgrpo.rewards.expressions import MAX_DEPTH, MAX_LENGTH, POINTS, Unreadable, evaluate, tokenize

VALUES = [
    ("5 + 3", "8"),
    ("2--3", "5"),
    ("2 * -3", "-6"),
    ("- 2^2", "-4"),
    ("10 - 3 - 2", "5"),
    ("12/3/2", "2"),
    ("(1 + 1)(2 + 1)", "6"),
    ("5(3) + 1", "16"),
    ("[1 + {1}]", "2"),
    (r"\(1 + 1\)", "2"),
    ("5 + 3.", "8"),
    (".5 + 1.25", "1.75"),
    (r"3 \times 10^5", "300000"),
    (r"6 \div 2 · 3 × 2", "18"),
    ("10^25 / 10^{24}", "10"),
    ("2^-1", "0.5"),
    ("2.5e3 + 1E-1", "2500.1"),
    ("2^{1 + 2}4", "32"),
    ("4^{0.5}", "2"),
    # a product without a sign binds closer than a slash
    ("6/2(1 + 2)", "1"),
    (r"1/2\pi * 2\pi", "1"),
    (r"\frac{1}{2}\pi / \pi", "0.5"),
    (r"\frac12 + \dfrac34", "1.25"),
    (r"\frac\pi2 / \pi", "0.5"),
    # mixed numbers
    ("2 1/2 + 1", "3.5"),
    (r"1\frac{1}{4} - 1", "0.25"),
    (r"2\frac{\pi}{4\pi}", "0.5"),
    # roots
    (r"\sqrt{16} + \sqrt9", "7"),
    (r"\sqrt[3]{8}", "2"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt{2}\sqrt{8}", "4"),
]

UNREADABLE = [
    "",
    "5 +",
    "+ * 3",
    "()",
    "(1 + 1",
    "(1 + 1]",
    "1 + 1)",
    "5 3",
    "1.5.2",
    r"\sqrt12",
    "2**3",
    "3!",
    "x_1",
    "|x|",
    r"\binom{4}{2}",
    r"\sum_{k=1}^{9} k",
    r"\frac{1}",
    r"\frac\sqrt2 3",
    r"\sqrt[2.5]{2}",
    r"\sqrt[1]{2}",
    r"\sqrt[4]{-2}",
    "٣ + ٥",
    # no value
    "1/0",
    "x/(x - x)",
    "0^{-1}",
    "(-8)^{0.5}",
]

# Each would take minutes, gigabytes or the whole stack without its bound.
UNBOUNDED = [
    "9^9^9^9",
    "9^{9^{9^9}}",
    "9^999999999",
    "9^{-999999999}",
    "2^{10001}",
    "((9^{9999})^{9999})^{9999}",
    r"\sqrt[999999999]{2}",
    "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1),
    r"\frac{1}{1 + " * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1),
]


def near(values, expected):
    return all(abs(value - Decimal(expected)) < Decimal("1e-100") for value in values.decimals)


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_an_expression_is_computed(text, value):
    values = evaluate(tokenize(text))
    assert len(values.decimals) == POINTS and near(values, value)


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_expression_or_has_no_value_is_not_read(text):
    with pytest.raises(Unreadable):
        evaluate(tokenize(text))


@pytest.mark.parametrize("text", UNBOUNDED, ids=lambda text: text[:20])
def test_an_expression_beyond_the_bounds_is_not_computed(text):
    with pytest.raises(Unreadable):
        evaluate(tokenize(text))


def test_a_bracket_and_an_exponent_at_their_bounds_are_read():
    assert near(evaluate(tokenize("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH)), 7)
    assert near(evaluate(tokenize("1^{10000}")), 1)


def test_a_text_that_is_too_long_is_not_even_split(monkeypatch):
    assert len(tokenize("1" * MAX_LENGTH)) == 1
    monkeypatch.setattr(expressions, "_SPELLINGS", None)
    with pytest.raises(Unreadable, match=f"at most {MAX_LENGTH} characters, not {MAX_LENGTH + 1}"):
        tokenize("1" * (MAX_LENGTH + 1))


def test_a_variable_has_a_value_of_its_own_at_each_point():
    x, y = (evaluate(tokenize(letter)).decimals for letter in "xy")
    assert len({*x, *y}) == 2 * POINTS
    assert x == evaluate(tokenize("X")).decimals and min(x[: POINTS // 2]) > 0
    assert min(min(evaluate(tokenize(letter)).decimals) for letter in "abcd") < 0


def test_a_value_that_is_not_defined_at_a_point_is_none():
    values = evaluate(tokenize("x^{0.5}")).decimals
    assert None in values and values[0] is not None


def test_letters_that_stand_in_both_cases_are_two_variables():
    assert evaluate(tokenize("x + X")).decimals != evaluate(tokenize("2x")).decimals
    assert evaluate(tokenize("X + X")).decimals == evaluate(tokenize("2x")).decimals


@pytest.mark.parametrize(
    ("text", "other", "equal"),
    [
        ("2^{9999} - 1", "2^{9999}", False),
        ("4^{5000}", "2^{10000}", True),
        (r"\frac{1}{3} + 0.5", r"\frac{5}{6}", True),
        ("(x + 1)^2", "x^2 + 2x + 1", True),
        ("x^{-1}", r"\frac{1}{x}", True),
        (r"2\pi e - \pi e", r"\pi e", True),
        ("1 1/2", "1.5", True),
        ("x + X", "2x", False),
    ],
)
def test_the_residue_of_an_exact_value(text, other, equal):
    residues = [evaluate(tokenize(side)).residue for side in (text, other)]
    assert None not in residues and (residues[0] == residues[1]) is equal


@pytest.mark.parametrize("text", [r"\sqrt{4}", "4^{0.5}", "2^{n}", r"1 + \sqrt[3]{x}"])
def test_roots_have_no_residue(text):
    assert evaluate(tokenize(text)).residue is None


def test_pi_and_e_have_all_digits():
    pytest.importorskip("mpmath")
    import mpmath

    with mpmath.workdps(expressions.DIGITS + 5):
        for text, value in ((r"\pi", mpmath.pi), ("e", mpmath.e)):
            assert near(evaluate(tokenize(text)), mpmath.nstr(+value, expressions.DIGITS))
