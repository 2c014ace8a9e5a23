"""The samples of a run for the page, thinned to a number of bytes, and a histogram of their rewards.

samples.jsonl may have gigabytes, and a run may still write to it. So one pass stores only the position of each group,
and groups are read on demand. To fit, the page drops in this order: steps, evenly, down to a dozen; groups, evenly,
down to one per step; per-token values; ends of long texts; further steps. A note says so.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fastgrpo.page.reading import finite
from fastgrpo.run.metrics import SAMPLE_COLUMNS

FEW_STEPS = 12  # steps beyond these are dropped before groups; these are dropped last
CUTS = (20_000, 5_000, 2_000, 500, 200)  # characters that stay of a text
ANSWER = 300  # characters of the arguments and of the answer of a call; the text has all that the model read
BINS = 24  # of the histogram
COLUMNS = 200  # maximum; if more steps are logged, a column joins several
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_samples(
    folder: Path, budget: int, weights: Sequence[float] = ()
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a run's samples.jsonl. Returns the samples within `budget` bytes, and the histogram of rewards or None."""
    try:
        with open(folder / "samples.jsonl", "rb") as opened:
            file = SampleFile(opened, weights)
            return _thinned(file, budget), reward_histogram(file.totals)
    except FileNotFoundError:
        return {"note": "The run has no samples.jsonl.", "steps": []}, None
    except OSError as error:
        return {"note": f"samples.jsonl cannot be read: {error.strerror}.", "steps": []}, None


def usable(weights: Any) -> Sequence[float]:
    """Return the weights of the rewards, or an empty list if they are not a list of numbers."""
    return weights if isinstance(weights, list | tuple) and all(finite(one) is not None for one in weights) else []


class Block(NamedTuple):
    """The position of one group in the file."""

    group: int
    offset: int  # of the first line, in bytes
    count: int  # of lines


class SampleFile:
    """The steps of samples.jsonl: positions of their groups, and total rewards of their completions.

    If steps decrease, the run was resumed: drop the steps that are written again.
    """

    def __init__(self, file: BinaryIO, weights: Sequence[float] = ()) -> None:
        self.steps: dict[int, list[Block]] = {}
        self.totals: dict[int, list[float]] = {}
        self.damaged, self.half = 0, False  # number of damaged lines; whether the last line is incomplete
        self.replaced: set[int] = set()
        self._file, self._weights = file, usable(weights)
        last, offset = (-1, -1), 0
        for line in file:
            row = _parse(line)
            if row is not None:
                place = row["step"], row["group"]
                if place < last:
                    self._forget(row["step"])
                self._note(row, offset)
                last = place
            elif line.strip():
                self.damaged += line.endswith(b"\n")
                self.half = not line.endswith(b"\n")
            offset += len(line)

    def _forget(self, step):
        gone = [other for other in self.steps if other >= step]
        self.replaced.update(gone)
        for other in gone:
            del self.steps[other]
            self.totals.pop(other, None)

    def _note(self, row, offset):
        blocks = self.steps.setdefault(row["step"], [])
        if blocks and blocks[-1].group == row["group"]:
            blocks[-1] = blocks[-1]._replace(count=blocks[-1].count + 1)
        else:
            blocks.append(Block(row["group"], offset, 1))
        total = _total(row.get("rewards"), self._weights)
        if total is not None:
            self.totals.setdefault(row["step"], []).append(total)

    def read(self, step: int, block: Block) -> Iterator[dict[str, Any]]:
        """Read the lines of a group."""
        self._file.seek(block.offset)
        found = 0
        while found < block.count and (line := self._file.readline()):
            row = _parse(line)
            if row is None:
                continue
            if (row["step"], row["group"]) != (step, block.group):
                return  # a resume has truncated the file meanwhile
            found += 1
            yield row


def _parse(line):
    """Parse one line, or return None."""
    try:
        text = line.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = line.decode("utf-8", "replace")
    try:
        row = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    counts = [row.get(name) for name in ("step", "group")] if isinstance(row, dict) else [None]
    return row if all(type(value) is int and value >= 0 for value in counts) else None


def _total(rewards, weights):
    """Return the weighted sum of the rewards of a completion, without null; None if all are null.

    The rewards that a run adds itself follow those with weights. Their weight is 1.
    """
    if not isinstance(rewards, dict):
        return None
    pairs = zip(itertools.chain(weights, itertools.repeat(1.0)), rewards.values(), strict=False)
    given = [factor * value for factor, value in pairs if finite(value) is not None]
    return finite(sum(given)) if given else None


def reward_histogram(totals: dict[int, list[float]]) -> dict[str, Any] | None:
    """Count total rewards in bins, per step."""
    if not totals:
        return None
    steps, number = sorted(totals), sum(map(len, totals.values()))
    edges = _edges(sorted({round(value, 9) for step in totals.values() for value in step}))
    width = -(-len(steps) // COLUMNS)
    columns = [steps[at : at + width] for at in range(0, len(steps), width)]
    counts = [_count([value for step in column for value in totals[step]], edges) for column in columns]
    joined = f" {width} logged steps form one column." if width > 1 else ""
    note = (
        f"It counts the {number:,} completions that samples.jsonl contains of {len(steps):,} logged steps, about "
        f"{number / len(steps):.0f} per step.{joined}"
    )
    return {"step": [column[-1] for column in columns], "edges": edges, "counts": counts, "note": note}


def _edges(values):
    """Choose the edges of the bins: around each value where few lie on a grid, otherwise of equal width."""
    low, high = values[0], values[-1]
    if low == high:
        return [low - 0.5, low + 0.5] if abs(low) < 1e9 else [low - abs(low) / 2, low + abs(low) / 2]
    gap = min(after - before for before, after in itertools.pairwise(values))
    places = [(value - low) / gap for value in values] if high - low < 1e15 else [BINS]
    on_grid = places[-1] < BINS and all(abs(place - round(place)) < 1e-6 for place in places)
    if on_grid:  # such as 0 and 1: each value is in the middle of its own bin
        return [short(low + (i - 0.5) * gap, 12) for i in range(round(places[-1]) + 2)]
    width = high / BINS - low / BINS
    return [short(low + i * width, 12) for i in range(BINS)] + [short(high + width / 1e6, 12)]


def _count(values, edges):
    counts, width = [0] * (len(edges) - 1), edges[1] - edges[0] or 1.0  # edges may round to the same number
    for value in values:
        counts[min(max(int(value / width - edges[0] / width), 0), len(counts) - 1)] += 1
    return counts


def short(value: float, digits: int = 6) -> float | int | None:
    """Round to so many digits; null if not finite."""
    return value if isinstance(value, int) else None if finite(value) is None else float(f"{value:.{digits}g}")


class Plan(NamedTuple):
    """Limits on the samples in the page."""

    steps: int
    groups: int  # maximum per step
    numbers: bool = True  # whether to keep the per-token values
    cut: int | None = None  # maximum characters of a text; None keeps all

    def smaller(self, fitted: int) -> "Plan | None":
        """Return a smaller plan if only `fitted` steps fit; None if nothing is left to drop."""
        few = min(self.steps, FEW_STEPS)
        cut = next((cut for cut in CUTS if self.cut is None or cut < self.cut), None)
        if self.steps > few:
            return self._replace(steps=max(few, min(self.steps - 1, int(fitted * 0.95))))
        if self.groups > 1:
            return self._replace(groups=self.groups // 2)
        if self.numbers:
            return self._replace(numbers=False)
        if cut is not None:
            return self._replace(cut=cut)
        return self._replace(steps=max(2, self.steps // 2)) if self.steps > 2 else None


def _thinned(file, budget):
    """Keep as many samples as fit."""
    most = max(map(len, file.steps.values()), default=0)
    plan = Plan(len(file.steps), most)
    while plan is not None:
        steps, fitted = _build(file, plan, budget)
        if steps is not None:
            return {"note": " ".join([_kept(file, plan, most, budget), *_troubles(file)]), "steps": steps}
        plan = plan.smaller(fitted)
    nothing = f"No sample fits into the {_size(budget)} for samples in this page."
    return {"note": " ".join([nothing, *_troubles(file)]), "steps": []}


def _build(file, plan, budget):
    """Build the steps of a plan. Returns the steps, None if they are too large, and how many fitted."""
    steps, used = [], 0
    for step in _evenly(list(file.steps), plan.steps):
        groups = []
        for block in _evenly(file.steps[step], plan.groups):
            rows = list(file.read(step, block))
            if rows:
                groups.append(_group(block.group, rows, plan))
                used += _bytes(groups[-1])
        used += 30  # of the step itself
        if used > budget:
            return None, len(steps)
        if groups:
            steps.append({"step": step, "groups": groups})
    return steps, len(steps)


def _evenly(things, count):
    """Choose evenly spread items, including the first and, for two or more, the last."""
    if len(things) <= count:
        return things
    if count == 1:
        return things[:1]
    return [things[round(i * (len(things) - 1) / (count - 1))] for i in range(count)]


def _bytes(value):
    """The size of a value in the page, which writes <, > and & as escapes of six characters."""
    text = json.dumps(value, ensure_ascii=False)
    return len(text.encode()) + 5 * sum(map(text.count, "<>&")) + 2


def _group(number, rows, plan):
    return {
        "group": number,
        "prompt": _prompt(rows[0].get("prompt"), plan.cut),
        "completions": [
            # A reset may give each completion of a group its own prompt.
            _completion(row, plan)
            | ({} if row.get("prompt") == rows[0].get("prompt") else {"prompt": _prompt(row.get("prompt"), plan.cut)})
            for row in rows
        ],
    }


def _prompt(prompt, cut):
    """A text, or a list of messages of two texts each."""
    if not isinstance(prompt, list):
        return _text(prompt, cut)
    return [{"role": _text(_part(turn, "role"), 50), "content": _text(_content(turn), cut)} for turn in prompt]


def _part(turn, name):
    return turn.get(name) if isinstance(turn, dict) else None


def _content(turn):
    """The text of a message, followed by its other fields, such as tool calls, as JSON."""
    if not isinstance(turn, dict):
        return turn
    content = turn.get("content")
    more = {name: value for name, value in turn.items() if name not in ("role", "content") and value is not None}
    if not more:
        return content
    return _as_text(content or None) + "\n" + text_of(more)


def _completion(row, plan):
    completion, rewards, turns = row.get("completion"), row.get("rewards"), row.get("turns")
    # The tokens' ends count in the turns, or in the one message that a model wrote.
    single = not isinstance(completion, list) or len(completion) == 1
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        completion, single = "".join(turns), True
    elif isinstance(completion, list):
        told = [f"[{_part(turn, 'role')}]\n{_as_text(_content(turn))}" for turn in completion]
        completion = _content(completion[0]) if single else "\n\n".join(told)
    rewards = rewards if isinstance(rewards, dict) else {}
    known = {
        "text": _text(completion, plan.cut),
        "rewards": {_text(name, 200): finite(value) for name, value in rewards.items()},
        "advantage": finite(row.get("advantage")),
        "finish_reason": _text(row.get("finish_reason"), 200),
        "tokens": finite(row.get("tokens")),
        "clipped": finite(row.get("clipped")),
        **_calls(row, turns, plan.cut),
        "extras": {
            _text(name, 200): _plain(value, plan.cut) for name, value in row.items() if name not in SAMPLE_COLUMNS
        },
    }
    return known | _tokens(row if single and plan.numbers else {})


def _calls(row, turns, cut):
    """The calls of tools, and the ends of drawn and appended turns in the text, which alternate."""
    calls = row.get("calls")
    if not isinstance(turns, list) or not isinstance(calls, list):
        return {}
    texts = ("name", "arguments", "answer")
    return {
        "turn_ends": list(itertools.accumulate(len(_as_text(turn)) for turn in turns)),
        "calls": [
            {name: _text(_part(call, name), min(cut or ANSWER, ANSWER)) for name in texts}
            | {"turn": finite(_part(call, "turn")), "latency_s": finite(_part(call, "latency_s"))}
            | {"failed": _part(call, "failed") is True}
            for call in calls
        ],
    }


def _tokens(row):
    """The per-token values: lists of equal length, each None if the line has no usable one."""
    ends = _counts(row.get("token_ends"))
    details = {"token_ends": None, "logps": None, "ratios": None, "clipped_tokens": None}
    if ends is None or any(a > b for a, b in itertools.pairwise(ends)):
        return details
    details["token_ends"] = ends
    for name in ("logps", "ratios"):
        values = _numbers(row.get(name))
        details[name] = values if values is not None and len(values) == len(ends) else None
    if details["ratios"] is not None:
        details["clipped_tokens"] = _counts(row.get("clipped_tokens")) or []
    return details


def _counts(values):
    """A list of non-negative integers, or None."""
    right = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return values if right else None


def _numbers(values):
    """A list of finite numbers with four decimals, or None."""
    if not isinstance(values, list) or any(finite(value) is None for value in values):
        return None
    rounded = [round(value, 4) for value in values]
    return [int(value) if value == int(value) else value for value in rounded]  # "0" is shorter than "-0.0"


def _plain(value, cut):
    """An extra column: numbers and short texts unchanged, others as JSON."""
    if value is None or isinstance(value, bool):
        return value
    return _text(value, cut) if finite(value) is None else value


def text_of(value: Any) -> str:
    """Return a text unchanged, and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_text(value):
    return "" if value is None else text_of(value)


def _text(value, cut):
    """A text in valid UTF-8, truncated with a mark; other values as JSON."""
    text = _SURROGATE.sub("\ufffd", _as_text(value))
    if cut is None or len(text) <= cut:
        return text
    return f"{text[:cut]} […{len(text) - cut:,} more characters are not in this page]"


def _size(budget):
    return f"{budget / 1e6:,.1f} MB" if budget >= 100_000 else f"{budget:,} bytes"


def _kept(file, plan, most, budget):
    """Describe what the page contains and what it drops."""
    count = len(file.steps)
    if not count:
        return "samples.jsonl holds no samples yet."
    gone = []
    if plan.steps < count:
        gone.append(f"{plan.steps:,} of the {count:,} steps in samples.jsonl, evenly spread")
    if plan.groups < most:
        gone.append(f"at most {plan.groups} of the up to {most} groups per step")
    if not plan.numbers:
        gone.append("no per-token values")
    if plan.cut is not None:
        gone.append(f"the first {plan.cut:,} characters of a text")
    if not gone:
        return "All samples in samples.jsonl are in this page."
    listed = gone[0] if len(gone) == 1 else f"{', '.join(gone[:-1])}, and {gone[-1]}"
    return f"This page has {_size(budget)} for samples, so it shows {listed}. The file has the rest."


def _troubles(file):
    """Describe the problems of the file."""
    if file.damaged:
        yield f"{file.damaged:,} damaged {'line is' if file.damaged == 1 else 'lines are'} skipped."
    if file.half:
        yield "The last line is incomplete and is skipped."
    if file.replaced:
        yield f"A resume repeated {len(file.replaced):,} step(s); the last version of each is shown."
