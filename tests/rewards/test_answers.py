"""The reader of final answers: what it reads, what it refuses, and that no text makes it slow or raise."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from paths import ROOT

from fastgrpo.rewards.answers import (
    MAX_ANSWER_LENGTH,
    MAX_TEXT_LENGTH,
    answers_match,
    completion_text,
    extract_answer,
    formula,
    plain,
    read_number,
)

READ = [
    # markers
    ("#### 42", 42),
    ("####42", 42),
    ("#### \n42", 42),
    ("#### 42\nThat was easy, 7 steps.", 42),
    ("<answer>42</answer>", 42),
    ("<answer> 42 </answer> and 7 more", 42),
    ("<Answer>42</ANSWER> 7", 42),
    ("<answer>42", 42),
    ("<answer>\nx = 42\n</answer>", 42),
    (r"\boxed{42}", 42),
    (r"\boxed {42} 7", 42),
    (r"$\boxed{42", 42),
    (r"So $x = \boxed{42}$, in 7 steps.", 42),
    (r"\boxed{\text{42 dollars}}", 42),
    # the last marker counts, whichever its kind
    ("#### 41\n#### 42", 42),
    (r"<answer>41</answer> #### 40 \boxed{42}", 42),
    (r"\boxed{41} <answer>42</answer>", 42),
    (r"\boxed{41} #### 42", 42),
    (r"<think>\boxed{41}</think><answer>\boxed{42}</answer>", 42),
    ("<answer>#### 42</answer>", 42),
    ("#### 42 </answer>", 42),
    # no marker: the last number
    ("The answer is 42.", 42),
    ("He had 12 and ate 5, so 7 remain!", 7),
    ("It is 42, I think", 42),
    ("**42**", 42),
    ("The answer is **42**.", 42),
    ("The answer is *42*.", 42),
    ("##### 5", 5),
    ("10-3=7", 7),
    ("5–10", 10),
    ("COVID-19", 19),
    ("so 6*7 = 42", 42),
    # thousands separators
    ("#### 1,234", 1234),
    ("1,234,567.5", Fraction("1234567.5")),
    ("1{,}234", 1234),
    (r"\boxed{1\,234}", 1234),
    (r"\boxed{12,\!345}", 12345),
    ("1\u202f234", 1234),
    ("1\u00a0234\u00a0567", 1234567),
    ("1 234 567", 1234567),
    ("1'234", 1234),
    (r"\boxed{1\;234}", 1234),
    (r"\boxed{1\text{,}234}", 1234),
    # other digits
    ("４２", 42),
    ("𝟒𝟐", 42),
    # signs
    ("-3", -3),
    ("−3", -3),
    ("+3", 3),
    ("The answer is -3.", -3),
    ("x=-3", -3),
    ("(-3)", -3),
    (r"\boxed{- 3}", -3),
    # decimals and exponents
    (".5", Fraction(1, 2)),
    ("-.5", Fraction(-1, 2)),
    ("3.14", Fraction(157, 50)),
    ("wait...5", 5),
    ("007", 7),
    ("3e5", 300000),
    ("2.5E-1", Fraction(1, 4)),
    # percent, currency, units
    ("75%", 75),
    (r"\boxed{75\%}", 75),
    ("$5", 5),
    ("€5", 5),
    ("£5.50", Fraction(11, 2)),
    ("<answer>$1,234.50</answer>", Fraction("1234.5")),
    ("$-5", -5),
    ("-$5", -5),
    ("−€5", -5),
    (r"\boxed{\$5}", 5),
    ("5 dollars", 5),
    ("5kg", 5),
    ("50 cm^2", 50),
    (r"\boxed{50 \text{ m}^2}", 50),
    (r"\boxed{90^\circ}", 90),
    ("$42$", 42),
    ("5 m", 5),
    ("5 m/s^2", 5),
    ("5 a day", 5),
    ("5 sq. ft.", 5),
    ("Rs. 5", 5),
    (r"\boxed{50\mbox{ inches}^2}", 50),
    (r"\boxed{50\,\mathrm{km}/\mathrm{h}}", 50),
    ("(B) 5", 5),
    ("__5__", 5),
    ("<answer><b>5</b></answer>", 5),
    ("#### 5<|im_end|>", 5),
    ("<answer>2*3=<<2*3=6>>6</answer>", 6),
    ("2x = 84 → x = 42", 42),
    ("答案是42元", 42),
    # fractions and mixed numbers
    ("1/2", Fraction(1, 2)),
    ("-1/2", Fraction(-1, 2)),
    ("3 / 4", Fraction(3, 4)),
    ("1.5/3", Fraction(1, 2)),
    ("1 1/2", Fraction(3, 2)),
    ("-1 1/2", Fraction(-3, 2)),
    ("2 and 1/2 hours", Fraction(5, 2)),
    ("½", Fraction(1, 2)),
    ("-½", Fraction(-1, 2)),
    ("1½", Fraction(3, 2)),
    (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{\dfrac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{\tfrac34}", Fraction(3, 4)),
    (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4)),
    (r"\boxed{\frac{-3}{4}}", Fraction(-3, 4)),
    (r"\boxed{1\frac{1}{2}}", Fraction(3, 2)),
    (r"it is \frac{1,000}{4}", 250),
]

NOT_READ = [
    "",
    "no number at all",
    "The answer is 42. #### none",
    "The answer is 42. <answer></answer>",
    r"\boxed{42} or rather \boxed{}",
    "#### 42\n<answer>I do not know</answer>",
    # parts of an expression are not its value
    r"\boxed{2\sqrt{2}}",
    r"\boxed{3\pi}",
    r"\boxed{\frac{\pi}{2}}",
    r"\boxed{2^{3}}",
    "<answer>2**3</answer>",
    "<answer>5 + 3</answer>",
    "<answer>$5 + $3</answer>",
    "<answer>x+3</answer>",
    r"\boxed{3 \times 5}",
    "<answer>2 * 5</answer>",
    "<answer>10 - 3</answer>",
    "5-10",
    r"\boxed{2x - 1}",
    r"\boxed{2x}",
    r"\boxed{x^2 + y^2 = 25}",
    r"\boxed{x > 2}",
    # and neither are the last items of a list
    "1,2,3",
    r"\boxed{(1, 2)}",
    r"\boxed{12:30}",
    r"\boxed{\begin{pmatrix} 1 \\\\ 2 \end{pmatrix}}",
    "5/6/2020",
    "1/-2",
    # no value, or one too large to be an answer
    "1/0",
    "3e999",
    "3e-999",
    "#### " + "9" * 65,
]


@pytest.mark.parametrize(("text", "value"), READ)
def test_a_number_is_read(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize("text", NOT_READ)
def test_what_is_no_number_is_not_read(text):
    assert read_number(text) is None


def test_braces_in_a_box_are_matched():
    assert extract_answer(r"\boxed{\frac{3}{4} \text{ of \{a\}}} + {1}") == r"\frac{3}{4} \text{ of \{a\}}"


@pytest.mark.parametrize(
    "text",
    [
        "9" * 200_000,
        "1," * 100_000,
        "1,111" * 50_000,
        "1 " * 100_000,
        "1" + " " * 200_000 + "x",
        "-" * 200_000,
        "$" * 200_000,
        "1/" * 100_000,
        "1e" * 100_000,
        "{" * 200_000,
        "#" * 200_001,
        "#### " * 40_000,
        "<answer>" * 25_000,
        r"\boxed{" * 30_000,
        r"\boxed" + " " * 200_000,
        r"\boxed{" + "{" * 1_000_000,
        "½" * 200_000,
        r"\frac{" * 30_000,
        r"\text{" * 30_000,
        "1" + "\\" * 200_000,
        "^" * 200_000,
    ],
    ids=lambda text: f"{text[:8]!r}",
)
def test_no_long_text_is_slow(text):
    start = time.thread_time()
    answers_match(text, "#### 42")
    # Reading is linear: a quadratic pattern takes minutes on these, and a slow machine less than a second.
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    ("text", "reference", "verdict"),
    [
        ("<answer>0.50</answer>", "1/2", True),
        ("<answer>42.0</answer>", "#### 42", True),
        ("<answer>75%</answer>", "#### 75", True),
        ("<answer>75</answer>", "75%", True),
        ("<answer>0.33</answer>", "1/3", False),
        ("<answer>-42</answer>", "#### 42", False),
        ("<answer>420</answer>", "#### 42", False),
        ("I give up", "#### 42", False),
        ("1/0", "#### 42", False),
        ("42", "", None),
        ("42", "it depends", None),
        ("42", "#### unknown", None),
    ],
)
def test_answers_are_compared_by_value(text, reference, verdict):
    assert answers_match(text, reference) is verdict


HARD = [
    (r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt{8}}", True),
    (r"\boxed{2\sqrt{2}}", r"\boxed{2\sqrt{3}}", False),
    (r"\boxed{\sqrt{4}}", "#### 2", True),
    (r"\boxed{2\sqrt{2}}", "#### 2", False),
    (r"<answer>\frac{\pi}{2}</answer>", r"\pi/2", True),
    ("<answer>5 + 3</answer>", "#### 8", True),
    ("<answer>5 + 3</answer>", "#### 3", False),
    ("<answer>5 + 3 = 9</answer>", "5 + 3 = 8", False),
    ("<answer>50% + 25%</answer>", "#### 75", True),
    (r"\boxed{3 \times 5,000}", "#### 15,000", True),
    (r"\boxed{3 \times 10^5}", "#### 300,000", True),
    (r"\boxed{\frac{1}{2}\pi}", r"\frac{\pi}{2}", True),
    (r"\boxed{1½ + 1}", "#### 2.5", True),
    (r"\boxed{2\frac12 + 1}", "#### 3.5", True),
    ("<answer>10 - 3</answer>", "#### 7", True),
    ("<answer>10 - 3</answer>", "#### 3", False),
    ("<answer>6 x 7</answer>", "#### 42", True),
    (r"\boxed{3.2E5}", r"3.2 \times 10^5", True),
    ("<answer>3.2 × 10⁵</answer>", "#### 320,000", True),
    # a formula that ends in the same number
    (r"\boxed{(3, 2)}", r"\boxed{(1, 2)}", False),
    (r"\boxed{3x - 1}", r"\boxed{2x - 1}", False),
    (r"\boxed{2y}", r"\boxed{2x}", False),
    (r"\boxed{2x}", "#### 2", False),
    (r"\boxed{x + y = 25}", r"\boxed{x^2 + y^2 = 25}", False),
    (r"\boxed{(2, \infty)}", r"\boxed{[2, \infty)}", False),
    (r"\boxed{7, 42}", "#### 42", False),
    (r"\boxed{11:30}", "12:30", False),
    (r"\boxed{12 : 30\text{ p.m.}}", "12:30", True),
    # words, units and names around a formula
    (r"\boxed{2\sqrt{2}\text{ cm}}", r"\sqrt{8}", True),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}\text{ cm}^2", True),
    (r"\boxed{3\pi \text{ square inches}}", r"3\pi", True),
    (r"\boxed{3\pi\mathrm{m}}", r"3\pi", True),
    ("<answer>2 sqrt(2) cm</answer>", r"2\sqrt{2}", True),
    (r"The answer is $2\sqrt{2}$.", r"\boxed{\sqrt{8}}", True),
    ("**The point is (1, 2).**", r"\boxed{(1, 2)}", True),
    (r"\boxed{(x, y) = (1, 2)}", "(1, 2)", True),
    (r"\boxed{x \in [1, 2]}", "[1, 2]", True),
    (r"\boxed{\text{Area} = 3\pi}", r"3\pi", True),
    (r"\boxed{2\sqrt{2} \approx 2.83}", r"2\sqrt{2}", True),
    (r"\boxed{x = 2 \text{ or } x = -2}", r"\pm 2", True),
    ("<answer>1, 2, and 3</answer>", r"\boxed{\{1, 2, 3\}}", True),
    # inequalities, powers and matrices
    (r"\boxed{\begin{pmatrix} 3 \\\\ 4 \end{pmatrix}}", r"\begin{pmatrix} 7 \\\\ 4 \end{pmatrix}", None),
    (r"\boxed{x > 2}", r"\boxed{x \ge 2}", False),
    (r"\boxed{(-1)^{n+1} 2}", r"\boxed{(-1)^n 2}", False),
]


@pytest.mark.parametrize(("text", "reference", "verdict"), HARD)
def test_expressions_are_compared_by_value(text, reference, verdict):
    assert answers_match(text, reference) is verdict


def test_every_thread_comes_to_the_same_verdict():
    """Variables once were judged only where an alarm signal could end what takes too long: in the main thread."""
    cases = [*HARD, (r"\boxed{x^2 + 3x}", "x(x + 3)", True)]
    with ThreadPoolExecutor(1) as thread:
        verdicts = [thread.submit(answers_match, *case[:2]).result() for case in cases]
    assert verdicts == [verdict for _, _, verdict in cases]


def test_a_marker_is_looked_for_at_the_end_of_a_text_alone():
    assert extract_answer("#### 7" + " " * (MAX_TEXT_LENGTH - 6)).strip() == "7"
    assert extract_answer("#### 7" + " " * MAX_TEXT_LENGTH).strip() == ""


def test_an_answer_too_long_to_judge_is_wrong_and_not_left_out():
    answer = r"\boxed{" + r"\sqrt{2} + " * 50 + "1}"
    assert answers_match(answer, r"2\sqrt{2}") is False
    assert answers_match(r"2\sqrt{2}", answer) is None


def test_only_the_end_of_a_long_answer_is_read():
    assert read_number("7" + "," * MAX_ANSWER_LENGTH) is None
    assert read_number("7" + "," * (MAX_ANSWER_LENGTH - 1)) == 7


# Each takes seconds, or gigabytes, where it is evaluated, expanded or simplified.
@pytest.mark.parametrize(
    "expression",
    [
        "9^{9^{9^9}} + 1",
        "9^9^9^9 + 1",
        "9**9**9**9 + 1",
        "9^999999999 + 1",
        "1 + 99999999!",
        r"\binom{999999999}{499999999}",
        "1/0 + 3",
        "(" * 100 + "1 + 1" + ")" * 100,
        r"\frac{1}{1 + " * 12 + "1" + "}" * 12,
        r"\frac{1}{(1 + \sqrt{2})(1 + \sqrt{3})(1 + \sqrt{5})(1 + \sqrt{7})(1 + \sqrt{11})(1 + \sqrt{13})} + 1",
        r"(\frac{x^2+y}{z+1}+\sqrt{x+\sqrt{y}})^9 + 1",
        r"x^4 + x^3 + x + \sqrt{x + 1} = \sqrt{7}",
    ],
    ids=lambda text: text[:20],
)
def test_an_expression_that_costs_much_to_simplify_is_wrong(expression):
    assert answers_match(rf"\boxed{{{expression}}}", "#### 42") is False


def test_math_verify_is_imported_by_its_own_process_alone():
    code = r"""
import sys
from fastgrpo.rewards.answers import answers_match
assert answers_match(r"\boxed{\sqrt{8} + x, x^2}", r"x^2, x + 2\sqrt{2}") is True
print([name for name in ("sympy", "math_verify", "antlr4", "torch") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("42", "42"),
        ([{"role": "assistant", "content": "42"}], "42"),
        ([{"role": "assistant", "content": "41"}, {"role": "tool", "content": "7"}], "41"),
        ([{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "2"}], "4\n2"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "42"}, {"type": "image"}]}], "42"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([], ""),
    ],
)
def test_completion_text(completion, text):
    assert completion_text(completion) == text


def test_a_completion_of_another_type_is_refused():
    with pytest.raises(TypeError, match="not int"):
        completion_text(42)


@pytest.mark.parametrize(
    ("text", "reference", "verdict"),
    [
        (r"\boxed{(1000, 200)}", r"\boxed{(1000,200)}", True),
        ("#### 1000200", r"\boxed{(1000,200)}", False),
        (r"\boxed{(12,345)}", r"\boxed{(12, 345)}", True),
        (r"\boxed{2\theta}", r"\boxed{2\theta}", True),
        ("#### 2", r"\boxed{2\theta}", False),
        (r"\boxed{\arccos 40}", "#### 40", False),
        (r"\boxed{x=y+1}", r"\boxed{y=x-1}", True),
        (r"\boxed{x=y+1}", r"\boxed{y=x+1}", False),
    ],
)
def test_pairs_commands_and_equations(text, reference, verdict):
    assert answers_match(text, reference) is verdict


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
