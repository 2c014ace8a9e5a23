"""Runs for the tests of pages: what a run leaves, and its page as the command makes it."""

import json

import pytest

from fastgrpo import report as report_command

LONG = "A" * 1_000_000
NASTY = (
    "</script><script>window.pwned = 1</script><!--",
    "<img src=x onerror='window.pwned = 2'><svg onload=window.pwned=3>",
    "\x1b[31mred\x1b[0m \x00 \u202egnp.exe\u202c tab\there\nnew line \U000e0041\ud800.",
    LONG,
    "😀 ja, 4 "  # its tokens are below
)  # fmt: skip
TOKENS = {
    "token_ends": [1, 2, 5, 7, 7], "logps": [-0.01, -0.3, -2.5, -7.0, -1.0], "ratios": [1.0, 0.7, 1.1, 1.3, 1.0],
    "clipped_tokens": [1, 3],
}  # fmt: skip


def row(step, group, completion, reward, **more):
    return {
        "step": step, "group": group, "prompt": f"sum {step}.{group}", "completion": completion,
        "rewards": {"right": reward, "<b>short</b>": -reward}, "advantage": reward - 1, "finish_reason": "stop",
        "tokens": 5 - reward, "clipped": 0.4, **more,
    }  # fmt: skip


def write_run(folder, rows, steps=range(1, 5), **settings):
    """What a run leaves: the metrics of some steps, its settings and its samples."""
    folder.mkdir()
    lines = {
        "metrics": [
            {"step": i, "reward": i % 7, "kl": 0.1, "entropy": 0.5, "tokens": 100 * i, "time/rollout": 1.0,
             "time/forward": 0.5, "frac_reward_zero_std": 0.25, "wall_seconds": 2.0 * i}
            for i in steps
        ],
        "samples": rows,
    }  # fmt: skip
    for name, values in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    config = {"task": "arithmetic", "seed": 42, "beta": 0.01, "reward_weights": []} | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_report(path, *folders):
    """Write the page as the command does, without the pictures that it draws beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_command, "draw_curves", lambda run, **_: run / "curves.png")
        assert report_command.main([*map(str, folders), "--output", str(path)]) == 0
    return path
