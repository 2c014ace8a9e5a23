"""docs/examples/three_stages.sh, as docs/recipes/three-stages.md runs it: GRPO and distillation keep what they gain."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.slow
def test_grpo_gains_and_distillation_keeps_the_gain(tmp_path, capsys):
    """GRPO gains at least 0.2 over its supervised start, and distillation into a fresh model keeps at least 0.1."""
    script, path = ROOT / "docs" / "examples" / "three_stages.sh", Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(2):  # the second call finds everything done
        subprocess.run(["bash", script, tmp_path], cwd=ROOT, env=environment, check=True)
    summaries = {
        name: json.loads((tmp_path / name / "summary.json").read_text()) for name in ("sft", "train", "distilled")
    }
    accuracy = {name: summary["accuracy_after"] for name, summary in summaries.items()}
    with capsys.disabled():
        print("three stages:", accuracy)
    assert accuracy["train"] >= accuracy["sft"] + 0.2 and accuracy["distilled"] >= accuracy["sft"] + 0.1
    assert (tmp_path / "report.html").exists()
