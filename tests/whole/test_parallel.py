"""Whole runs of several ranks are those of one process: the same completions, and the same metrics up to rounding."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from parallel_runs import SETTINGS, metrics, save_model, train
from ranks import forked
from runs import lines
from safetensors.torch import load_file

OF_ITS_OWN = {"aborts"}  # which groups are aborted depends on the number of ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_model(folder)
    return folder


def compare(one, other):
    """Compare what two runs left behind."""
    for row, of_other in zip(lines(one / "samples.jsonl"), lines(other / "samples.jsonl"), strict=True):
        # Those of a policy after updates, whose sums the ranks round in another order; 4 decimals are written.
        for name in ("logps", "ratios"):
            assert row.pop(name, []) == pytest.approx(of_other.pop(name, []), abs=1.5e-4), other.name
        assert row == of_other, other.name
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            near = 1e-4 if "logp_gap" in name else 1e-5
            assert theirs[name] == pytest.approx(value, rel=near, abs=near), (other.name, name)
    tokens = [json.loads((run / "summary.json").read_text())["num_tokens"] for run in (one, other)]
    assert tokens[0] == tokens[1]
    last = "adapter_model" if (one / "merged").exists() else "model"
    weights = [load_file(run / "checkpoint-3" / f"{last}.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert (weights[1][name] - value).abs().max() < 1e-5, (other.name, name)


def check(folder, count, names):
    """Make the runs by one process and by several ranks, and compare them."""
    outputs = Path(tempfile.mkdtemp(dir=folder))
    codes, told = forked("parallel_runs.py", outputs, count, folder, ",".join(names))("ranks")
    assert codes == [0] * count, "\n".join(told)
    assert told[1:] == [""] * (count - 1)  # only rank 0 prints
    for name in names:
        one, ddp, fsdp2 = (folder / f"{name.replace(' ', '-')}-{way}" for way in ("one", "ddp", "fsdp2"))
        compare(ddp, fsdp2)
        if name not in OF_ITS_OWN:
            if not one.exists():
                train(folder, name)
            compare(one, ddp)


def test_two_ranks_train_as_one_process_does(folder):
    check(folder, 2, ["plain", "refills", "adapters"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_ranks_trains_as_one_process_does(folder, count):
    for run in (*folder.glob("*-ddp"), *folder.glob("*-fsdp2")):
        shutil.rmtree(run)
    check(folder, count, list(SETTINGS))
