"""No completion costs the project's own reward functions much: each is judged in linear time, or is beyond a bound.

The texts run in a process with a limit that is hundreds of times what they take, and that nothing quadratic in 100,000
characters with a costly step, and nothing exponential, would keep.
"""

import json
import subprocess
import sys

import pytest
from paths import ROOT

from fastgrpo.rewards.answers import answers_match
from fastgrpo.rewards.countdown import answer_value

LENGTH = 100_000
LIMIT = 600  # seconds for all texts of one beginning
BEGINNINGS = ("", "#### ", "\\boxed{", "<answer>")
# Beginnings of what the patterns look for, which never ends; repeated, each makes a pattern try again at every place.
UNITS = (
    "{", "}", "<", "<<", "(", ")", "[", "0", " ", "\\", "\\text{", "\\text{a}", "\\text{a} ", "\\boxed{", "####",
    "<answer>", "<a", "<|", "Rs", "⁰", "–", "\\frac", "\\frac{1}{1}", "\\frac{1", "1,111", ",111", " 111", "1 ",
    "$", "$ ", "^", "^{", "_a", "=", "a=", "a", "aaa ", "1/1", "1/", "1e1", "1.", "1 and ", "1:1", "1 : ", "x", "1 x ",
    "√", "√1", "^{2}", "m", "m^2", "1m ", "½", "-", "- ", "+", ",", "{,}", "\\circ", "^\\circ", "%", "\\approx", "≈1",
    "\\color{", "\\left", "\\,", "1\\text{a}/", "sqrt", "**1", "9^", "(1,", "\\pm", "\\infty", "or ", "\\cup", "\n",
    "1\n", "<answer></answer>", "\\\\", "\u00a0",
)  # fmt: skip
SCRIPT = """
import json, sys
from fastgrpo.rewards import answers, gsm8k, sandbox
for text in json.load(sys.stdin):
    print(repr(text[:40]), repr(text[-1:]), flush=True)
    answers.answers_match(text, "#### 42")
    answers.answers_match("42", text)
    gsm8k.format_reward(["?"], [text])
    sandbox.program_of(text)
print("done")
"""


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_the_worst_of_100_000_characters_are_read_at_once(beginning):
    texts = [(beginning + unit * LENGTH)[:LENGTH] + "!" for unit in UNITS] + [f"{beginning}```{' ' * LENGTH}a b"]
    command = [sys.executable, "-c", SCRIPT]
    try:
        run = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"more than {LIMIT} s, in the last text of {(error.stdout or b'').decode()[-200:]}")
    assert run.stdout.endswith("done\n"), run.stderr


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "9^{9^{9^{9}}}",
        "9**9**9**9",
        "9" * 1_000_000,
        "1e" + "9" * 1_000_000,
        "{" * 100_000,
        "\\boxed{" * 10_000 + "1" + "}" * 10_000,
        "(" * 100_000 + "1" + ")" * 100_000,
        "\\frac{1}{" * 1_000 + "2" + "}" * 1_000,
        "\\sqrt{" * 1_000 + "2" + "}" * 1_000,
        "10000^{10000}^{10000}",
        "\\sqrt[9999]{9^{9999}}",
    ],
    ids=lambda text: text[:12],
)
def test_towers_and_long_numbers_are_wrong_and_nothing_more(text):
    assert answers_match(f"\\boxed{{{text}}}", "#### 42") is False
    assert answer_value(f"<answer>{text}</answer>", [9] * 4) is None
