"""Spellings of answers: one plain spelling for each, and the formula among words."""

import pytest

from fastgrpo.rewards.spelling import formula, plain

PLAIN = [
    ("１，２３４．５％", "1,234.5%"),
    ("x² + 10⁻⁴", "x^{2} + 10^{-4}"),
    ("−3 ‑ 4", "-3 - 4"),
    ("–3", "-3"),
    ("x = –3", "x = -3"),
    ("5–10", "5–10"),
    ("$5 – $10", "$5 – $10"),
    (r"1{,}234 + 1\text{,}234", "1,234 + 1,234"),
    (r"1\,234\;567", "1234567"),
    (r"\left(1, \big[2\bigr]\right)", "(1, [2])"),
    ("1 234 567.5", "1234567.5"),
    ("1 234 5", "1 234 5"),
    ("2 and 1 234", "2 and 1 234"),
    (r"\$5 \%", "$5 %"),
    (r"90^{\circ} 9° 9\degree", "90 9 9"),
    (r"\mathbf{\text{4}}\textcolor{red}{2}", "  4  {2}"),
    (r"3\pi\text{ cm}", r"3\pi "),
    (r"3\text{ kg}\cdot\mathrm{m}^2/\text{s}^{-2}", "3 "),
    (r"3\mbox{ inches}^2 + 3 units^2", "3  + 3  "),
    (r"3\text{ and }4\mathrm{e}", "3  and  4 e "),
    (r"r^2 + \theta^2", r"r^2 + \theta^2"),
    ("2½", r"2 \frac{1}{2}"),
    (r"\dfrac12", r"\frac{1}{2}"),
    ("2√12 + √(2) + 2 sqrt(2) + 3pi", r"2\sqrt{12} + \sqrt(2) + 2 \sqrt(2) + 3\pi "),
    ("6 x 7 X 8, 2x", "6*7*8, 2x"),
    ("10**3 is **42**", "10^3 is **42**"),
    ("±2", r"\pm 2"),
    ("- 3", "-3"),
    ("<b>4</b><|im_end|> <<2*2=4>>4, a<b", " 4   4, a<b"),
]

FORMULAS = [
    ("42", ("42", False)),
    ("**$42$.**", ("42", False)),
    ("The answer is 42 apples.", ("42", True)),
    (r"3\pi square feet", (r"3\pi", False)),
    ("so 3\n4 = 2^2\nwell", ("4 = 2^2", True)),
    ("2xy + 3abc", ("2xy + 3abc", False)),
    ("5 kg 3", ("3", True)),
    ("5 a day", ("5", False)),
    ("5 wx", ("5", False)),
    ("2x = 4 => x = 2", ("x = 2", True)),
    (r"2x = 4 \implies x = 2", ("x = 2", True)),
    ("答案是(1, 2)。", ("(1, 2)", True)),
    (r"\(x \in [1, 2]\)", ("[1, 2]", False)),
    (r"(r, \theta) = (1, 2)", ("(1, 2)", False)),
    ("x_1 = 2, x_{2} = 3", ("x = 2, x = 3", False)),
    ("(B) 42", ("42", False)),
    ("42 (b)", ("42", False)),
    ("(x) + 3", ("(x) + 3", False)),
    ("42 =", ("42", False)),
    ("no digit", ("", False)),
]


@pytest.mark.parametrize(("text", "spelled"), PLAIN)
def test_a_spelling_becomes_plain(text, spelled):
    assert plain(text) == spelled


@pytest.mark.parametrize(("text", "found"), FORMULAS)
def test_the_formula_is_found_among_words(text, found):
    assert formula(plain(text)) == found
