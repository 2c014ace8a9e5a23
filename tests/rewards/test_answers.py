"""Reading and comparing answers (answers.csv), in bounded time for any text."""

import csv
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import psutil
import pytest
from hypothesis import strategies as st
from paths import ROOT

from fastgrpo.rewards import answers, symbolic
from fastgrpo.rewards.answers import answers_match, extract_answer, final_answer, read_number
from fastgrpo.rewards.gsm8k import digits_reward, format_reward
from fastgrpo.rewards.sandbox import program_of
from fastgrpo.rewards.symbolic import same_values

with Path(__file__).with_name("answers.csv").open(newline="", encoding="utf-8") as file:
    EXAMPLES = list(csv.DictReader(file))
READERS = {
    "number": lambda text, _: read_number(text), "match": answers_match, "values": same_values,
    "plain": lambda text, _: answers.plain(text), "formula": lambda text, _: answers.formula(answers.plain(text))[0],
    "format": lambda text, _: format_reward([], [text])[0],
    "digits": lambda text, reference: digits_reward([], [text], [reference])[0],
    "program": lambda text, _: program_of(text),
}  # fmt: skip
ROWS = [pytest.param(row, id=f"{row['reader']} {i + 2}") for i, row in enumerate(EXAMPLES) if row["reader"] in READERS]


@pytest.mark.parametrize("row", ROWS)
def test_answers_of_the_table_match_as_expected(row):
    """The number in the name of a case is that of its row in answers.csv."""
    found = READERS[row["reader"]](row["text"], row["reference"])
    written = f"{found:.6g}" if isinstance(found, float) else str(found)
    assert (written.lower() if found in (None, True, False) else written) == row["verdict"], row["why"]


@pytest.fixture
def limited(monkeypatch):
    """Sets how many seconds of CPU time a comparison has."""

    def limit(seconds):
        symbolic._close()
        code = f"from fastgrpo.rewards import symbolic; symbolic.CPU_SECONDS = {seconds}; symbolic._serve()"
        monkeypatch.setattr(symbolic, "_RUN", f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); {code}")

    yield limit
    symbolic._close()


COSTLY = [(row["text"], row["reference"]) for row in EXAMPLES if row["reader"] == "costly"]


@pytest.mark.parametrize("pairs", [COSTLY[::6], pytest.param(COSTLY, marks=pytest.mark.slow)], ids=["few", "all"])
def test_an_expression_that_costs_much_to_simplify_is_wrong(limited, pairs):
    limited(0.3)
    assert [pair for pair in pairs if answers_match(*pair) is not False] == []


def test_a_comparison_that_exceeds_its_cpu_time_is_wrong_and_the_next_one_works(limited):
    limited(1)
    assert same_values("(x+y+z+1)^{3000} + 1", "6") is False
    assert same_values(r"\sqrt{8} + 1", r"2\sqrt{2} + 1") is True


SPELLINGS = [
    "#### {value:,}", "The answer is {value}.", "<answer>{value}.0</answer>", "<answer>${value:,}.00</answer>",
    "<answer>{value}%</answer>", r"\boxed{{{value:,} \text{{ dollars}}}}", r"\boxed{{\frac{{{double}}}{{2}}}}",
    "{double}/2",
]  # fmt: skip


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.integers(-(10**9), 10**9))
def test_every_spelling_of_a_whole_number_has_its_value(value):
    for spelling in SPELLINGS:
        text = spelling.format(value=value, double=2 * value)
        assert read_number(text) == final_answer(text) == value, text
        assert answers_match(text, f"#### {value}") is True
        assert answers_match(text, f"#### {value + 1}") is answers_match(text, f"#### {value}.5") is False
        assert answers_match(text, f"#### {-value}") is (value == 0)


@hypothesis.given(st.fractions(max_denominator=1000))
def test_every_spelling_of_a_fraction_has_its_value(value):
    top, bottom = value.numerator, value.denominator
    sign, (whole, rest) = "-" * (value < 0), divmod(abs(top), bottom)
    texts = [f"{top}/{bottom}", rf"\boxed{{\dfrac{{{top}}}{{{bottom}}}}}", rf"{sign}\frac{{{abs(top)}}}{{{bottom}}}"]
    texts.append(f"{sign}{whole} {rest}/{bottom}")
    assert [read_number(text) for text in texts] == [value] * 4


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(2, 999), st.integers(1, 999))
def test_an_expression_is_compared_by_its_value(value, step):
    for text in (f"{value - step} + {step}", rf"2 \times {value} - {value}", rf"\sqrt{{{value**2}}}"):
        assert answers_match(rf"\boxed{{{text}}}", f"#### {value}") is True, text
    for text in (f"{value} + {step}", rf"{value}\sqrt{{2}}"):
        assert answers_match(rf"\boxed{{{text}}}", f"#### {value}") is False, text


def test_rejects_answers_beyond_the_limits():
    assert extract_answer(r"\boxed{\frac{3}{4} \text{ of \{a\}}} + {1}") == r"\frac{3}{4} \text{ of \{a\}}"
    # A marker is looked for at the end of a text, and a number at the end of an answer.
    assert extract_answer("#### 7" + " " * (answers.MAX_TEXT_LENGTH - 6)).strip() == "7"
    assert extract_answer("#### 7" + " " * answers.MAX_TEXT_LENGTH).strip() == ""
    assert read_number("7" + "," * (answers.MAX_ANSWER_LENGTH - 1)) == 7
    assert read_number("7" + "," * answers.MAX_ANSWER_LENGTH) is None
    # An answer that is too long to compare is wrong; with such a reference nothing can be compared.
    long = r"\boxed{" + r"\sqrt{2} + " * 50 + "1}"
    assert answers_match(long, r"2\sqrt{2}") is False and answers_match(r"2\sqrt{2}", long) is None


BEGINNINGS = ("", "#### ", "\\boxed{", "<answer>")
# Beginnings of what the patterns look for, which never ends; repeated, each makes a pattern try again at every place.
UNITS = (
    "{", "}", "<", "<<", "(", ")", "[", "0", " ", "\\", "\\text{", "\\text{a}", "\\text{a} ", "\\boxed{", "####",
    "<answer>", "<a", "<|", "Rs", "⁰", "–", "\\frac", "\\frac{", "\\frac{1}{1}", "\\frac{1", "1,111", ",111", " 111",
    "1 ", "$", "$ ", "^", "^{", "_a", "=", "a=", "a", "aaa ", "1/1", "1/", "1e1", "1e", "1.", "1 and ", "1:1", "1 : ",
    "x", "1 x ", "√", "√1", "^{2}", "m", "m^2", "1m ", "½", "-", "- ", "+", ",", "1,", "{,}", "\\circ", "^\\circ",
    "%", "\\approx", "≈1", "\\color{", "\\left", "\\,", "1\\text{a}/", "sqrt", "**1", "9^", "(1,", "\\pm", "\\infty",
    "or ", "\\cup", "\n", "1\n", "<answer></answer>", "\\\\", "\u00a0", "9", "\\boxed ",
)  # fmt: skip
JUDGES = """
import json, sys, time
from fastgrpo.rewards import answers, countdown, gsm8k, sandbox
for beginning, unit, length in json.load(sys.stdin):
    answers.MAX_ANSWER_LENGTH = max(10_000, length // 10)  # so that a quadratic pattern takes long
    text = (beginning + unit * length)[:length] + "!"
    print(repr(text[:40]), len(text), flush=True)
    start = time.process_time()
    answers.extract_answer(text) if beginning else answers.answers_match(text, "#### 42")
    gsm8k.format_reward(["?"], [text])
    sandbox.program_of(text)
    assert countdown.answer_value(text, [9] * 4) is None
    assert time.process_time() - start < 3, "that took long"
print("done")
"""


def test_reads_any_text_fast():
    """Where a pattern is quadratic, or exponential, some of these texts take many seconds to hours, and not 0.1 s."""
    texts = [(beginning, unit, 20_000) for unit in UNITS for beginning in BEGINNINGS]
    texts += [("", unit, 1_000_000) for unit in ("9", "{", "#", ",111", "</answer>", "<answer></answer>", "\\boxed{")]
    texts += [("\\boxed{", "{", 1_000_000), ("1e", "9", 1_000_000), ("``` ", " ", 1_000_000)]
    command = [sys.executable, "-c", JUDGES]
    run = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.endswith("done\n"), run.stdout[-100:] + run.stderr


def test_math_verify_is_imported_only_by_its_own_process():
    code = r"""
import sys
from fastgrpo.rewards.answers import answers_match
assert answers_match(r"\boxed{\sqrt{8} + x, x^2}", r"x^2, x + 2\sqrt{2}") is True
print([name for name in ("sympy", "math_verify", "antlr4", "torch") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


def test_a_killed_process_is_replaced():
    assert same_values("1 + x", "x + 1") is True
    process = symbolic._started.process
    for each in (process, *psutil.Process(process.pid).children()):
        each.kill()
    assert same_values("2 + x", "x + 2") is True and symbolic._started.process.pid != process.pid


def test_an_interrupted_comparison_leaves_the_next_ones_their_own_verdicts(monkeypatch):
    assert same_values("30 + x", "x + 30") is True

    def interrupted(connection):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(symbolic.Connection, "recv_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        same_values("31 + x", "x + 31")
    assert [same_values(f"{i} + x", "x + 32") for i in range(32, 35)] == [True, False, False]


def test_threads_and_forked_processes_give_the_same_verdict():
    assert same_values("3 + x", "x + 3") is True
    with ThreadPoolExecutor(4) as threads:
        pairs = [(f"{i} + x", f"x + {i % 5}") for i in range(10)]
        assert list(threads.map(same_values, *zip(*pairs, strict=True))) == [True] * 5 + [False] * 5
    with multiprocessing.get_context("fork").Pool(1) as forked:
        assert forked.apply(same_values, ("20 + x", "x + 20")) is True
    assert same_values("21 + x", "x + 21") is True


def test_completion_text():
    parts, tool = [{"type": "text", "text": "42"}, {"type": "image"}], {"role": "tool", "content": "7"}
    for contents, text in ((["41"], "41"), (["4", "2"], "4\n2"), ([parts], "42"), ([None], ""), ([], "")):
        messages = [{"role": "assistant", "content": content} for content in contents]
        assert answers.completion_text([*messages, tool]) == answers.completion_text(text) == text
