"""docs/examples/foods.py and reward_model.py, by the commands of docs/recipes/reward-model.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from runs import lines


@pytest.mark.slow
def test_grpo_raises_the_reward_of_a_model_trained_on_preferences(tmp_path):
    page = (ROOT / "docs" / "recipes" / "reward-model.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].replace("python docs", f"python {ROOT}/docs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euc", commands]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert float(re.search(r"held-out pairs: (\S+)", done.stdout)[1]) > 0.9
    first, *_, last = lines(tmp_path / "runs" / "preferred")
    assert last["reward"] > first["reward"] + 0.8
    assert last["rewards/rank/mean"] > first["rewards/rank/mean"] + 0.6
