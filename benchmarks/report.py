"""Make the benchmark tables and pictures from results/<device>.jsonl, of each device's newest run.

    python -m benchmarks.report [folder of results] [page.md ...]

prints a table for every benchmark and device, and puts it between `<!-- bench:NAME -->` and `<!-- /bench -->` on every
page that has these markers. Without arguments the pages are README.md and the two of docs/ that begin with
measurements, which have the markers of all tables. NAME is <benchmark>-<device>, as in head-nvidia-h200. The pictures,
time and memory against N and a step by its stages, are written to <folder>/NAME.png.
"""

import json
import re
import sys
from pathlib import Path

from benchmarks import growth
from benchmarks.compare import RESULTS
from benchmarks.harness import in_words

ROOT = Path(__file__).parent.parent
README = "README.md"  # has short tables
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in ("measurements", "measurements-runs")), ROOT / README)
MINE = "fastgrpo"


def newest(path: Path) -> dict[str, list[dict]]:
    """Read the results of the newest run of each benchmark. The results of one run share their date.

    Args:
        path: A results file, one JSON object a line.

    Returns:
        The name of a benchmark -> the results of its newest run.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = {}
    for row in rows:
        last[row["benchmark"]] = max(last.get(row["benchmark"], ""), row["date"])
    return {name: [row for row in rows if row["benchmark"] == name and row["date"] == last[name]] for name in last}


def table(rows: list[dict], device: str, brief: bool = False) -> str:
    """Write the results of one run as Markdown.

    Args:
        rows: The results of one benchmark, as `newest` returns them.
        device: The name of the results file: cpu, or the GPU's name.
        brief: Whether to show the first case alone, and no bars.

    Returns:
        A line that says what ran where and when, a table with a line for each variant and shape, the variants that
        could not run, with the reason, and a table of the bars that the benchmark is held to.
    """
    if brief:
        rows = [row for row in rows if row.get("case") == rows[0].get("case")]
    if "bar" in rows[0]:
        return f"{device}, commit {rows[0]['commit']}, {rows[0]['date'][:10]}.\n\n{bar_table(rows)}"
    first = rows[0]
    cells = growth.lines_of(rows) if "axis" in first else _lines_of([row for row in rows if "missing" not in row])
    where = [first.get("processor", ""), f"{first['threads']} threads" if "threads" in first else ""]
    machine = f"{device} ({', '.join(filter(None, where))})" if device == "cpu" and any(where) else device
    lines = [
        f"{machine}, commit {first['commit']}, torch {first['torch']}, {first['dtype']}, {first['date'][:10]}. "
        "Time: median (p20 to p80).",
        "",
        *_rows([cells[0], ["---"] * len(cells[0]), *cells[1:]]),
    ]
    absent = dict.fromkeys((row["variant"], row["missing"]) for row in rows if "missing" in row)
    if absent:
        lines += ["", "Missing: " + "; ".join(f"{variant} ({reason})" for variant, reason in absent) + "."]
    bars = [{"bar": name, **in_words(bar)} for row in rows for name, bar in row.get("bars", {}).items()]
    if bars and not brief and "axis" not in first:  # there each line tells it
        lines += ["", bar_table(bars)]
    return "\n".join(lines)


def bar_table(rows: list[dict]) -> str:
    """Write bars as Markdown: what was measured, what is wanted, and for `make first-gpu` what was predicted.

    Args:
        rows: One a bar; one without a measurement has the reason as "missing".
    """
    shown = ["part", "bar", "measured", "predicted", "limit", "met"]
    if "part" not in rows[0]:
        shown = ["bar", "measured", "limit", "met"]
    lines = [shown, ["---"] * len(shown)]
    for row in rows:
        told = {key: row.get(key) or "" for key in ("part", "bar", "predicted", "limit")} | {"measured": "-", "met": ""}
        if "measured" in row:
            told |= {"measured": format(row["measured"], "g"), "met": "yes" if row["met"] else "no"}
        elif row["missing"]:
            told["measured"] = f"- ({row['missing']})"
        lines.append([told[key] for key in shown])
    return "\n".join(line.replace("\n", " ") for line in _rows(lines))


def _lines_of(measured):
    """Return the cells of the header, and of a line for each variant and shape."""
    mine = {}
    for row in measured:
        if row["variant"].partition(",")[0] == MINE and "tolerance" not in row:
            mine[_case(row)] = min(row["ms_p50"], mine.get(_case(row), row["ms_p50"]))
    cells = [[of(row, mine) for of in COLUMNS.values()] for row in measured]
    used = [i for i, column in enumerate(zip(*cells, strict=True)) if any(column)]  # no column for what nobody measured
    return [[line[i] for i in used] for line in (list(COLUMNS), *cells)]


def _rows(cells):
    return [f"| {' | '.join(row)} |" for row in cells]


def _case(row):
    return tuple(row.get(key) for key in ("model", "n", "d", "v", "case"))


def _timed(row):
    return "ms_p50" in row


def _number(key, form):
    return lambda row, mine: "" if row.get(key) is None else format(row[key], form)


# Header of a column -> its text for one result; `mine` has the milliseconds of our fastest exact variant in each case.
COLUMNS = {
    "model": lambda row, mine: row.get("model", ""),
    "N x D x V": lambda row, mine: f"{row['n']} x {row['d']} x {row['v']}" if "v" in row else "",
    "case": lambda row, mine: row.get("case", ""),
    "variant": lambda row, mine: row["variant"],
    "liger's layers": lambda row, mine: {True: "yes", False: "no"}.get(row.get("liger"), ""),
    "ms": lambda row, mine: f"{row['ms_p50']:.2f} ({row['ms_p20']:.2f} to {row['ms_p80']:.2f})" if _timed(row) else "",
    f"x {MINE}": lambda row, mine: (
        f"{row['ms_p50'] / mine[_case(row)]:.2f}" if _timed(row) and _case(row) in mine else ""
    ),
    "kept": _number("kept", ".1%"),
    "dropped, of tau": _number("dropped_of_tolerance", ".3f"),
    "TFLOP/s": _number("tflops", ".3g"),
    "tokens/s": _number("tokens_per_s", ",d"),
    "of the bandwidth limit": _number("of_bandwidth_limit", ".0%"),
    "samples/s": _number("samples_per_s", ".4g"),
    "peak MiB": _number("peak_mib", ".0f"),
    "error logp": _number("error_logp", ".1e"),
    "error dH, dW": lambda row, mine: ", ".join(
        f"{row[name]:.1e}" for name in ("error_hidden", "error_weight") if name in row
    ),
}


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers of a table.

    Args:
        text: A page.
        name: The name in the markers.
        content: What shall stand between them.

    Returns:
        The page with the new content, or the page as it was where it has no such markers.
    """
    start, end = f"<!-- bench:{name} -->", "<!-- /bench -->"
    pattern = re.compile(f"({re.escape(start)}\n).*?({re.escape(end)})", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def picture_of_sizes(rows: list[dict], title: str, path: Path) -> None:
    """Draw time (above) and memory (below) against N, a column for each D x V and a line for each variant.

    Args:
        rows: The results of one benchmark. Only those of the case "all rows" are drawn.
        title: The headline.
        path: The PNG file to write.
    """
    plt = _pyplot()
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


def picture_of_steps(rows: list[dict], title: str, path: Path) -> None:
    """Draw the time of a step as a bar for each variant and model; the bars of fastgrpo are stacked by stage.

    Args:
        rows: The results of one benchmark; `stages_ms` holds the milliseconds of each stage.
        title: The headline.
        path: The PNG file to write.
    """
    plt = _pyplot()
    chosen = [row for row in rows if "missing" not in row]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.7 * len(chosen)), layout="constrained")
    names = [", ".join(filter(None, (row["model"], row.get("case"), row["variant"]))) for row in chosen]
    stages = list(dict.fromkeys(stage for row in chosen for stage in row.get("stages_ms", {})))
    left = [0.0] * len(chosen)
    for i, stage in enumerate(stages):
        widths = [row.get("stages_ms", {}).get(stage, 0.0) for row in chosen]
        axis.barh(names, widths, left=left, color=plt.get_cmap("tab10")(i), label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = [
        max(row["ms_p50"] - done, 0.0) if not row.get("stages_ms") else 0.0
        for row, done in zip(chosen, left, strict=True)
    ]
    axis.barh(names, rest, left=left, color="lightgray", label="whole step")
    axis.invert_yaxis()
    axis.set(xlabel="ms a step, median", title=title)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def main(folder: str | Path = RESULTS, *pages: str | Path) -> None:
    """Print the tables, put them between the markers of the pages, and draw the pictures.

    Args:
        folder: The folder of the results files; the pictures go there too.
        pages: Markdown files. Without any, they are those of `PAGES`.
    """
    folder, pages = Path(folder), [Path(page) for page in pages or PAGES]
    for path in sorted(folder.glob("*.jsonl")):
        for benchmark, rows in newest(path).items():
            name = f"{benchmark}-{path.stem}"
            print(f"## {name}\n\n{table(rows, path.stem)}\n")
            if any(row.get("case") == "all rows" for row in rows):
                picture_of_sizes(rows, name, folder / f"{name}.png")
            if "axis" in rows[0]:
                growth.draw(rows, folder / f"{name}.png")
            if any("stages_ms" in row for row in rows):
                picture_of_steps(rows, name, folder / f"{name}.png")
            if not any([_write_table(page, name, table(rows, path.stem, brief=page.name == README)) for page in pages]):
                print(f"No page has this table: it goes between <!-- bench:{name} --> and <!-- /bench -->.\n")


def _write_table(page, name, markdown):
    """Put a table onto a page that has its markers, and return whether it has them."""
    before = page.read_text() if page.exists() else ""
    after = fill(before, name, markdown)
    if after != before:
        page.write_text(after)
    return f"<!-- bench:{name} -->" in before


if __name__ == "__main__":
    main(*sys.argv[1:])
