"""The samples of a run as the page shows them, thinned to a number of bytes.

A file may be a thousand times larger than a page may be. What is left out, in this order: steps, evenly, to a dozen;
groups, evenly, to one a step; decimals of the tokens' numbers, then these numbers; the ends of long texts; steps again,
to the first and the last one. A sentence tells the reader what that was.
"""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from fastgrpo.page.reading import finite
from fastgrpo.page.sample_file import SampleFile

FEW_STEPS = 12  # further steps go before groups do; these stay until nothing else is left to leave out
CUTS = (20_000, 5_000, 2_000, 500, 200)  # characters that stay of a text
KNOWN = (
    "step", "group", "prompt", "completion", "rewards", "advantage", "finish_reason", "tokens", "clipped",
    "token_ends", "logps", "ratios", "clipped_tokens",
)  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What stays of the samples.

    Attributes:
        steps: Number of steps.
        groups: Largest number of groups of a step.
        decimals: Decimals of the tokens' numbers; None leaves these numbers out.
        cut: Characters that stay of a text; None keeps all.
    """

    steps: int
    groups: int
    decimals: int | None = 4
    cut: int | None = None

    def smaller(self, fitted: int) -> "Plan | None":
        """Plan to keep less."""
        few = min(self.steps, FEW_STEPS)
        cuts = [cut for cut in CUTS if self.cut is None or cut < self.cut]
        if self.steps > few:
            return dataclasses.replace(self, steps=max(few, min(self.steps - 1, int(fitted * 0.95))))
        if self.groups > 1:
            return dataclasses.replace(self, groups=self.groups // 2)
        if self.decimals is not None:
            return dataclasses.replace(self, decimals=2 if self.decimals > 2 else None)
        if cuts:
            return dataclasses.replace(self, cut=cuts[0])
        return dataclasses.replace(self, steps=max(2, self.steps // 2)) if self.steps > 2 else None


def samples_of(folder: Path, budget: int) -> dict[str, Any]:
    """Read what the page shows of a run's samples.jsonl."""
    try:
        with open(folder / "samples.jsonl", "rb") as file:
            return _thinned(SampleFile(file), budget)
    except FileNotFoundError:
        return {"note": "The run has no samples.jsonl.", "steps": []}
    except OSError as error:
        return {"note": f"samples.jsonl cannot be read: {error.strerror}.", "steps": []}


def _thinned(file, budget):
    """Keep as much as fits in."""
    most = max(map(len, file.steps.values()), default=0)
    plan = Plan(len(file.steps), most)
    while plan is not None:
        steps, fitted, unread = _build(file, plan, budget)
        if steps is not None:
            return {"note": " ".join([_kept(file, plan, most, budget), *_troubles(file, unread)]), "steps": steps}
        plan = plan.smaller(fitted)
    nothing = f"No sample fits into the {_size(budget)} that samples may take up in the page."
    return {"note": " ".join([nothing, *_troubles(file, 0)]), "steps": []}


def _build(file, plan, budget):
    """Build the steps of a plan. Returns (steps, None where they are too large; how many fitted; damaged lines)."""
    steps, used, unread = [], 0, 0
    for step in _evenly(list(file.steps), plan.steps):
        groups = []
        for block in _evenly(file.steps[step], plan.groups):
            rows = list(file.read(step, block))
            unread += block.count - len(rows)
            if rows:
                groups.append(_group(block.group, rows, plan))
                used += _bytes(groups[-1])
        used += 30  # of the step itself
        if used > budget:
            return None, len(steps), unread
        if groups:
            steps.append({"step": step, "groups": groups})
    return steps, len(steps), unread


def _evenly(things, count):
    """Choose some of a list, evenly spread, with the first and, where there are two, the last."""
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
        "completions": [_completion(row, plan) for row in rows],
    }


def _prompt(prompt, cut):
    """A text, or a list of messages of two texts each."""
    if not isinstance(prompt, list):
        return _text(prompt, cut)
    return [{"role": _text(_part(turn, "role"), 50), "content": _text(_content(turn), cut)} for turn in prompt]


def _part(turn, name):
    return turn.get(name) if isinstance(turn, dict) else None


def _content(turn):
    """The text of a message. What else a message holds, such as calls of tools, stands behind it as JSON."""
    if not isinstance(turn, dict):
        return turn
    content = turn.get("content")
    more = {name: value for name, value in turn.items() if name not in ("role", "content") and value is not None}
    if not more:
        return content
    return (content if isinstance(content, str) else _json(content) if content else "") + "\n" + _json(more)


def _told(turn):
    """A message of a completion that has several."""
    return f"[{_part(turn, 'role')}]\n{_as_text(_content(turn))}"


def _completion(row, plan):
    completion, rewards = row.get("completion"), row.get("rewards")
    # The tokens' ends count in the one message that a model wrote.
    single = not isinstance(completion, list) or len(completion) == 1
    if isinstance(completion, list):
        turns = (
            completion if single else [f"[{_part(turn, 'role')}]\n{_as_text(_content(turn))}" for turn in completion]
        )
        completion = _content(turns[0]) if single else "\n\n".join(turns)
    rewards = rewards if isinstance(rewards, dict) else {}
    known = {
        "text": _text(completion, plan.cut),
        "rewards": {_text(name, 200): finite(value) for name, value in rewards.items()},
        "advantage": finite(row.get("advantage")),
        "finish_reason": _text(row.get("finish_reason"), 200),
        "tokens": finite(row.get("tokens")),
        "clipped": finite(row.get("clipped")),
        "extras": {_text(name, 200): _plain(value, plan.cut) for name, value in row.items() if name not in KNOWN},
    }
    return known | (_tokens(row, plan.decimals) if single else _tokens({}, None))


def _tokens(row, decimals):
    """The numbers of the tokens: lists of the same length, each None where the line has none that can be used."""
    ends = _numbers(row.get("token_ends"), None)
    details = {"token_ends": None, "logps": None, "ratios": None, "clipped_tokens": None}
    if decimals is None or ends is None or any(a > b for a, b in itertools.pairwise(ends)):
        return details
    details["token_ends"] = ends
    for name in ("logps", "ratios"):
        values = _numbers(row.get(name), decimals)
        details[name] = values if values is not None and len(values) == len(ends) else None
    if details["ratios"] is not None:
        details["clipped_tokens"] = _numbers(row.get("clipped_tokens"), None) or []
    return details


def _numbers(values, decimals):
    """A list of numbers; None where it is none. Without decimals they must be integers that are not negative."""
    if not isinstance(values, list):
        return None
    if decimals is None:
        return values if all(type(value) is int and value >= 0 for value in values) else None
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        return None
    rounded = [round(value, decimals) for value in values]
    return [int(value) if value == int(value) else value for value in rounded]  # "0" is shorter than "-0.0"


def _plain(value, cut):
    """An extra column: a number or a short text as it is, the rest as JSON."""
    if value is None or isinstance(value, bool):
        return value
    return _text(value, cut) if finite(value) is None else value


def _json(value):
    return json.dumps(value, ensure_ascii=False)


def _as_text(value):
    return "" if value is None else value if isinstance(value, str) else _json(value)


def _text(value, cut):
    """A text that UTF-8 can hold, cut with a mark; what is no text is written as JSON."""
    text = _SURROGATE.sub("\ufffd", _as_text(value))
    if cut is None or len(text) <= cut:
        return text
    return f"{text[:cut]} […{len(text) - cut:,} more characters are not in this page]"


def _size(budget):
    return f"{budget / 1e6:,.1f} MB" if budget >= 100_000 else f"{budget:,} bytes"


def _kept(file, plan, most, budget):
    """Tell what is in the page, and what is not."""
    count = len(file.steps)
    if not count:
        return "samples.jsonl holds no samples yet."
    gone = []
    if plan.steps < count:
        gone.append(f"{plan.steps:,} of the {count:,} steps in samples.jsonl, evenly spread")
    if plan.groups < most:
        gone.append(f"at most {plan.groups} of the up to {most} groups of a step")
    if plan.decimals is None:
        gone.append("no numbers of single tokens")
    elif plan.decimals < 4:
        gone.append(f"the numbers of tokens with {plan.decimals} decimals")
    if plan.cut is not None:
        gone.append(f"the first {plan.cut:,} characters of a text")
    if not gone:
        return "All samples in samples.jsonl are in this page."
    listed = gone[0] if len(gone) == 1 else f"{', '.join(gone[:-1])}, and {gone[-1]}"
    return f"Samples may take up {_size(budget)} of this page, so it holds {listed}. The file has the rest."


def _troubles(file, unread):
    """Tell what was wrong with the file."""
    damaged = file.damaged + unread
    if damaged:
        yield f"{damaged:,} damaged {'line is' if damaged == 1 else 'lines are'} left out."
    if file.half:
        yield "The last line is not whole yet and is left out."
    if file.replaced:
        yield f"A resume went back by {len(file.replaced):,} written step(s); what was written last counts."
