"""The payload of the page equals the content of the run folders, and contains no HTML."""

import json
import random
import re

import pytest
from page_runs import sample, write_run

from fastgrpo.page.payload import POINTS, WARNINGS, headline, kept_of, payload, stretches_of
from fastgrpo.page.reading import find_runs, json_lines, names_of, read_run
from fastgrpo.page.render import SCRIPTS, asset, policy, render
from fastgrpo.run.curves import PANELS
from fastgrpo.run.folder import note


def shown(*folders):
    return payload([read_run(folder, folder.name) for folder in folders], PANELS)


# The folder of a run: whole, going on, stopped in the middle of a line, or with little in it.
def test_a_finished_run_is_read(tmp_path):
    told = [{"step": 3, "text": "the entropy collapses"}, {"step": "x", "text": "no step"}, {"step": 2}]
    folder = write_run(tmp_path / "a", summary={"steps": 4}, warnings=told)
    (folder / "checkpoint-4").mkdir()
    card = "# A\n\n## Versions\n\n- torch: 2.9\n- fastgrpo: 0.1\n\n## Z\n- b\n"
    (folder / "checkpoint-4" / "README.md").write_text(card)
    (folder / "checkpoint-5").mkdir()  # which a stop left without a card
    run = read_run(folder, "a")
    assert run.finished and run.last_step == 4 and run.versions == ["torch 2.9", "fastgrpo 0.1"]
    assert run.warnings == told[:1] and run.config["task"] == "arithmetic"
    assert run.series["reward"] == ([1, 2, 3, 4], [0.125, 0.25, 0.375, 0.5])
    for steps in (3, 5):  # a run that was resumed from its end, or from a checkpoint before it, is not finished
        assert not read_run(write_run(tmp_path / "b", summary={"steps": steps}), "b").finished


def test_reads_runs_with_damaged_files(tmp_path):
    folder, said = write_run(tmp_path / "a"), []
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rewa')
    (folder / "config.json").write_text('{"task": "ar')
    (folder / "summary.json").write_text("[1]")
    (folder / "warnings.jsonl").write_bytes(b'\xff\n{"step": 1, "text": "kept"}\n{"step": 2, "te')
    run = read_run(folder, "a", said.append)
    assert run.last_step == 4 and run.config == run.summary == {} and not run.finished
    assert run.warnings == [{"step": 1, "text": "kept"}] and len(said) == 1
    assert list(json_lines(folder / "missing.jsonl")) == []


def test_folders_become_runs_with_names_that_differ(tmp_path):
    for name in ("sweep", "other"):
        for run in ("b=1e-2", "b=2e-3"):
            write_run(tmp_path / name / run)
        note(tmp_path / name, "sweep.csv")
    found = find_runs([tmp_path / "sweep", tmp_path / "other", tmp_path / "sweep" / "b=1e-2"])
    names = ["sweep/b=2e-3", "sweep/b=1e-2", "other/b=2e-3", "other/b=1e-2"]
    assert found == [tmp_path / name for name in names] and names_of(found) == names
    folders = [tmp_path / "x" / "deep" / "run", tmp_path / "y" / "deep" / "run", tmp_path / "other"]
    assert names_of(folders) == ["x/deep/run", "y/deep/run", "other"]
    write_run(tmp_path / "runs" / "c")
    for folder, remedy in (("missing", "has no metrics.jsonl"), ("runs", "name the runs to show, such as .*runs/c")):
        with pytest.raises(ValueError, match=f"{folder} is not the folder of a run.*{remedy}"):
            find_runs([tmp_path / folder])


def test_the_figures_of_a_finished_run(tmp_path):
    summary = {"steps": 4, "num_tokens": 1_234_000, "wall_seconds": 3_905.2, "peak_memory_gib": 1.256}
    more = {"eval/loss": lambda step: 0.1}  # not that of supervised training
    run = read_run(write_run(tmp_path, summary=summary, evaluated=[(0, 0.3), (2, 0.9), (4, 0.5)], **more), "a")
    values = ["0.300 → 0.500", "0.125 → 0.500", "4", "1.23 million", "1 h 5 min", "1.26 GiB"]
    assert [row["value"] for row in headline(run)] == values


def test_a_long_curve_keeps_its_spikes_and_its_ends():
    values = [random.Random(step).random() for step in range(10_001)]
    values[6_543], values[6_544] = 1000.0, -1000.0
    kept = kept_of(values)
    assert len(kept) <= POINTS and kept == sorted(set(kept)) and {0, 6_543, 6_544, 10_000} <= set(kept)
    assert kept_of([0.5] * POINTS) == list(range(POINTS))  # a short one stays whole


def test_the_mean_of_a_stretch_goes_along_with_its_points():
    values = [float(step % 10 == 0) for step in range(10_000)]
    kept = kept_of(values, 402)
    means, lines = stretches_of(values, kept)
    assert len(means) == len(lines) == len(kept) <= 402 and sum(lines) == 10_000
    assert sum(values[place] for place in kept) / len(kept) > 0.45
    assert sum(mean * count for mean, count in zip(means, lines, strict=True)) == pytest.approx(1_000)
    assert stretches_of([1.0, 3.0, 10.0, 30.0], [0, 1, 3]) == ([1.0, 3.0, 20.0], [1, 1, 2])


def test_a_run_with_its_curves_and_settings(tmp_path):
    warnings = [{"step": 3, "text": "<b>"}]
    folder = write_run(
        tmp_path / "a", summary={"steps": 4}, samples=[sample(1, 0.0), sample(1, 1.0)], warnings=warnings,
        evaluated=[(0, 0.3), (4, 0.5)], config={"beta": 0.1, "model_name_or_path": None, "report_to": ["none"]},
    )  # fmt: skip
    page = shown(folder)
    (run,) = page["runs"]
    assert page["title"] == run["name"] == "a" and page["panels"][0]["metrics"] == ("reward",)
    assert run["axes"] == {"step": [0, 1, 2, 3, 4], "tokens": [0, 100, 200, 300, 400], "seconds": [0, 0.5, 1, 1.5, 2]}
    assert run["series"]["reward"] == {"at": [1, 2, 3, 4], "value": [0.125, 0.25, 0.375, 0.5]}
    assert run["series"]["eval/accuracy"] == {"at": [0, 4], "value": [0.3, 0.5]} and run["note"] == ""
    assert run["warnings"] == warnings and run["finished"] and run["rewards"]["counts"] == [[1, 1]]
    settings = {"beta": "0.1", "task": "arithmetic", "model_name_or_path": "null", "report_to": '["none"]'}
    assert len({run["color"] for run in shown(*[folder] * 30)["runs"]}) == 30
    assert settings.items() <= run["settings"].items() and run["samples"]["steps"][0]["step"] == 1


def test_a_long_run_is_thinned_and_says_so(tmp_path):
    spike = {"grad_norm": lambda step: 1000.0 if step == 2_543 else 1.0 + step % 3}
    stages = {f"time/{name}": lambda step: 0.25 for name in ("rollout", "loss")}
    warnings = [{"step": step, "text": "again"} for step in range(WARNINGS + 7)]
    held_out = {"eval/accuracy": lambda step: step % 7, "eval/accuracy/ci95_low": lambda step: -(step % 5)}
    (run,) = shown(write_run(tmp_path / "a", 4_000, warnings=warnings, **held_out, **spike, **stages))["runs"]
    curve = run["series"]["grad_norm"]
    assert len(curve["at"]) <= POINTS and len(curve["mean"]) == len(curve["lines"]) == len(curve["at"])
    assert run["axes"]["step"][curve["at"][curve["value"].index(1000.0)]] == 2_543
    assert run["series"]["time/rollout"]["at"] == run["series"]["time/loss"]["at"]  # else they cannot be stacked
    assert run["series"]["eval/accuracy/ci95_low"]["at"] == run["series"]["eval/accuracy"]["at"]
    assert run["axes"]["step"][-1] == 4_000 and run["axes"]["seconds"][-1] == 2_000
    assert "at most 2,000 points" in run["note"]
    assert len(run["warnings"]) == WARNINGS + 1 and run["warnings"][-1]["text"].startswith("7 more warnings")


def test_supervised_runs_and_runs_without_a_line_have_no_rewards(tmp_path):
    sft, empty = write_run(tmp_path / "sft", config={"command": "sft"}), write_run(tmp_path / "empty", 0)
    (sft / "samples.jsonl").touch()
    for run in shown(sft, empty)["runs"]:
        assert run["rewards"] is None and run["samples"]["steps"] == []
    assert shown(sft)["runs"][0]["samples"]["note"] == "Supervised training generates no completions."
    assert shown(empty)["runs"][0]["axes"] == {"step": [], "tokens": [], "seconds": []}


# The page: nothing of a run is read as HTML, and nothing is loaded from elsewhere.
TEXTS = ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "&lt;", "\u2028", "@@styles@@", "@@policy@@",
         "@@scripts@@", "\\u003c", "a\u2028b\\ud800"]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_run(
        tmp_path_factory.mktemp("a"), config={"run_name": TEXTS[0]}, warnings=[{"step": 1, "text": "a\ud800b"}],
        samples=[sample(step, 1.0, completion=text) for step, text in enumerate(TEXTS, 1)],
    )  # fmt: skip
    return render(shown(folder) | {"texts": TEXTS})


def test_texts_come_back_and_hold_nothing_that_html_reads(page):
    [held] = re.findall(r'<script id="payload" type="application/json">(.*?)</script>', page, re.DOTALL)
    found = json.loads(held)
    assert found["texts"] == TEXTS and found["runs"][0]["settings"]["run_name"] == TEXTS[0]
    assert not re.search("[<>&\u2028]", held) and page.encode("utf-8")
    assert all(asset(name).strip() in page for name in ("style.css", *SCRIPTS))
    assert policy(page, b"").startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in page
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"title": float("nan")})
