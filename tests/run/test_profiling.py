"""Stage times add up, nothing is counted twice, what `--profile` writes, and what MFU counts."""

import gzip
import json
import time

import pytest
import tiny
import torch
from runs import lines, make_trainer

from fastgrpo.policy.model import Policy
from fastgrpo.run import profiling
from fastgrpo.run.metrics import METRICS
from fastgrpo.run.profiling import STAGES, StageTimer, peak_flops, stage_table, update_flops


class Clock:
    """perf_counter that moves when told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(profiling.time, "perf_counter", lambda: self.now)

    def pass_(self, seconds):
        self.now += seconds


def test_nested_stages_are_counted_once(monkeypatch):
    clock, timer = Clock(monkeypatch), StageTimer("cpu")
    for _ in range(2):  # a step begins anew
        timer.start()
        clock.pass_(1)
        with timer.stage("forward"):
            clock.pass_(2)
            with timer.stage("reference"):
                clock.pass_(4)
            clock.pass_(8)
        clock.pass_(16)
        with timer.stage("forward"):
            clock.pass_(32)
        values = timer.stop()
        expected = dict.fromkeys(STAGES, 0.0) | {"forward": 42, "reference": 4, "other": 17}
        assert values == {f"time/{name}": seconds for name, seconds in expected.items()}


def test_a_stage_that_raises_is_closed(monkeypatch):
    clock, timer = Clock(monkeypatch), StageTimer("cpu")
    timer.start()
    with pytest.raises(KeyError), timer.stage("reward"):
        clock.pass_(1)
        raise KeyError
    clock.pass_(2)
    values = timer.stop()
    assert values["time/reward"] == 1 and values["time/other"] == 2


def test_outside_of_a_step_nothing_is_kept():
    timer = StageTimer("cpu")
    with timer.stage("forward"):
        pass
    assert timer.marks is None


def test_mfu_is_of_the_update(monkeypatch):
    clock, timer = Clock(monkeypatch), StageTimer("cpu", peak=100.0)
    timer.start()
    timer.flops += 60
    for stage, seconds in (("rollout", 50), ("reference", 7), ("forward", 1), ("loss", 2), ("backward", 2)):
        with timer.stage(stage):
            clock.pass_(seconds)
    with timer.stage("optimizer"):
        clock.pass_(1)
    assert timer.stop()["mfu"] == pytest.approx(60 / 6 / 100)


def test_flops_of_an_update():
    model = tiny.model()  # D 32, F 64, 4 query and 2 key heads of 8, 2 layers, V 64
    weights = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
    assert update_flops(model.base_model, Policy.of(model).head.weight) == (6 * weights, 6 * 64 * 32)
    model.requires_grad_(False)
    assert update_flops(model.base_model, Policy.of(model).head.weight) == (4 * weights, 4 * 64 * 32)


def test_flops_are_those_that_torch_counts():
    """All but attention's and the rotary embedding's own."""
    from torch.utils.flop_counter import FlopCounterMode

    model, counter = tiny.model("llama"), FlopCounterMode(display=False)
    ids = torch.randint(2, 64, (1, 10))
    with counter:
        model(ids).logits.sum().backward()
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op) and "bmm" not in str(op)
    )
    body, row = update_flops(model.base_model, Policy.of(model).head.weight)
    assert counted == 10 * (body + row)


def test_the_stages_of_a_step_add_up_to_it(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, num_iterations=2, max_completion_length=24, num_generations=8)
    for _ in range(3):
        values = trainer.step()
        times = {name: values[f"time/{name}"] for name in STAGES}
        assert sum(times.values()) == pytest.approx(values["step_time"], rel=0.03)
        assert all(seconds > 0 for seconds in times.values()), times
    assert times["other"] < 0.5 * values["step_time"]
    assert not {"mfu", "memory/peak_gib"} & set(values)  # nobody knows the peak of this CPU


def test_stages_hold_what_they_name(tmp_path):
    pause = {"reward": 0.0, "optimizer": 0.0}

    def slow(completions, **_):
        time.sleep(pause["reward"])
        return [float(i) for i in range(len(completions))]

    trainer = make_trainer(tmp_path, slow)
    optimizer = trainer.updates.learner.optimizer
    step = optimizer.step
    optimizer.step = lambda *arguments: time.sleep(pause["optimizer"]) or step(*arguments)
    trainer.step()  # what is imported or compiled once would count as other
    pause.update(reward=0.3, optimizer=0.2)
    values = trainer.step()
    assert values["time/reward"] >= 0.3 and values["time/optimizer"] >= 0.2
    assert values["time/reference"] == 0  # there is none at beta 0
    assert values["time/other"] < 0.2


def test_profile_writes_a_trace_and_a_table(tmp_path, capsys, without_curves):
    small = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3}  # few events, a small trace
    make_trainer(tmp_path, max_steps=6, profile=2, beta=0.1, **small).train()
    out = capsys.readouterr().out
    assert "mean of 2 steps" in out and "trace of 2 steps" in out and "completion tokens/s" in out
    with gzip.open(tmp_path / "run" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    for stage in set(STAGES) - {"other"}:
        assert sum(span["name"] == stage for span in spans) == 2, stage
    assert any(event.get("name") == "aten::mm" for event in events)
    for row in lines(tmp_path / "run" / "metrics.jsonl"):
        assert {f"time/{stage}" for stage in STAGES} <= set(row) <= {"step", "rewards/share_of_a/mean",
                                                                     "rewards/share_of_a/std", *METRICS}  # fmt: skip


def test_profiling_needs_its_steps(tmp_path):
    with pytest.raises(ValueError, match="profile=3 needs a run of at least 8 steps"):
        make_trainer(tmp_path, max_steps=7, profile=3)


def test_a_run_that_goes_on_near_its_end_says_that_it_is_not_profiled(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=8, profile=3)
    trainer.state.global_step = 3
    trainer.step()
    assert "profile=3 needs 8 steps, 5 are left, so this run is not profiled" in capsys.readouterr().out
    for _ in range(4):
        trainer.step()
    assert not (tmp_path / "run" / "trace.json.gz").exists()


def test_the_table():
    steps = [
        {**{f"time/{stage}": 0.1 * scale for stage in STAGES}, "step_time": 0.8 * scale, "tokens/s": 1000.0, "mfu": 0.4,
         "memory/peak_gib": 2.0 * scale}
        for scale in (1, 3)
    ]  # fmt: skip
    text = stage_table(steps)
    assert text.splitlines()[2].split() == ["rollout", "0.2000", "12.5%"]
    assert text.splitlines()[-2].split() == ["step", "1.6000", "100.0%"]
    assert text.splitlines()[-1].strip() == "1,000 completion tokens/s, MFU of the update 40.0%, peak memory 6.00 GiB"


def test_the_peak_of_a_cpu_is_not_known():
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.parametrize("name, peak", [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12),
                                        ("NVIDIA L4", 121e12), ("NVIDIA A100-SXM4-80GB", 312e12),
                                        ("NVIDIA A10", 125e12), ("NVIDIA T4", None)])  # fmt: skip
def test_the_peak_of_a_gpu(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda"), torch.float32) is None


def test_the_end_of_a_step_waits_for_its_own_stream_alone(monkeypatch):
    """The copies of a checkpoint run on another one, and may take longer than the step."""
    events = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            events.append(self)

        def record(self, stream):
            self.stream, self.time, self.waited = stream, float(len(events)), False

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert events[-1].waited, "the device may not be there yet"
            return 1e3 * (end.time - self.time)

    device = torch.device("cuda")
    for name, stand_in in (
        ("Event", Event), ("current_stream", lambda device: "own"), ("reset_peak_memory_stats", lambda device: None),
        ("max_memory_allocated", lambda device: 2**30), ("synchronize", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    timer = StageTimer(device)
    timer.start()
    with timer.stage("forward"):
        pass
    values = timer.stop()
    assert (values["time/forward"], values["time/other"], values["memory/peak_gib"]) == (1, 2, 1)
    assert [event.waited for event in events] == [False] * 3 + [True] and {event.stream for event in events} == {"own"}


@pytest.mark.gpu
def test_on_a_gpu_events_add_up_to_the_step_and_nothing_waits():
    timer, device = StageTimer("cuda"), torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    timer.start()
    with timer.stage("forward"):
        for _ in range(50):
            a @ a
        launched = time.perf_counter() - started
    values = timer.stop()
    total = time.perf_counter() - started
    assert launched < 0.5 * total
    assert values["time/forward"] > 0.8 * total
    assert sum(values[f"time/{stage}"] for stage in STAGES) == pytest.approx(total, rel=0.03)
    assert values["memory/peak_gib"] > 3 * 4096**2 * 4 / 2**30 * 0.9
