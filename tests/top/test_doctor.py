"""The doctor: machine, packages and memory plan."""

import re
import socket

import pytest
import tiny
import torch
from ranks import start

from fastgrpo import doctor


def test_prints_packages_machine_and_memory_plan(tmp_path, capsys):
    path = str(tiny.save(tmp_path / "model"))
    assert doctor.main(["--model", path, "--beta", "0.04", "--num_generations", "16", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    for name in ("triton", "kernels", f"memory of {path} in bfloat16", "a copy of the policy", "peak"):
        assert name in out, name
    assert torch.__version__ in out and re.search("attention in rollouts +products", out)


def test_missing_packages_are_named_with_their_remedy(monkeypatch, capsys):
    installed, missing = doctor.installed, ("wandb", "datasets", "triton", "flash-attn", "liger-kernel")
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in missing else installed(name))
    assert doctor.main([]) == 2
    out, err = capsys.readouterr()
    for remedy in ("wandb: pip install wandb", "pip install 'fastgrpo[train]'", "pip install triton",
                   "pip install flash-attn --no-build-isolation"):  # fmt: skip
        assert remedy in out
    assert "memory of" not in out and "error: training needs datasets: pip install 'fastgrpo[train]'" in err


def test_a_run_that_does_not_fit_gets_its_remedies(tmp_path):
    argv = ["--model_name_or_path", str(tiny.save(tmp_path / "model")), "--device", "cpu"]
    assert "does not fit" not in doctor.memory(argv)
    text = doctor.memory(argv, room=2**20)
    assert "of 1.00 MiB available" in text
    assert re.search(r"this does not fit: the run needs at least .*\n  --max_tokens_per_microbatch 2048 saves", text)


@pytest.mark.slow
def test_several_ranks_are_shown_once_with_the_plan_on_each(tmp_path):
    path = tiny.save(tmp_path / "model")
    flags = ("--model", path, "--parallel", "fsdp2", "--device", "cpu", "--dtype", "bfloat16")
    with start(["-m", "fastgrpo.doctor", *flags]) as job:
        assert job.wait() == 0, job.told()
        told, other = job.rank(0), job.rank(1)
    rows = dict(re.findall(r"^ +(\S[\w ]*?) {2,}(\S.*)$", told, re.MULTILINE))
    assert rows["ranks"] == "2" and "gloo" in rows["backend"]
    assert rows["rank 0"] == rows["rank 1"] == f"{socket.gethostname()}, CPU"
    assert f"memory of {path} in bfloat16 on each of 2 devices" in told
    assert "fsdp2" in rows["parallel"] and "/ 2 devices" in rows["gradients"] and "whole weights" in rows
    assert told.count("gradient checkpointing") == 1 == told.count(torch.__version__) and not other
