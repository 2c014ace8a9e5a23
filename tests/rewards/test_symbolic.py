"""Symbolic answers are compared by value, and none costs more than its CPU time."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from paths import ROOT

from fastgrpo.rewards import symbolic
from fastgrpo.rewards.symbolic import same_values

# answer, expected answer, verdict
CASES = [
    (r"2\sqrt{2}", r"\sqrt{8}", True),
    (r"2\sqrt{2}", r"2\sqrt{3}", False),
    (r"\frac{1 + \sqrt{5}}{2}", r"\frac{2}{\sqrt{5} - 1}", True),
    (r"\sqrt{\frac{2 + \sqrt{3}}{4}}", r"\frac{\sqrt{6} + \sqrt{2}}{4}", True),
    (r"\frac{\pi}{2}", r"\pi/2", True),
    (r"\pi", "22/7", False),
    ("3 + 10^{-9}", "3", False),
    # values that agree in more digits than are computed
    ("2^{2014}", "2^{2014} - 1", False),
    ("2^{2013} * 2", "2^{2014}", True),
    (r"1 - \frac{1}{2^{300}}", r"1 - \frac{1}{2^{301}}", False),
    ("0", "2^{-300}", False),
    (r"\sqrt{2}\sqrt{2} - 2", "0", True),
    (r"\sqrt{2} 10^{-90}", r"\sqrt{3} 10^{-90}", False),
    ("x + 10^{-85}", "x + 0", False),
    # variables
    ("x^2 + 3x", "x(x + 3)", True),
    ("x^2 + 3", "x(x + 3)", False),
    ("X + Y", "y + x", True),
    ("x", "y", False),
    (r"\pi(r^2 - R^2)", r"\pi(R^2 - r^2)", False),
    ("3x^{1/2}", r"3\sqrt{x}", True),
    (r"\sqrt{x^2}", "x", False),
    (r"\frac{x^2 - 1}{x - 1}", "x + 1", True),
    # a number that is all of an answer may be rounded to six places
    ("1.414214", r"\sqrt{2}", True),
    (r"\sqrt{2}", "1.414214", True),
    ("1.41421", r"\sqrt{2}", False),
    ("1.414214 + 0", r"\sqrt{2}", False),
    ("0.000001", "10^{-7}", False),
    # lists
    (r"(1, \sqrt{8})", r"(1, 2\sqrt{2})", True),
    (r"(\sqrt{8}, 1)", r"(1, 2\sqrt{2})", False),
    (r"\sqrt{8}, 1", r"1, 2\sqrt{2}", True),
    (r"\{\sqrt{8}, 1\}", r"1, 2\sqrt{2}", True),
    (r"1, \sqrt{8}", r"(1, 2\sqrt{2})", True),
    (r"[1, \sqrt{8}]", r"(1, 2\sqrt{2})", False),
    (r"[1, \sqrt{8}]", r"[1, 2\sqrt{2}]", True),
    (r"(1, \sqrt{8}]", r"[1, 2\sqrt{2}]", False),
    (r"[1, 2, \sqrt{8}]", r"(1, 2, 2\sqrt{2})", True),
    (r"\pm 2\sqrt{2}", r"\sqrt{8}, -\sqrt{8}", True),
    (r"1 \pm \sqrt{2}", r"1 - \sqrt{2}, 1 + \sqrt{2}", True),
    (r"\frac{1 \pm \sqrt{5}}{2}", r"\frac{1 + \sqrt{5}}{2}, \frac{1 - \sqrt{5}}{2}", True),
    (r"\mp 2", "2, -2", True),
    ("1 and 2; 3 or 4", "1, 2, 3, 4", True),
    ("(1, 2), (3, 4)", "(3, 4), (1, 2)", True),
    ("(1, 2), (3, 4)", "(2, 1), (3, 4)", False),
    ("(1, 2), 3", "(1, 2), (3, 4)", False),
    (r"(2, \infty) \cup (-\infty, 1]", r"(-\infty, 1] \cup (2, \infty)", True),
    (r"(-\infty, 1) \cup (2, \infty)", r"(-\infty, 1] \cup (2, \infty)", False),
    (r"\lbrace 1, 2 \rbrace", "2, 1", True),
    ("1:2", "1:2", True),
    ("2:1", "1:2", False),
    # equations
    ("3 = x", "3", True),
    ("f(x) = 2x + 1", "2x + 1", True),
    ("2x + 1", "f(x) = 2x + 1", True),
    ("AB = 2 + 1", "3", True),
    (r"\theta = 2 + 1", "3", True),
    ("x = 2 + 1", "3", True),
    ("5 + 3 = 8", r"2^3", True),
    ("2 + 1", "x = 3", True),
    ("x = 2 + 1", "x = 3", True),
    ("y = 2 + 1", "x = 3", False),
    ("y - 2x = 1", "y = 2x + 1", True),
    ("4x + 2 = 2y", "y = 2x + 1", True),
    ("y = 2x + 2", "y = 2x + 1", False),
    ("x^2 + y^2 = 4", "x^2 + y^2 = 9", False),
    ("2x + 1", "x + y = 3", False),
    ("x = 1, y = 1 + 1", "1, 2", True),
    (r"\begin{pmatrix} 1 \\ 1 + 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    ("x > 2", r"x \ge 2", False),
    ("2 < x", "x > 2", True),
    # what cannot be read
    ("3!", "6", True),
    ("(1, 2", r"(1, 2)", False),
    ("6", "(1, 2", None),
    ("9^{9^{9^9}}", "6", False),
    ("6", "9^{9^{9^9}}", False),
    ("+".join("1" * 200), "200", False),
]


@pytest.mark.parametrize(("answer", "expected", "verdict"), CASES)
def test_values_are_compared(answer, expected, verdict):
    assert same_values(answer, expected) is verdict


def test_a_comparison_that_exceeds_its_cpu_time_is_wrong_and_the_next_one_works():
    for tower in ("9^{9^{9^{9}}}", "(x+y+z+1)^{3000} + 1"):
        assert same_values(tower, "6") is False
        assert same_values(r"\sqrt{8} + 1", r"2\sqrt{2} + 1") is True


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


def test_every_thread_and_every_forked_process_comes_to_the_same_verdict():
    assert same_values("3 + x", "x + 3") is True
    with ThreadPoolExecutor(4) as threads:
        pairs = [(f"{i} + x", f"x + {i % 5}") for i in range(10)]
        assert list(threads.map(same_values, *zip(*pairs, strict=True))) == [True] * 5 + [False] * 5
    with multiprocessing.get_context("fork").Pool(1) as forked:
        assert forked.apply(same_values, ("20 + x", "x + 20")) is True
    assert same_values("21 + x", "x + 21") is True


def test_without_math_verify_the_remedy_is_named(tmp_path):
    tmp_path.joinpath("math_verify.py").write_text("raise ImportError")
    code = "from fastgrpo.rewards.symbolic import same_values; same_values('x', 'y')"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert run.returncode == 1 and "pip install 'fastgrpo[train]'" in run.stderr
