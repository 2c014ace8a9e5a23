"""What the page gets to show is what the folders of the runs hold, thinned where they hold much."""

import json

from page_runs import sample, write_run

from fastgrpo.page.payload import FEWEST, POINTS, WARNINGS, payload, text_of
from fastgrpo.page.reading import read_run
from fastgrpo.page.render import render
from fastgrpo.run.curves import PANELS, Panel


def shown(*folders):
    return payload([read_run(folder, folder.name) for folder in folders], PANELS)


def test_a_run_with_its_curves_and_settings(tmp_path):
    rows = [sample(1, 0.0), sample(1, 1.0)]
    warnings = [{"step": 3, "text": "<b>"}]
    folder = write_run(
        tmp_path / "a", summary={"steps": 4}, samples=rows, warnings=warnings, evaluated=[(0, 0.3), (4, 0.5)],
        config={"beta": 0.1, "model_name_or_path": None, "report_to": ["none"]},
    )  # fmt: skip
    page = shown(folder)
    (run,) = page["runs"]
    assert page["title"] == run["name"] == "a" and page["panels"][0]["metrics"] == ("reward",)
    assert run["axes"] == {"step": [0, 1, 2, 3, 4], "tokens": [0, 100, 200, 300, 400], "seconds": [0, 0.5, 1, 1.5, 2]}
    assert run["series"]["reward"] == {"at": [1, 2, 3, 4], "value": [0.125, 0.25, 0.375, 0.5]}
    assert run["series"]["eval/accuracy"] == {"at": [0, 4], "value": [0.3, 0.5]} and run["note"] == ""
    assert run["warnings"] == warnings and run["finished"] and run["rewards"]["counts"] == [[1, 1]]
    assert run["settings"]["beta"] == "0.1" and run["settings"]["task"] == "arithmetic"
    assert run["settings"]["model_name_or_path"] == "null" and run["settings"]["report_to"] == '["none"]'
    assert run["samples"]["steps"][0]["step"] == 1


def test_a_long_run_is_thinned_and_says_so(tmp_path):
    spike = {"grad_norm": lambda step: 1000.0 if step == 6_543 else 1.0 + step % 3}
    stages = {f"time/{name}": lambda step: 0.25 for name in ("rollout", "loss")}
    (run,) = shown(write_run(tmp_path / "a", 10_000, **spike, **stages))["runs"]
    curve = run["series"]["grad_norm"]
    assert len(curve["at"]) <= POINTS and len(curve["mean"]) == len(curve["lines"]) == len(curve["at"])
    assert sum(curve["lines"]) == 10_000
    assert run["axes"]["step"][curve["at"][curve["value"].index(1000.0)]] == 6_543
    assert run["series"]["time/rollout"]["at"] == run["series"]["time/loss"]["at"]  # else they cannot be stacked
    assert run["axes"]["step"][-1] == 10_000 and run["axes"]["seconds"][-1] == 5_000
    assert "at most 2,000 points" in run["note"]


def test_many_runs_share_the_room_of_a_page(tmp_path):
    folder = write_run(tmp_path / "a", 1_000)
    page = payload([read_run(folder, "a")] * 20, PANELS)
    assert page["title"] == "20 runs" and len({run["color"] for run in page["runs"]}) == 10
    assert all(len(run["series"]["reward"]["at"]) <= FEWEST for run in page["runs"])


def test_every_page_shows_lengths_and_spread(tmp_path):
    """The panels of a task may leave them out, and are not shown twice where they do not."""
    run, own = read_run(write_run(tmp_path / "a"), "a"), Panel("Own", "unit", ("own",))
    titles = ["Own", "Completion length", "Groups with spread"]
    assert [panel["title"] for panel in payload([run], [own])["panels"]] == titles
    assert len(payload([run], PANELS)["panels"]) == len(PANELS)


def test_supervised_runs_and_runs_without_a_line_have_no_rewards(tmp_path):
    sft = write_run(tmp_path / "sft", config={"command": "sft"})
    (sft / "samples.jsonl").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    for run in shown(sft, empty)["runs"]:
        assert run["rewards"] is None and run["samples"]["steps"] == []
    assert shown(empty)["runs"][0]["axes"] == {"step": [], "tokens": [], "seconds": []}


def test_warnings_without_end_are_cut_and_counted(tmp_path):
    warnings = [{"step": step, "text": "again"} for step in range(WARNINGS + 7)]
    (run,) = shown(write_run(tmp_path / "a", warnings=warnings))["runs"]
    assert len(run["warnings"]) == WARNINGS + 1
    assert run["warnings"][-1] == {"step": WARNINGS + 6, "text": "7 more warnings are in warnings.jsonl"}


def test_a_page_of_500_steps_with_large_samples_stays_below_15_mb(tmp_path):
    text = "a rather long completion of a model that thinks aloud " * 20
    rows = [sample(step, i % 2, i // 8, f"{text}{step} {i}") for step in range(1, 501) for i in range(16)]
    metrics = {f"metric/{i}": lambda step, i=i: (step * 0.7310585 + i) % 1 for i in range(60)}
    page = render(shown(write_run(tmp_path / "a", 500, samples=rows, **metrics)))
    assert 5_000_000 < len(page.encode()) < 15_000_000


def test_nothing_of_a_run_is_read_as_html(tmp_path):
    bad = "</script><script>alert(1)</script>"
    folder = write_run(
        tmp_path / "a", config={"run_name": bad}, samples=[sample(1, 1.0, completion=bad)],
        warnings=[{"step": 1, "text": bad}],
    )  # fmt: skip
    page = render(shown(folder))
    assert bad not in page and "alert(1)" in page
    inside = page.split('type="application/json">')[1].split("</script>")[0]
    found = json.loads(inside)
    assert found["runs"][0]["warnings"][0]["text"] == found["runs"][0]["settings"]["run_name"] == bad


def test_settings_are_written_as_text():
    assert [text_of(value) for value in ("a", None, True, 1e-05, ["ü"])] == ["a", "null", "true", "1e-05", '["ü"]']
