"""results/<device>.jsonl -> Markdown tables and a picture (time and memory against N) of each device's newest run.

    python -m benchmarks.report [folder of results] [README.md]

prints a table for every benchmark and device, puts it between `<!-- bench:NAME -->` and `<!-- /bench -->` of the
README where those markers stand, and draws <folder>/NAME.png. NAME is <benchmark>-<device>, as in head-nvidia-h200.
"""

import json
import re
import sys
from pathlib import Path

from benchmarks.compare import RESULTS

README = Path(__file__).parent.parent / "README.md"
MINE = "fastgrpo"


def newest(path):
    """benchmark -> the rows of its last run in a results file; the rows of one run share their date."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = {}
    for row in rows:
        last[row["benchmark"]] = max(last.get(row["benchmark"], ""), row["date"])
    return {name: [row for row in rows if row["benchmark"] == name and row["date"] == last[name]] for name in last}


def table(rows, device):
    """Markdown: what ran where, one line a variant and shape, and the variants that are missing with the reason."""
    first = rows[0]
    lines = [
        f"{device}, commit {first['commit']}, torch {first['torch']}, {first['dtype']}, {first['date'][:10]}. "
        "Time: median (p20 to p80).",
        "",
        f"| N x D x V | rows | variant | ms | x {MINE} | TFLOP/s | peak MiB | error logp | error dH, dW |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    measured = [row for row in rows if "missing" not in row]
    mine = {_case(row): row["ms_p50"] for row in measured if row["variant"] == MINE}
    for row in measured:
        ratio = f"{row['ms_p50'] / mine[_case(row)]:.2f}" if _case(row) in mine else ""
        errors = ", ".join(f"{row[name]:.1e}" for name in ("error_hidden", "error_weight") if name in row)
        cells = [
            f"{row['n']} x {row['d']} x {row['v']}",
            row["case"],
            row["variant"],
            f"{row['ms_p50']:.2f} ({row['ms_p20']:.2f} to {row['ms_p80']:.2f})",
            ratio,
            f"{row['tflops']:.3g}" if "tflops" in row else "",
            f"{row['peak_mib']:.0f}",
            f"{row['error_logp']:.1e}" if "error_logp" in row else "",
            errors,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    absent = dict.fromkeys((row["variant"], row["missing"]) for row in rows if "missing" in row)
    if absent:
        lines += ["", "Missing: " + "; ".join(f"{variant} ({reason})" for variant, reason in absent) + "."]
    return "\n".join(lines)


def _case(row):
    return row["n"], row["d"], row["v"], row["case"]


def fill(text, name, content):
    """`text` with what stands between the markers of `name` replaced; as it was where there are none."""
    start, end = f"<!-- bench:{name} -->", "<!-- /bench -->"
    pattern = re.compile(f"({re.escape(start)}\n).*?({re.escape(end)})", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def picture(rows, title, path):
    """Time above, memory below, against N with all rows active: a column for each D x V, a line for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if "missing" not in row and row["case"] == "all rows"]
    heads = sorted({(row["d"], row["v"]) for row in chosen})
    variants = list(dict.fromkeys(row["variant"] for row in chosen))
    figure, axes = plt.subplots(2, len(heads), figsize=(4 * len(heads) + 3, 7), squeeze=False, layout="constrained")
    for column, head in enumerate(heads):
        for line, (key, label) in enumerate((("ms_p50", "ms, median"), ("peak_mib", "peak MiB"))):
            axis = axes[line, column]
            for i, variant in enumerate(variants):
                points = sorted(
                    (row["n"], row[key]) for row in chosen if row["variant"] == variant and (row["d"], row["v"]) == head
                )
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", color=plt.get_cmap("tab20")(i), label=variant)
            axis.set(xlabel="N", ylabel=label, title=f"D = {head[0]}, V = {head[1]}", xlim=(0, None), ylim=(0, None))
    found = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found, loc="outside right upper", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(folder=RESULTS, readme=README):
    """Tables to stdout and into the README's markers, pictures into the folder."""
    folder, readme = Path(folder), Path(readme)
    for path in sorted(folder.glob("*.jsonl")):
        for benchmark, rows in newest(path).items():
            name = f"{benchmark}-{path.stem}"
            markdown = table(rows, path.stem)
            print(f"## {name}\n\n{markdown}\n")
            picture(rows, name, folder / f"{name}.png")
            if readme.exists():
                before = readme.read_text()
                after = fill(before, name, markdown)
                if after != before:
                    readme.write_text(after)


if __name__ == "__main__":
    main(*sys.argv[1:])
