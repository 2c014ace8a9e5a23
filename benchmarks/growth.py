"""Table and picture of bench_growth.py: time and memory over each size, and the exponents of their growth."""

import math
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
LARGE_END = 4  # the large end is sizes of at least the largest divided by this
MEASURED = {"ms_p50": ("time", "ms, median"), "peak_mib": ("memory", "peak MiB")}


def last_exponent(rows: Rows, key: str) -> float:
    """Return the exponent of growth of "ms_p50" or "peak_mib" over sizes of at least a quarter of the largest."""
    return exponent([row for row in rows if row["size"] * LARGE_END >= rows[-1]["size"]], key)


def exponent(rows: Rows, key: str) -> float:
    """Return the exponent of growth, by least squares of the logarithms over at least two sizes."""
    points = [(math.log(row["size"]), math.log(row[key])) for row in rows]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def axes_of(rows: Rows) -> list[Rows]:
    """Group the rows of one run by axis, in order of measurement, with increasing sizes."""
    found = {}
    for row in rows:
        found.setdefault((row["part"], row["axis"]), []).append(row)
    return [sorted(of, key=lambda row: row["size"]) for of in found.values()]


def lines_of(rows: Rows) -> list[list[str]]:
    """Return the cells of the table: the header, and a line per axis. The first row of each axis has its bars."""
    lines = [["part", "grows", "fixed", "from, to"]]
    for word, unit in (("time", "ms"), ("memory", "MiB")):
        lines[0] += [unit, f"exponent of {word}: all, large end", "needed"]
    lines[0].append("met")
    for axis in axes_of(rows):
        first, last = axis[0], axis[-1]
        cells = [first["part"], first["axis"], first["fixed"], f"{first['size']:,} to {last['size']:,}"]
        for key, (word, _) in MEASURED.items():
            cells.append(f"{first[key]:.3g} to {last[key]:.4g}")
            cells.append(f"{exponent(axis, key):.2f}, {last_exponent(axis, key):.2f}")
            cells.append(f"{first['expected'][word]:g}")
        cells.append("yes" if all(bar["met"] for bar in first["bars"].values()) else "no")
        lines.append(cells)
    return lines


def draw(rows: Rows, path: Path) -> None:
    """Draw time (top) and memory (bottom) over each size, both logarithmic, with the allowed slope, to a PNG file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = axes_of(rows)
    figure = Figure(figsize=(3 * len(axes), 6), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        sizes = [row["size"] for row in axis]
        for line, (key, (word, label)) in enumerate(MEASURED.items()):
            panel, power = panels[line, column], axis[0]["expected"][word]
            panel.plot(sizes, [row[key] for row in axis], marker="o", color=f"C{line}")
            allowed = [axis[-1][key] * (size / sizes[-1]) ** power for size in sizes]
            panel.plot(sizes, allowed, linestyle="--", color="gray", label=f"exponent {power:g}")
            panel.set(xscale="log", yscale="log")
            panel.set_xticks([sizes[0], sizes[-1]], [f"{sizes[0]:,}", f"{sizes[-1]:,}"])
            panel.set_xticks([], minor=True)
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
            if line == 0:
                panel.set_title(f"{axis[0]['part']}: {axis[0]['axis']}", fontsize=10)
            if column == 0:
                panel.set_ylabel(label)
    figure.savefig(path, dpi=110)
