"""Make the benchmark tables and pictures from the newest run of each benchmark in results/<device>.jsonl.

    python -m benchmarks.report [folder of results] [page.md ...]

prints a table for every benchmark and device, and writes it between `<!-- bench:NAME -->` and `<!-- /bench -->` on
every page with these markers. NAME is <benchmark>-<device>, such as head-nvidia-h200. benchmarks/README.md has the
markers of all tables. docs/benchmarks.md has the markers of summary-<device>, which compares fastgrpo with others. The
pictures are written to <folder>: overview-<device>.png compares time and memory, NAME.png shows a step by its stages,
or the growth of cost.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import growth
from benchmarks.compare import RESULTS
from benchmarks.harness import in_words

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "benchmarks" / "README.md", ROOT / "docs" / "benchmarks.md")
MINE = "fastgrpo"
LOG_FROM = 20  # ratio of the largest to the smallest value above which bars use a log scale
# Benchmark -> heading of each case in the overview.
OVERVIEW = {
    "pretrained": {"beta 0": "Step of {model}", "beta 0.04": "Step with a reference"},
    "linear_grpo_loss": {"all rows": "Loss, {n:,} tokens"},
    "head": {"all rows": "Loss, {n:,} tokens, D = {d:,}"},
}
# Lines of the summary: benchmark, case, description, and peer.
SUMMARY = (
    ("pretrained", "beta 0", "training step of SmolLM2-135M", "trl"),
    ("pretrained", "beta 0.04", "the same with a reference", "trl"),
    ("step", None, "training step of a {model} model with a reference", "trl"),
    ("head", "all rows", "loss of {n:,} tokens, D = {d:,}, V = {v:,}", "trl"),
    ("linear_grpo_loss", "all rows", "loss of 2,048 tokens, D = 512, V = 32,768", "trl"),
    ("linear_grpo_loss", "all rows", "the same", "full logits"),
    ("linear_grpo_loss", "40% of the rows", "the same, 40% of the tokens active", "trl"),
    ("trl", "completions alone", "head and loss inside TRL's trainer", "trl"),
    ("rollout", "equal", "256 completions of 48 tokens, 0.2M model", "transformers generate"),
    ("rollout", "long-tailed", "256 completions of at most 48 tokens", "transformers generate"),
    ("shared_prompt", "all rows", "8 completions after a prompt of 1,024 tokens", "a prompt each"),
)
NAMES = {
    "trl": "TRL", "full logits": "PyTorch, full logits", "transformers generate": "transformers",
    "a prompt each": "the prompt computed 8 times",
}  # fmt: skip
FLOORS = ("bare products", "one product")  # matrix products without a loss: bounds, not contestants


def newest(path: Path) -> dict[str, list[dict]]:
    """Read a results file, and return the rows of the newest run by benchmark. All rows of a run have one date.

    The parts of first_gpu are separate runs.
    """
    rows, last, found = [json.loads(line) for line in path.read_text().splitlines()], {}, {}
    runs = [(row["benchmark"], row["part"] if "bar" in row else "") for row in rows]
    for run, row in zip(runs, rows, strict=True):
        last[run] = max(last.get(run, ""), row["date"])
    for run, row in zip(runs, rows, strict=True):
        if row["date"] == last[run]:
            found.setdefault(row["benchmark"], []).append(row)
    return found


def machine(device: str, row: dict) -> str:
    """Return the device of a result, with processor and threads on a CPU."""
    where = [row.get("processor", ""), f"{row['threads']} threads" if "threads" in row else ""]
    return f"{device} ({', '.join(filter(None, where))})" if device == "cpu" and any(where) else device


def table(rows: list[dict], device: str) -> str:
    """Format the results of one benchmark, from `newest`, as Markdown.

    The text has a line with machine, commit and date; a table with a line per variant and shape; the missing variants
    with the reason; and a table of the bars. `device` is the name of the results file: cpu, or the GPU's name.
    """
    if "bar" in rows[0]:
        return f"{device}\n\n{bar_table(rows)}"
    first = rows[0]
    cells = growth.lines_of(rows) if "axis" in first else _lines_of([row for row in rows if "missing" not in row])
    lines = [
        f"{machine(device, first)}, commit {first['commit']}, torch {first['torch']}, {first['dtype']}, "
        f"{first['date'][:10]}. Time: median (p20 to p80).",
        "",
        *_rows([cells[0], ["---"] * len(cells[0]), *cells[1:]]),
    ]
    absent = dict.fromkeys((row["variant"], row["missing"]) for row in rows if "missing" in row)
    if absent:
        lines += ["", "Missing: " + "; ".join(f"{variant} ({reason})" for variant, reason in absent) + "."]
    bars = [{"bar": name, **in_words(bar)} for row in rows for name, bar in row.get("bars", {}).items()]
    if bars and "axis" not in first:  # the lines of an axis include its bars
        lines += ["", bar_table(bars)]
    return "\n".join(lines)


def summary(found: dict[str, list[dict]]) -> str:
    """Format the measured lines of `SUMMARY` as Markdown, from the results of one device."""
    lines = [["what", "against", "fastgrpo", "other", "times as fast", "share of memory"], ["---"] * 6]
    for benchmark, case, what, peer in SUMMARY:
        rows = [row for row in found.get(benchmark, []) if row.get("case") == case and _timed(row)]
        ours = [row for row in rows if row["variant"].startswith(MINE) and not _other_call(row)]
        for other in (row for row in rows if row["variant"] == peer):
            same = [row for row in ours if all(row.get(key) == other.get(key) for key in ("model", "n", "d", "v"))]
            mine = min(same, key=lambda row: row["ms_p50"])
            cells = [
                ", ".join(_quantity(key, row[key]) for key in ("ms_p50", "peak_mib") if row.get(key))
                for row in (mine, other)
            ]
            share = f"{mine['peak_mib'] / other['peak_mib']:.2f}" if other.get("peak_mib") else ""
            name = what.format_map(other | {"model": other.get("model", "").upper()})
            lines.append([name, NAMES[peer], *cells, f"{other['ms_p50'] / mine['ms_p50']:.2f}", share])
    return "\n".join(_rows(lines))


def bar_table(rows: list[dict]) -> str:
    """Format bars as Markdown: measured value, limit, and for `make first-gpu` the prediction and the commit.

    If a bar was not measured, "missing" is the reason.
    """
    shown = ["part", "bar", "measured", "predicted", "limit", "met"]
    if "part" not in rows[0]:
        shown = ["bar", "measured", "limit", "met"]
    elif "commit" in rows[0]:  # parts may be of several commits
        shown.append("commit")
    lines = [shown, ["---"] * len(shown)]
    for row in rows:
        told = {key: row.get(key) or "" for key in ("part", "bar", "predicted", "limit", "commit")}
        told |= {"measured": "-", "met": ""}
        if "measured" in row:
            told |= {"measured": format(row["measured"], "g"), "met": "yes" if row["met"] else "no"}
        elif row["missing"]:
            told["measured"] = f"- ({row['missing']})"
        lines.append([told[key] for key in shown])
    return "\n".join(line.replace("\n", " ") for line in _rows(lines))


def _lines_of(measured):
    """Return the cells of the header, and of one line per variant and shape."""
    mine = {}
    for row in measured:
        if row["variant"].partition(",")[0] == MINE and "tolerance" not in row and not _other_call(row):
            mine[_case(row)] = min(row["ms_p50"], mine.get(_case(row), row["ms_p50"]))
    cells = [[of(row, mine) for of in COLUMNS.values()] for row in measured]
    used = [i for i, column in enumerate(zip(*cells, strict=True)) if any(column)]  # drop empty columns
    return [[line[i] for i in used] for line in (list(COLUMNS), *cells)]


def _rows(cells):
    return [f"| {' | '.join(row)} |" for row in cells]


def _case(row):
    return tuple(row.get(key) for key in ("model", "n", "d", "v", "case"))


def _timed(row):
    return "ms_p50" in row


def _forward_only(row):
    return row["variant"].endswith(("forward only", "one product"))


def _other_call(row):
    """Return whether a variant of ours is not the public call with gradients."""
    return _forward_only(row) or "chunks of" in row["variant"]


def _number(key, form):
    return lambda row, mine: "" if row.get(key) is None else format(row[key], form)


# Header of a column -> text for one row; `mine` has the milliseconds of our fastest exact variant by case.
COLUMNS = {
    "model": lambda row, mine: row.get("model", ""),
    "N x D x V": lambda row, mine: f"{row['n']} x {row['d']} x {row['v']}" if "v" in row else "",
    "case": lambda row, mine: row.get("case", ""),
    "variant": lambda row, mine: row["variant"],
    "liger's layers": lambda row, mine: {True: "yes", False: "no"}.get(row.get("liger"), ""),
    "ms": lambda row, mine: f"{row['ms_p50']:.2f} ({row['ms_p20']:.2f} to {row['ms_p80']:.2f})" if _timed(row) else "",
    f"x {MINE}": lambda row, mine: (
        f"{row['ms_p50'] / mine[_case(row)]:.2f}"
        if _timed(row) and _case(row) in mine and not _forward_only(row)
        else ""
    ),
    "kept": _number("kept", ".1%"),
    "dropped, of tau": _number("dropped_of_tolerance", ".3f"),
    "TFLOP/s": _number("tflops", ".3g"),
    "tokens/s": _number("tokens_per_s", ",d"),
    "of the bandwidth limit": _number("of_bandwidth_limit", ".0%"),
    "samples/s": _number("samples_per_s", ".4g"),
    "servers idle": _number("idle", ".0%"),
    "tokens by staleness": lambda row, mine: ", ".join(f"{share:.0%}" for share in row.get("staleness", ())),
    "accuracy": lambda row, mine: (
        "{:.3f} [{:.3f}, {:.3f}]".format(row["accuracy"], *row["ci95"]) if "accuracy" in row else ""
    ),
    "peak MiB": _number("peak_mib", ".0f"),
    "error logp": _number("error_logp", ".1e"),
    "error dH, dW": lambda row, mine: ", ".join(
        f"{row[name]:.1e}" for name in ("error_hidden", "error_weight") if name in row
    ),
}


def fill(text: str, name: str, content: str) -> str:
    """Replace the text of a page between the markers of a table. A page without these is returned unchanged."""
    start, end = f"<!-- bench:{name} -->", "<!-- /bench -->"
    pattern = re.compile(f"({re.escape(start)}\n).*?({re.escape(end)})", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def draw_bars(groups: list[tuple[str, list[dict]]], title: str, path: Path) -> None:
    """Draw time and memory side by side, one bar per contestant and one row of panels per group (heading, results)."""
    heights = [len(rows) + 1 for _, rows in groups]
    figure = _figure(11, 0.5 + 0.37 * sum(heights))
    panels = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    for (heading, rows), line in zip(groups, panels, strict=True):
        names = [NAMES.get(row["variant"], row["variant"]) for row in rows]
        colors = ["#3366cc" if name.startswith(MINE) else "#b0b0b0" for name in names]
        for axis, key, word in zip(line, ("ms_p50", "peak_mib"), ("time", "peak memory"), strict=True):
            values = [row.get(key) or 0 for row in rows]
            bars = axis.barh(range(len(rows)), values, color=colors)
            axis.bar_label(bars, [_quantity(key, value) for value in values], padding=3, fontsize="small")
            is_log = max(values) > LOG_FROM * min(values)
            axis.set_yticks(range(len(rows)), names)
            axis.invert_yaxis()
            if is_log:
                axis.set(xscale="log", xlim=(min(values) / 2, max(values) * 4))
            else:
                axis.set_xlim(0, 1.22 * max(values))
            axis.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
            axis.spines[["top", "right", "bottom"]].set_visible(False)
            axis.set_title(f"{heading}: {word}{' (log scale)' if is_log else ''}", fontsize="small", loc="left")
    figure.suptitle(title, fontsize="medium", color="#555555")
    figure.savefig(path, dpi=100)


def _quantity(key, value):
    """Format milliseconds or MiB with a suitable unit."""
    unit, large = ("ms", "s") if key == "ms_p50" else ("MiB", "GiB")
    if key == "ms_p50" and value >= 1000:
        return f"{value / 1000:#.3g} {large}"
    return f"{value / 1024:#.3g} {large}" if key == "peak_mib" and value >= 1024 else f"{value:.3g} {unit}"


def draw_stages(rows: list[dict], path: Path) -> None:
    """Draw the time of a step, one bar per contestant; bars with `stages_ms` are stacked by stage."""
    chosen = [row for row in rows if "missing" not in row]
    figure = _figure(9, 1 + 0.5 * len(chosen))
    axis = figure.subplots()
    names = [", ".join(filter(None, (NAMES.get(row["variant"], row["variant"]), row.get("case")))) for row in chosen]
    left = [0.0] * len(chosen)
    for i, stage in enumerate(dict.fromkeys(stage for row in chosen for stage in row.get("stages_ms", {}))):
        widths = [row.get("stages_ms", {}).get(stage, 0.0) / 1000 for row in chosen]
        if sum(widths) > 0.005 * sum(row["ms_p50"] / 1000 for row in chosen):
            axis.barh(names, widths, left=left, color=f"C{i}", label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    whole = [0.0 if row.get("stages_ms") else row["ms_p50"] / 1000 for row in chosen]
    axis.barh(names, whole, left=left, color="lightgray", label="whole step")
    axis.invert_yaxis()
    axis.set(xlabel="seconds", title=f"A training step, {chosen[0]['model']}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path, dpi=100)


def _figure(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def overview(found: dict[str, list[dict]]) -> list[tuple[str, list[dict]]]:
    """Return the groups of the overview picture: training steps and the loss against other implementations."""
    groups = []
    for benchmark, what in OVERVIEW.items():
        cases = {}
        for row in found.get(benchmark, []):
            bound = row["variant"] in FLOORS or _other_call(row)
            if "missing" not in row and not bound and row.get("case") in what:
                cases.setdefault((row.get("case"), *_case(row)), []).append(row)
        groups += [(what[case].format(**rows[0]), rows) for (case, *_), rows in cases.items()]
    return groups


def main(folder: str | Path = RESULTS, *pages: str | Path) -> None:
    """Print the tables, write them to the pages (by default `PAGES`), and draw the pictures into the folder."""
    folder, pages = Path(folder), [Path(page) for page in pages or PAGES]
    for path in sorted(folder.glob("*.jsonl")):
        found = newest(path)
        for benchmark, rows in found.items():
            name = f"{benchmark}-{path.stem}"
            print(f"## {name}\n\n{table(rows, path.stem)}\n")
            if "axis" in rows[0]:
                growth.draw(rows, folder / f"{name}.png")
            if any("stages_ms" in row for row in rows):
                draw_stages(rows, folder / f"{name}.png")
            write_table(pages, name, table(rows, path.stem))
        for page in pages:
            _fill_page(page, f"summary-{path.stem}", summary(found))
        if groups := overview(found):
            machines = dict.fromkeys(machine(path.stem, row) for _, rows in groups for row in rows)
            title = f"{', '.join(machines)}, {groups[0][1][0]['dtype']}"
            draw_bars(groups, title, folder / f"overview-{path.stem}.png")


def write_table(pages: Sequence[Path], name: str, markdown: str) -> None:
    """Write a table to the pages between its markers, and tell if no page has them."""
    if not any([_fill_page(page, name, markdown) for page in pages]):
        print(f"No page has this table; add <!-- bench:{name} --> and <!-- /bench --> to one.\n")


def _fill_page(page, name, markdown):
    """Write a table to a page between its markers, and return whether the page has them."""
    before = page.read_text() if page.exists() else ""
    after = fill(before, name, markdown)
    if after != before:
        page.write_text(after)
    return f"<!-- bench:{name} -->" in before


if __name__ == "__main__":
    main(*sys.argv[1:])
