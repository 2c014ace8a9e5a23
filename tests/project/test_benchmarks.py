"""`compare` measures what it says; all benchmarks run at a small size and write nothing."""

import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from paths import ROOT

from benchmarks import bench_bounded, bench_growth, peers, report
from benchmarks.batches import make_batch
from benchmarks.compare import COMMIT_VARIABLE, SAME_RUN, STARTED_VARIABLE, append, compare, in_turns, rows_of
from benchmarks.variants import bare_products, full_logits


def test_results_have_the_documented_structure():
    results = compare({"a": lambda: None, "b": lambda: torch.ones(10)}, rounds=3)
    assert list(results) == ["a", "b"]
    for result in results.values():
        assert set(result) == {"rounds", "median_s", "p20", "p80", "peak_bytes"} and result["rounds"] == 3
        assert 0 < result["p20"] <= result["median_s"] <= result["p80"]


def test_variants_run_in_turns():
    """One warm-up each, then each round starts with the next one."""
    calls = []
    compare({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_what_takes_part_no_longer_is_not_in_the_results():
    clocks = {"stays": lambda: 1.0, "goes": iter((1.0, None)).__next__, "stays too": lambda: 2.0}
    results = in_turns(clocks, dict.fromkeys(clocks, 0), rounds=5)
    assert {name: result["rounds"] for name, result in results.items()} == {"stays": 5, "stays too": 5}


def test_the_parts_of_a_run_have_its_date_and_commit():
    """The results that the run has written would make each later process name another commit."""
    code = "import json; from benchmarks.compare import rows_of; print(json.dumps(rows_of({}, {'a': ''})))"
    variables = {STARTED_VARIABLE: "2026-02-02T00:00:00+00:00", COMMIT_VARIABLE: "abc"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, check=True
    )
    (row,) = json.loads(done.stdout)
    assert (row["date"], row["commit"]) == ("2026-02-02T00:00:00+00:00", "abc")
    (mine,) = rows_of({}, {"a": ""})
    assert {STARTED_VARIABLE: mine["date"], COMMIT_VARIABLE: mine["commit"]} == SAME_RUN


def test_a_time_budget_ends_the_rounds():
    results = compare({"sleep": lambda: time.sleep(0.02), "none": lambda: None}, rounds=100, seconds=0.05)
    assert 1 <= results["sleep"]["rounds"] == results["none"]["rounds"] <= 4


def test_seconds():
    result = compare({"sleep": lambda: time.sleep(0.02)}, rounds=2)["sleep"]
    assert result["p20"] >= 0.02 and result["median_s"] < 0.2


def allocate_and_leave():
    """At the peak 3,000,000 bytes are alive, 2,000,000 are left."""
    temporary = torch.empty(250_000)
    kept = torch.empty(500_000)
    del temporary
    return kept


def test_peak_memory_of_known_allocations():
    held = torch.empty(10**6)  # alive before: an input

    def one_after_the_other():
        for _ in range(3):
            torch.empty(300_000)

    # NaN-filling would allocate a scalar on the side.
    torch.utils.deterministic.fill_uninitialized_memory = False
    results = compare({"leave": allocate_and_leave, "in turn": one_after_the_other, "nothing": lambda: held}, 1)
    assert results["leave"]["peak_bytes"] == 1_000_000
    assert results["in turn"]["peak_bytes"] == 1_200_000
    assert results["nothing"]["peak_bytes"] == 0


def test_peak_memory_sees_inside_an_operator():
    """logsumexp holds a temporary as large as its input, which no Python-level hook sees."""
    logits = torch.randn(1000, 500)
    peak = compare({"logsumexp": lambda: logits.logsumexp(-1)}, 1)["logsumexp"]["peak_bytes"]
    assert 2_000_000 <= peak <= 2_100_000


@pytest.mark.gpu
def test_peak_memory_and_time_on_cuda():
    def call():
        temporary = torch.empty(2**20, device="cuda")
        kept = torch.empty(2**21, device="cuda")
        del temporary
        return kept

    result = compare({"leave": call}, 3, "cuda")["leave"]
    assert result["peak_bytes"] == 2**22 and 0 < result["median_s"] < 1


def test_rows_are_appended(tmp_path):
    results = {"mine": {"rounds": 5, "median_s": 0.002, "p20": 0.001, "p80": 0.003, "peak_bytes": 3 * 2**20}}
    missing = rows_of({}, {"peer": "not installed"}, benchmark="test", n=4)
    assert [(row["variant"], row["missing"], row["n"]) for row in missing] == [("peer", "not installed", 4)]
    rows = rows_of(results, extras={"mine": {"tflops": 7}}, benchmark="test", n=4)
    assert append(rows, "cpu", tmp_path) == append(rows, "cpu", tmp_path) == tmp_path / "cpu.jsonl"
    lines = (tmp_path / "cpu.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[0]) == json.loads(lines[1]) == rows[0]
    assert rows[0]["rounds"] == 5 and rows[0]["tflops"] == 7
    expected = {"variant": "mine", "ms_p20": 1, "ms_p50": 2, "ms_p80": 3, "peak_mib": 3, "benchmark": "test", "n": 4}
    assert expected.items() <= rows[0].items()
    assert {"commit", "torch", "python", "threads", "date"} <= rows[0].keys()


def results_on_disk():
    return {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """All benchmarks at their small size, in one process: file name -> the extra_info of its tests, and the output."""
    before = results_on_disk()
    path = tmp_path_factory.mktemp("benchmarks") / "report.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, f"--benchmark-json={path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # pytest-benchmark measures nothing in a process of pytest-xdist, and takes any below it for one.
        env={**{k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}, "FASTGRPO_BENCH_SMALL": "1"},
    )
    assert results_on_disk() == before
    infos = {}
    for run in json.loads(path.read_text())["benchmarks"] if path.exists() else ():
        name = run["fullname"].split("::")[0].removeprefix("benchmarks/").removesuffix(".py")
        infos.setdefault(name, []).append(run["extra_info"])
    return infos, result


def infos_of(small, name):
    """The extra_info of every test of a benchmark file."""
    infos, result = small
    assert name in infos and f"FAILED benchmarks/{name}.py" not in result.stdout, result.stdout + result.stderr
    for info in infos[name]:
        assert all(f"missing: {name}: {reason}" in result.stdout for name, reason in info["missing"].items())
        bars = info["bars"]  # of whatever is installed: full logits always, peers where they are
        assert all(set(bar) in ({"value", "at most", "met"}, {"value", "at least", "met"}) for bar in bars.values())
    return infos[name]


def test_every_benchmark_runs_small(small):
    infos, result = small
    assert result.returncode == 0, result.stdout + result.stderr
    assert infos.keys() == {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}


def test_bench_loss(small):
    """The gradients of all variants agree, and peers that are not installed are named."""
    (info,) = infos_of(small, "bench_loss")
    assert any("bare products" in name for name in info["bars"])
    assert any("full logits" in name for name in info["bars"])
    rows = [row for row in info["rows"] if "missing" not in row]
    variants = {row["variant"] for row in rows}
    assert {"fastgrpo", "full logits", "bare products"} <= variants
    assert ("trl" in variants) != ("trl" in info["missing"])
    assert {row["case"] for row in rows} == {"all rows", "40% of the rows"}
    peaks = {(row["variant"], row["case"]): row["peak_mib"] for row in rows}
    logits = 256 * 2048 * 4 / 2**20
    assert logits <= peaks["fastgrpo", "all rows"] < 1.2 * logits  # one chunk: the logits, turned into their gradient
    assert 2.5 * logits < peaks["full logits", "all rows"] < 4 * logits
    assert peaks["fastgrpo", "40% of the rows"] < 0.5 * peaks["fastgrpo", "all rows"]


def test_bench_trl(small):
    """Both trainers have the same gradients, which the benchmark asserts, and each case is measured with both."""
    (info,) = infos_of(small, "bench_trl")
    rows = {(row["variant"], row["case"]): row for row in info["rows"]}
    assert {variant for variant, _ in rows} == {"fastgrpo", "trl"} and len(rows) == 4 == len(info["bars"])
    assert all(row["ms_p50"] > 0 and row["peak_mib"] > 0 and row["n"] == 256 for row in rows.values())
    if not torch.cuda.is_available():
        assert all(bar["met"] for name, bar in info["bars"].items() if name.startswith("peak memory"))


def test_bench_head(small):
    """Every variant computes the same gradients, or is named as missing; the errors are against fp64."""
    infos = infos_of(small, "bench_head")
    assert all(any("full logits" in name for name in info["bars"]) for info in infos)
    assert len(infos) == 2
    peers = {"trl", "liger", "cut-cross-entropy"}
    mine = {"fastgrpo", "fastgrpo, chunks of 64", "fastgrpo, chunks of 128", "fastgrpo, forward only"}
    others = {"full logits", "full logits, compiled", "bare products", "one product"}
    for info in infos:
        measured = [row for row in info["rows"] if "missing" not in row]
        variants = {row["variant"] for row in measured}
        assert mine | others <= variants <= mine | others | peers and peers - variants == set(info["missing"])
        for row in measured:
            assert row["ms_p50"] > 0 and row["tflops"] > 0
            errors = {key: value for key, value in row.items() if key.startswith("error_")}
            assert set(errors) == (
                set()
                if row["variant"] in ("bare products", "one product")
                else {"error_logp"}
                if row["variant"] == "fastgrpo, forward only"
                else {"error_hidden", "error_weight"}
            )
            if torch.cuda.is_available():  # bf16 there
                continue
            assert all(error < 1e-5 for error in errors.values()), row
    cases = {(row["n"], row["case"], row["active_rows"]) for info in infos for row in info["rows"]}
    assert cases == {(256, "all rows", 256), (256, "42% of the rows", 107), (128, "all rows", 128)}


def test_bench_attention(small):
    """Both packings give the same gradients, at 64 + 4 * 15 inputs a group against 4 * 79."""
    infos = infos_of(small, "bench_attention")
    assert [row["case"] for info in infos for row in info["rows"]] == ["all rows"] * 2 + [
        "all rows, layers recomputed"
    ] * 2
    for info in infos:
        assert {row["variant"]: row["tokens"] for row in info["rows"]} == {"fastgrpo": 248, "a prompt each": 632}
        assert all(0 < row["difference"] < 0.05 and row["ms_p50"] > 0 for row in info["rows"])


def test_bench_decode(small):
    """Both model sizes and every filter; without a GPU the Triton kernels are missing by name, and so are the bars."""
    infos = infos_of(small, "bench_decode")
    assert len(infos) == 6
    for info in infos:
        variants = {row["variant"] for row in info["rows"] if "missing" not in row}
        assert variants & {"sdpa", "plain torch"}
        assert ("fastgrpo" in variants) == torch.cuda.is_available() == bool(info["bars"])


def test_bench_dtype(small):
    """Both precisions take steps and draw, and bfloat16's log-probs are off by what its rounding explains."""
    if torch.cuda.is_available():
        pytest.skip("it compares the precisions of a CPU")
    (info,) = infos_of(small, "bench_dtype")
    rows = {row["variant"]: row for row in info["rows"]}
    assert len(rows) == 4 and set(info["bars"]) == {"times float32, step", "times float32, rollout"}
    row = rows["fastgrpo, bfloat16, step"]
    assert 0 < row["error_logp_rounded"] <= row["error_logp_rounded_max"] < 0.05 and row["tokens_per_s"] > 0
    assert "error_logp" not in rows["fastgrpo, float32, step"]


def test_bench_bounded(small):
    """Every tolerance keeps its bound, and a smaller one keeps more columns and errs less."""
    if torch.cuda.is_available():
        pytest.skip("the rows and the bars are those of a CPU")
    infos = infos_of(small, "bench_bounded")
    assert [info["rows"][0]["case"] for info in infos] == list(bench_bounded.CASES)
    for info in infos:
        rows = {row["variant"]: row for row in info["rows"] if "missing" not in row}
        bounded = [rows[bench_bounded.named(tau)] for tau in bench_bounded.TAUS]
        assert all(0 < row["kept"] <= 1 and 0 <= row["dropped_of_tolerance"] <= 1 for row in bounded)
        assert bounded[0]["kept"] < 0.6 and bounded[0]["error_hidden"] > 1e-3
        for coarse, fine in itertools.pairwise(bounded):
            assert coarse["kept"] <= fine["kept"]
            assert all(coarse[error] >= fine[error] for error in ("error_hidden", "error_weight"))
        filtered = rows[bench_bounded.FILTERED]
        assert "ms_p50" not in filtered and filtered["kept"] <= 1 and filtered["error_hidden"] < 0.1
        shown = report.table(info["rows"], "cpu")
        assert "| kept | dropped, of tau |" in shown and "| fastgrpo |" in shown
        assert "Missing: cut" not in shown and " | 1.00 | " in next(
            x for x in shown.splitlines() if "| fastgrpo |" in x
        )


def test_the_filter_leaves_out_what_cut_cross_entropy_does():
    """Of 256 tokens over 256 entries, tiles without an entry of softmax - onehot at the threshold add nothing."""
    batch = make_batch(256, 16, 256, length=64, dtype=torch.float32, device="cpu")
    exact = full_logits(batch)
    (dh, dw), kept = peers.filtered_gradients(batch)
    assert kept == 1
    for mine, theirs in zip((dh, dw), exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-7)
    weight = batch.weight.detach().clone()
    weight[:128], batch.hidden.data[:] = -20, batch.hidden.data.abs() + 0.1  # never drawn, and last in the order
    targets = batch.targets % 128 + 128
    rare = batch._replace(weight=weight.requires_grad_(), targets=targets, old_logps=batch.old_logps)
    (_, dw), kept = peers.filtered_gradients(rare)
    assert kept == 0.5 and not dw[:128].any() and dw[128:].any()


def test_bare_products_are_in_the_dtype_of_the_weight():
    """An fp32 dW would take twice the bytes to write, and flatter the head that is compared to it."""
    batch = make_batch(8, 4, 16, length=4, dtype=torch.bfloat16, device="cpu")
    dh, dw = bare_products(batch)
    assert dh.dtype == dw.dtype == torch.bfloat16 and dh.shape == batch.hidden.shape and dw.shape == batch.weight.shape


def test_bench_rollout(small):
    """Equal lengths and long-tailed ones, the engine's two CPU providers against transformers."""
    (info,) = infos_of(small, "bench_rollout")
    variants = ["fastgrpo, sdpa", "fastgrpo, products", "transformers generate"]
    assert [(row["case"], row["variant"]) for row in info["rows"]] == [
        (case, variant) for case in ("equal", "long-tailed") for variant in variants
    ]
    assert all(row["tokens_per_s"] > 0 for row in info["rows"])
    assert all(name.startswith("times transformers generate, ") for name in info["bars"]) and len(info["bars"]) == 2


def test_bench_step(small):
    """A step's stages are told; TRL is there, or named as missing."""
    (info,) = infos_of(small, "bench_step")
    ours, trl = info["rows"]
    assert ours["variant"] == "fastgrpo" and trl["variant"] == "trl"
    assert {"rollout", "reward", "reference", "forward", "loss", "backward"} < set(ours["stages_ms"])
    assert ("missing" in trl) == (not info["bars"])


def test_bench_pretrained(small):
    """The memory is that of the whole process, for both trainers."""
    (info,) = infos_of(small, "bench_pretrained")
    ours, trl = info["rows"]
    assert ours["peak_mib"] > 100 and sum(ours["stages_ms"].values()) < 1.5 * ours["ms_p80"]
    assert ("missing" in trl) == (not info["bars"]) and all(name.endswith("beta 0.04") for name in info["bars"])


def test_bench_busy(small):
    """Each variant has its own threads, on quiet cores and beside another process."""
    (info,) = infos_of(small, "bench_busy")
    assert [(row["case"], row["variant"]) for row in info["rows"]] == [
        (case, variant) for case in ("quiet", "beside another process")
        for variant in ("fastgrpo", "fastgrpo, sleeping", "fastgrpo, 1 thread")
    ]  # fmt: skip
    assert len(info["bars"]) == 2


def test_bench_growth(small):
    """Every axis has a row for each size, and a bar for time and for memory."""
    if torch.cuda.is_available():
        pytest.skip("it measures a CPU")
    infos = infos_of(small, "bench_growth")
    assert [(info["rows"][0]["part"], info["rows"][0]["axis"]) for info in infos] == [
        (axis.part, axis.name) for axis in bench_growth.AXES
    ]
    for info in infos:
        assert [row["size"] for row in info["rows"]] == [8, 16] and len(info["bars"]) == 2
        assert all(row["peak_mib"] > 0 for row in info["rows"])
