"""Stage times add up and count nothing twice; the output of `--profile`; the FLOPs of the MFU."""

import gzip
import json

import pytest
import tiny
import torch
from runs import lines, make_trainer
from torch.utils.flop_counter import FlopCounterMode

from fastgrpo.policy.model import Policy
from fastgrpo.run import profiling
from fastgrpo.run.profiling import STAGES, StageTimer, peak_flops, update_flops


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_nested_stages_are_counted_once_and_one_that_raises_is_closed(clock):
    timer = StageTimer("cpu")
    with timer.stage("forward"):
        assert timer.marks is None  # outside of a step nothing is kept
    for _ in range(2):  # a step begins anew
        timer.start()
        clock(1)
        with timer.stage("forward"):
            clock(2)
            with pytest.raises(KeyError), timer.stage("reference"):
                clock(4)
                raise KeyError
            clock(8)
        clock(16)
        with timer.stage("forward"):
            clock(32)
        expected = dict.fromkeys(STAGES, 0.0) | {"forward": 42, "reference": 4, "other": 17}
        assert timer.stop() == {f"time/{name}": seconds for name, seconds in expected.items()}


def test_mfu_measures_the_update(clock):
    timer = StageTimer("cpu", peak=100.0)
    timer.start()
    timer.flops += 60
    for stage, seconds in zip(("rollout", "reference", "forward", "loss", "backward", "optimizer"), (50, 7, 1, 2, 2, 1),
                              strict=True):  # fmt: skip
        with timer.stage(stage):
            clock(seconds)
    assert timer.stop()["mfu"] == pytest.approx(60 / 6 / 100)


def test_flops_equal_torchs_count():
    model, counter = tiny.model("llama"), FlopCounterMode(display=False)
    with counter:
        model(torch.randint(2, 64, (1, 10))).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"].items()
    body, row = update_flops(model.base_model, Policy.of(model).head.weight)
    assert 10 * (body + row) == sum(n for op, n in counts if "mm" in str(op) and "bmm" not in str(op))
    model.requires_grad_(False)
    assert update_flops(model.base_model, Policy.of(model).head.weight) == (body * 2 // 3, row * 2 // 3)


def test_profile_writes_a_trace_and_a_table(tmp_path, capsys, without_curves):
    small = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3}  # few events, a small trace
    make_trainer(tmp_path, max_steps=6, profile=2, beta=0.1, **small).train()
    out = capsys.readouterr().out
    assert "mean of 2 steps" in out and "trace of 2 steps" in out and "completion tokens/s" in out
    with gzip.open(tmp_path / "run" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert all(spans.count(stage) == 2 for stage in set(STAGES) - {"other"})
    assert any(event.get("name") == "aten::mm" for event in events)
    for row in lines(tmp_path / "run"):
        assert {f"time/{stage}" for stage in STAGES} <= set(row)


PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12, "A10G": 70e12,
         "GB200": 2500e12, "T4": None}  # fmt: skip


def test_the_peak_of_a_gpu_is_found_by_its_name(monkeypatch):
    for name, peak in PEAKS.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: f"NVIDIA {name}")
        assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
        assert peak_flops(torch.device("cuda"), torch.float32) is None
