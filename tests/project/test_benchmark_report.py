"""The report reads results, writes tables with their bars, and draws pictures; pages show what is measured."""

import json

import pytest
from paths import ROOT

from benchmarks import bounded_training, growth, report
from benchmarks.harness import at_least, at_most


def test_the_page_has_the_table_of_both_trainings(tmp_path, capsys):
    picture = tmp_path / "curves.png"
    bounded_training.main([str(bounded_training.EXACT), str(bounded_training.BOUNDED), str(picture)])
    table, _, kept = capsys.readouterr().out.strip().rpartition("\n\n")
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert table in page and kept.startswith("Columns kept: 0.27 of the vocabulary, 0.17 to 0.48")
    assert "kept 27% of the vocabulary, 17% to 48% in a step" in page and picture.stat().st_size > 10_000


def made_up_rows():
    """Two runs of one benchmark; the newer has a missing peer."""
    common = {"commit": "abc", "torch": "2.13", "benchmark": "head", "dtype": "bfloat16", "d": 8, "v": 32}
    figures = {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 3.0, "peak_mib": 10.0}
    newer = {**common, "date": "2026-02-02T00:00:00", "case": "all rows", "n": 64}
    return [
        {**newer, **figures, "date": "2026-01-01T00:00:00", "variant": "stale"},
        {**newer, **figures, "variant": "fastgrpo", "tflops": 612.3, "error_hidden": 1e-3, "error_weight": 2e-3},
        {**newer, **figures, "variant": "fastgrpo", "n": 128, "ms_p50": 4.0},
        {**newer, **figures, "variant": "peer", "ms_p50": 5.0, "error_logp": 3e-6},
        {**newer, **figures, "variant": "peer", "case": "42% of the rows"},
        {**newer, "variant": "gone", "missing": "not installed"},
    ]


def test_report(tmp_path, capsys):
    (tmp_path / "some-gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made_up_rows()))
    readme = tmp_path / "README.md"
    other = "<!-- bench:head-other -->\nkept\n<!-- /bench -->\n"
    readme.write_text(f"above\n<!-- bench:head-some-gpu -->\nold\n<!-- /bench -->\nbetween\n{other}below\n")
    report.main(tmp_path, readme)
    out = capsys.readouterr().out
    assert "| 64 x 8 x 32 | all rows | fastgrpo | 2.00 (1.00 to 3.00) | 1.00 | 612 | 10 |  | 1.0e-03, 2.0e-03 |" in out
    assert "| 64 x 8 x 32 | all rows | peer | 5.00 (1.00 to 3.00) | 2.50 |  | 10 | 3.0e-06 |  |" in out
    assert "| 64 x 8 x 32 | 42% of the rows | peer | 2.00 (1.00 to 3.00) |  |" in out
    assert "Missing: gone (not installed)." in out and "stale" not in out
    text = readme.read_text()
    assert text.startswith("above\n<!-- bench:head-some-gpu -->\nsome-gpu, commit abc") and "old\n" not in text
    assert text.endswith(f"Missing: gone (not installed).\n<!-- /bench -->\nbetween\n{other}below\n")
    assert (tmp_path / "overview-some-gpu.png").read_bytes().startswith(b"\x89PNG")
    report.main(tmp_path, readme)
    assert readme.read_text() == text


def test_report_of_steps_and_rollouts(tmp_path, capsys):
    """Only the columns that somebody measured; the fastest of our variants is the one that others are compared to."""
    common = {"commit": "abc", "torch": "2.13", "dtype": "float32", "date": "2026-02-02T00:00:00", "model": "tiny"}
    times = {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 3.0}
    stages = {"rollout": 1.2, "backward": 0.8}
    rows = [
        {**common, **times, "benchmark": "step", "variant": "fastgrpo", "samples_per_s": 500.0, "peak_mib": 3.0,
         "stages_ms": stages, "processor": "a CPU", "threads": 2,
         "bars": {"fast": at_least(3.0, 1.5), "small": at_most(0.7, 0.5)}},
        {**common, **times, "benchmark": "step", "variant": "trl", "ms_p50": 6.0, "samples_per_s": 170.0,
         "peak_mib": None},
        {**common, **times, "benchmark": "rollout", "case": "equal", "variant": "fastgrpo, a", "tokens_per_s": 1200},
        {**common, **times, "benchmark": "rollout", "case": "equal", "variant": "fastgrpo, b", "ms_p50": 1.0,
         "tokens_per_s": 2400},
    ]  # fmt: skip
    (tmp_path / "cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages = tmp_path / "page.md", tmp_path / "README.md"
    for page in pages:
        page.write_text("<!-- bench:step-cpu -->\n<!-- /bench -->\n<!-- bench:rollout-cpu -->\n<!-- /bench -->\n")
    report.main(tmp_path, *pages)
    out = capsys.readouterr().out
    assert "cpu (a CPU, 2 threads), commit abc" in out and "| fast | 3 | at least 1.5 | yes |" in out
    assert all("| small | 0.7 | at most 0.5 | no |" in page.read_text() for page in pages)
    assert "| model | variant | ms | x fastgrpo | samples/s | peak MiB |" in out
    assert "| tiny | trl | 6.00 (1.00 to 3.00) | 3.00 | 170 |  |" in out
    assert "| model | case | variant | ms | x fastgrpo | tokens/s |" in out
    assert "| tiny | equal | fastgrpo, a | 2.00 (1.00 to 3.00) | 2.00 | 1,200 |" in out
    assert (tmp_path / "step-cpu.png").exists() and not (tmp_path / "rollout-cpu.png").exists()


def test_report_reads_the_results_that_are_kept():
    for path in (ROOT / "benchmarks" / "results").glob("*.jsonl"):
        for rows in report.newest(path).values():
            assert report.table(rows, path.stem).count("\n") >= 4


def test_the_page_shows_the_predictions():
    from benchmarks import predictions

    page = (ROOT / "benchmarks" / "README.md").read_text()
    shown = page.partition("<!-- predictions -->\n")[2].partition("<!-- /predictions -->")[0]
    assert shown == predictions.table() + "\n", (
        "python -m benchmarks.predictions prints the table for benchmarks/README.md"
    )
    for shape in predictions.SHAPES[:3]:
        head, forward = predictions.predicted(shape.d)
        assert head < shape.step_bar and forward < shape.forward_bar


def grown():
    """Rows of two axes: time grows as the size to the power of 1.5 beside a fixed cost, memory not at all."""
    common = {"commit": "abc", "torch": "2.13", "dtype": "float32", "date": "2026-02-02T00:00:00", "threads": 2,
              "benchmark": "growth", "variant": "fastgrpo", "part": "head", "fixed": "V = 9", "peak_mib": 7.0,
              "expected": {"time": 1.5, "memory": 0}, "bars": {"time": at_most(1.5, 1.65)}}  # fmt: skip
    return [
        {**common, "axis": axis, "size": size, "ms_p50": 8 + size**1.5}
        for axis in ("N", "V") for size in (1, 64, 4096, 16_384)
    ]  # fmt: skip


def test_exponents():
    rows = growth.axes_of(grown())[0]
    assert growth.last_exponent(rows, "ms_p50") == pytest.approx(1.5, abs=1e-4)
    assert 1.2 < growth.exponent(rows, "ms_p50") < 1.4  # the fixed cost hides a part of it
    assert growth.last_exponent(rows, "peak_mib") == growth.exponent(rows, "peak_mib") == 0


def test_report_of_growth(tmp_path, capsys):
    (tmp_path / "cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in grown()))
    report.main(tmp_path, tmp_path / "README.md")
    out = capsys.readouterr().out
    assert out.count("| head | ") == 2
    assert "| 9 to 2.097e+06 | 1.29, 1.50 | 1.5 | 7 to 7 | 0.00, 0.00 | 0 | yes |" in out
    assert (tmp_path / "growth-cpu.png").read_bytes().startswith(b"\x89PNG")
