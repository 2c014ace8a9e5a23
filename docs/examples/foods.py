"""Preference pairs about the foods of the pizza task: people prefer the foods that `FOODS` lists later.

Run in a folder, it writes pairs.jsonl, with a pair per person and two foods, and prompts.jsonl.
"""

import itertools
import json
from pathlib import Path

from fastgrpo.tasks.pizza import FOODS, NAMES


def rank(completions, **columns):
    """Measure the true preference for a food, from 0; -1 for another text."""
    return [float(FOODS.index(text[:-1])) if text[:-1] in FOODS else -1.0 for text in completions]


if __name__ == "__main__":
    prompts = [{"prompt": f"{name} likes "} for name in NAMES]
    pairs = [
        {**row, "chosen": f"{better}.", "rejected": f"{worse}."}
        for row in prompts
        for worse, better in itertools.combinations(FOODS, 2)
    ]
    for name, rows in {"pairs": pairs, "prompts": prompts}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
