"""The figures at the top of the page are those of the run's files."""

from page_runs import write_run

from fastgrpo.page.payload import about, cumulative_seconds, duration, headline, number
from fastgrpo.page.reading import read_run


def figures(run):
    return {row["label"]: (row["value"], row["detail"]) for row in headline(run)}


def test_a_finished_run(tmp_path):
    summary = {"steps": 4, "num_tokens": 1_234_000, "wall_seconds": 3_905.2, "peak_memory_gib": 1.256}
    folder = write_run(tmp_path, summary=summary, evaluated=[(0, 0.3), (2, 0.9), (4, 0.5)])
    assert figures(read_run(folder, "a")) == {
        "Held-out accuracy": ("0.300 → 0.500", "95%: 0.200 to 0.400 → 0.400 to 0.600"),
        "Reward in training": ("0.125 → 0.500", "first and last logged step"),
        "Steps": ("4", "finished"),
        "Tokens": ("1.23 million", "prompts and completions"),
        "Time": ("1 h 5 min", "2 s of it in steps, 0.5 s a step"),
        "Peak memory": ("1.26 GiB", ""),
    }


def test_a_run_that_goes_on(tmp_path):
    config = {"max_steps": 100, "loss_type": "dapo", "model_name_or_path": None, "reward_funcs": ["a", "b"], "seed": 0}
    folder = write_run(tmp_path, config=config, evaluated=[(2, 0.5)], **{"memory/peak_gib": lambda step: step / 2})
    run = read_run(folder, "a")
    found = figures(run)
    assert found["Held-out accuracy"] == ("0.500", "at step 2 95%: 0.400 to 0.600")
    assert found["Steps"] == ("4", "of 100; not finished: it goes on, or was stopped")
    assert found["Time"] == ("2 s", "in steps, 0.5 s a step") and found["Peak memory"] == ("2 GiB", "")
    assert {row["label"]: row["value"] for row in about(run)} == {
        "task": "arithmetic", "model": "the task's own small model", "training": "GRPO with the loss dapo",
        "rewards": "a, b", "seed": "0",
    }  # fmt: skip


def test_a_run_without_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path, "a")
    assert figures(run) == {"Steps": ("0", "not finished: it goes on, or was stopped")} and about(run) == []


def test_a_line_that_averages_steps_counts_for_all_of_them(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "step_time": 2.0}\n{"step": 8, "step_time": 1.0}\n')
    assert cumulative_seconds(read_run(tmp_path, "a")) == {5: 10.0, 8: 13.0}


def test_figures_for_people():
    assert [number(value) for value in (0, 0.5, -12.3456, 123456, 1e-5)] == [
        "0.000",
        "0.500",
        "-12.346",
        "1.23e+05",
        "1e-05",
    ]
    assert [duration(value) for value in (1.234, 75, 7322)] == ["1.23 s", "1 min 15 s", "2 h 2 min"]


def test_odd_values_leave_their_figure_out(tmp_path):
    config = {"reward_funcs": 3, "device": "auto", "dtype": "float32"}
    folder = write_run(
        tmp_path, config=config, summary={"steps": 4, "wall_seconds": float("nan")}, step_time=lambda step: 1e308
    )
    run = read_run(folder, "a")
    assert "Time" not in figures(run)
    assert {row["label"]: row["value"] for row in about(run)}["device"] == "float32"
