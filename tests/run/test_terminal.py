"""The output of a command: one bar and one line per logged step in a terminal, and plain text elsewhere."""

import io
import re
import sys

import pytest

from fastgrpo.run import terminal as module
from fastgrpo.run.terminal import Terminal, print_columns, print_table

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def show(monkeypatch):
    """A function that makes stdout and stderr one terminal of 80 columns; pytest sets them anew when a test begins."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)

    def show():
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    return show


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "REDRAW_SECONDS", 0)  # tqdm has a clock of its own
    return now


def run(terminal, clock):
    """Four steps of a second, every other of which is logged, and an evaluation of ten seconds after the second one."""
    terminal.progress(4, "GRPO")
    clock[0] += 60  # the first evaluation
    for step in range(1, 5):
        terminal.begun()
        clock[0] += 1
        terminal.advance(reward=0.123456, accuracy=0.5, kl=1e-5)
        if step % 2 == 0:
            terminal.logged(step, {"reward": 0.123456, "kl": 1e-5, "length": 1234.6}, 1.0)
        if step == 2:
            with terminal.share("evaluate") as progress:
                for _ in range(10):
                    clock[0] += 1
                    progress(0.1)
            terminal.say("step 2: held-out accuracy 0.5")
            terminal.say("step 2: warning: it repeats itself")
    terminal.close_bar()
    terminal.table([("steps", 4), ("files", "a, b")])
    terminal.last("run folder runs/x")


PLAIN = """\
step 2/4  reward 0.123     kl 1e-05     length 1,235     1 s per step  0:02 left
step 2: held-out accuracy 0.5
step 2: warning: it repeats itself
step 4/4  reward 0.123     kl 1e-05     length 1,235     1 s per step
  steps  4
  files  a, b
run folder runs/x
"""


def test_a_pipe_gets_plain_lines_and_no_bar(clock, capsys):
    run(Terminal(), clock)
    assert capsys.readouterr() == (PLAIN, "")


def test_a_terminal_gets_one_bar_below_the_lines(clock, show):
    screen = show()
    run(Terminal(), clock)
    written = screen.getvalue()
    assert "\n\r" in written and "\x1b[A" not in written  # no second bar, for which the cursor would go up
    bars = [text for text in re.split(r"[\r\n]", written) if text.startswith("GRPO:")]
    assert all(len(bar) <= 80 for bar in bars)
    assert any(re.fullmatch(r"GRPO:  75%\|[^|]+\| 3/4, 0:04 left, reward 0.123 accuracy 0.5", bar) for bar in bars)
    assert any(bar.endswith("| 2/4, evaluate 70%") for bar in bars) and not any("kl" in bar for bar in bars)
    assert "kl 1e-05     length 1,235     1 s per step\n" in ESCAPE.sub("", written)  # the bar has the rest
    assert "\x1b[33mstep 2: warning: it repeats itself\x1b[0m\n" in written  # yellow
    assert "│ steps │ 4    │" in ESCAPE.sub("", written)


TOLD = ["step 2: warning: it repeats itself", "run folder runs/x", "error: lost"]


@pytest.mark.parametrize("setting, shown", [("silent", []), ("quiet", TOLD)])
def test_a_quiet_terminal_shows_warnings_and_results_and_a_silent_one_nothing(clock, show, setting, shown):
    screen = show()
    run(terminal := Terminal(**{setting: True}), clock)
    terminal.say("error: lost")
    terminal.columns([["metric", "a"], ["accuracy", "0.5"]])
    assert ESCAPE.sub("", screen.getvalue()).splitlines() == shown


def test_controls_are_escaped(show):
    """A terminal would obey what a completion says."""
    odd = ("\x1b[2Jgone\x07 \u202eback [bold]not markup[/bold]", "a\x1b[1A", "b\x9b", "title\x1b]0;")
    screen = show()
    Terminal().say(odd[0])
    print_table([odd[1:3]])
    print_columns([[odd[3]], ["x"]])
    told = ESCAPE.sub("", screen.getvalue()).replace("\r\n", "\n")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", told)
    assert all(text.encode("unicode_escape").decode("ascii") in told for text in odd)
