"""Compares training with a bounded backward of the head to training with the exact one, from their metrics.

    python -m benchmarks.bounded_training [exact/metrics.jsonl bounded/metrics.jsonl picture.png]

prints a table of the held-out accuracies, and draws reward and accuracy of both runs and the share of the vocabulary
that the bounded run keeps. The default runs are those of `make real` and `make real-bounded` in benchmarks/results/.
"""

import json
import sys
from pathlib import Path

from benchmarks.compare import RESULTS

EXACT = RESULTS / "smollm2-135m" / "metrics.jsonl"
BOUNDED = RESULTS / "smollm2-135m-bounded" / "metrics.jsonl"
NAMES = ("exact", "bounded")


def evaluations(rows: list[dict]) -> dict[int, tuple[float, float, float]]:
    """Return (accuracy, low, high) of each evaluation by step: the held-out accuracy with its 95% interval."""
    keys = ("eval/accuracy", "eval/accuracy/ci95_low", "eval/accuracy/ci95_high")
    return {row["step"]: tuple(row[key] for key in keys) for row in rows if keys[0] in row}


def table(runs: dict[str, list[dict]]) -> str:
    """Format the held-out accuracies as Markdown."""
    found = {name: evaluations(rows) for name, rows in runs.items()}
    steps = sorted(set.intersection(*(set(of) for of in found.values())))
    kept = [row["head/kept_columns"] for row in runs["bounded"] if "head/kept_columns" in row]
    lines = ["| held-out accuracy (95% interval) | " + " | ".join(f"step {step}" for step in steps) + " |"]
    lines.append("|---" * (1 + len(steps)) + "|")
    for name, of in found.items():
        cells = ("{:.3f} ({:.2f} to {:.2f})".format(*of[step]) for step in steps)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    mean = sum(kept) / len(kept)
    lines += ["", f"Columns kept: {mean:.2f} of the vocabulary, {min(kept):.2f} to {max(kept):.2f} in a step."]
    return "\n".join(lines)


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw the curves of the runs to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    reward, accuracy, kept = figure.subplots(1, 3)
    for name, rows in runs.items():
        color = f"C{NAMES.index(name)}"
        steps, values = zip(*((row["step"], row["reward"]) for row in rows if "reward" in row), strict=True)
        reward.plot(steps, values, color, alpha=0.25)
        window = [sum(values[max(0, i - 4) : i + 5]) / len(values[max(0, i - 4) : i + 5]) for i in range(len(values))]
        reward.plot(steps, window, color, label=name)
        measured = evaluations(rows)
        centre, low, high = zip(*measured.values(), strict=True)
        errors = [[c - a for c, a in zip(centre, low, strict=True)], [b - c for c, b in zip(centre, high, strict=True)]]
        accuracy.errorbar(list(measured), centre, errors, color=color, marker="o", capsize=4, label=name)
    steps, shares = zip(
        *((row["step"], row["head/kept_columns"]) for row in runs["bounded"] if "head/kept_columns" in row), strict=True
    )
    kept.plot(steps, shares, "C1")
    kept.set_ylim(0, 1)
    for axes, title in ((reward, "reward (mean of 9 points)"), (accuracy, "held-out accuracy, 95% interval"),
                        (kept, "share of the vocabulary kept, bounded")):  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    reward.legend()
    accuracy.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    """Print the table and draw the picture; the arguments are two metrics.jsonl and the picture, or none."""
    exact, bounded, picture = map(Path, arguments or (EXACT, BOUNDED, BOUNDED.with_name("curves.png")))
    lines = (path.read_text().splitlines() for path in (exact, bounded))
    runs = {name: [json.loads(line) for line in of] for name, of in zip(NAMES, lines, strict=True)}
    print(table(runs))
    draw(runs, picture)


if __name__ == "__main__":
    main(sys.argv[1:])
