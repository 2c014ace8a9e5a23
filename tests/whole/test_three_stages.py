"""docs/examples/three_stages.sh, as docs/recipes/three-stages.md runs it: GRPO and distillation keep what they gain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from runs import lines

EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def run_stages(tmp_path, capsys):
    """Runs the script, and returns the evaluations of each stage, and the distilled rows."""

    def run(*settings):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        script = ["bash", EXAMPLES / "three_stages.sh", tmp_path, *settings]
        for _ in range(2):  # the second call finds everything done
            subprocess.run(script, cwd=ROOT, env=os.environ | {"PATH": path}, check=True)
        assert (tmp_path / "report.html").exists()
        evaluations = {}
        for name in ("sft", "train", "distilled"):
            rows = [row for row in lines(tmp_path / name) if "eval/accuracy" in row]
            evaluations[name] = [{key: value for key, value in row.items() if "ci95" not in key} for row in rows]
            with capsys.disabled():
                print(name, *evaluations[name], sep="\n")
        return evaluations, lines(tmp_path, "distilled.jsonl")

    return run


@pytest.mark.slow
def test_grpo_gains_and_distillation_keeps_the_gain(run_stages):
    """GRPO adds at least 0.2 to the accuracy, and the distilled model has most of that, and right steps."""
    evaluations, rows = run_stages()
    sft, grpo, distilled = (evaluations[name][-1] for name in ("sft", "train", "distilled"))
    for metric in ("eval/accuracy", "eval/pass@1"):
        assert grpo[metric] >= sft[metric] + 0.2 and distilled[metric] >= sft[metric] + 0.15
    assert distilled["eval/rewards/steps_reward/mean"] > grpo["eval/rewards/steps_reward/mean"]
    assert all(row["rewards"]["steps_reward"] == 1 for row in rows)


@pytest.mark.slow
def test_a_pretrained_model_goes_through_the_stages(run_stages):
    evaluations, rows = run_stages(EXAMPLES / "stages_smollm2.sh")
    base, last = evaluations["sft"][0], evaluations["distilled"][-1]
    assert last["eval/accuracy"] >= base["eval/accuracy"] + 0.1
    assert rows and all(row["rewards"]["correctness"] == row["rewards"]["steps_reward"] == 1 for row in rows)
