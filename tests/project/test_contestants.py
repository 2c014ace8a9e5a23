"""Contestants of a benchmark are in processes of their own, and all of them have liger's layers or none has."""

import sys
from types import SimpleNamespace

import pytest
from paths import ROOT

from benchmarks import bench_rollout, bench_step
from benchmarks.contestants import Contestant, Failed, contest, taking_part


@pytest.fixture
def planted(monkeypatch):
    """Contestants from tests/support/planted_contestants.py."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    started = []

    def start(*names):
        started.extend(Contestant(name, "planted_contestants:entry", "cpu", variant=name) for name in names)
        return started

    with taking_part(started):
        yield start


def test_contestants_do_not_reach_one_another(planted):
    """One replaces a function of torch in its own process; what fails is missing by name."""
    found = contest(planted("fastgrpo", "patches", "dies", "cannot be made"), 2, {"absent": "not installed"})
    assert found.results.keys() == {"fastgrpo", "patches"}
    assert all(result["rounds"] == 2 and result["peak_bytes"] >= 40 for result in found.results.values())
    assert found.values == {"fastgrpo": [{"sum": 10.0}] * 3, "patches": [{"sum": -1.0}] * 3}
    assert found.missing == {
        "absent": "not installed",
        "dies": "failed: its process ended with code 3",
        "cannot be made": "failed: ImportError: no package",
    }
    # A kernel that its self-check distrusts is an error: plain PyTorch is not measured under our name.
    assert found.about["fastgrpo"] == {"name": "fastgrpo", "self-check": "raise"} and found.again("fastgrpo") > 0


def test_a_peer_that_fails_in_a_timed_round_is_missing(planted):
    """The others go on, and nothing of it is in the results."""
    found = contest(planted("trl, second round", "fastgrpo", "peer"), 3)
    assert found.missing == {"trl, second round": "failed: OSError: no memory"}
    assert {name: result["rounds"] for name, result in found.results.items()} == {"fastgrpo": 3, "peer": 3}
    with pytest.raises(Failed, match="OSError: no memory"):
        contest(planted("fastgrpo, second round")[-1:], 3)


def test_a_contestant_is_started_when_the_one_before_is_made(planted, monkeypatch):
    """And what is asked of one again is not made again."""
    started, answer = [], Contestant._answer
    contestants = planted("fastgrpo", "peer")

    def watched(contestant):
        found = answer(contestant)
        if "calls" in found:
            started.append([other.name for other in contestants if other.process is not None])
        return found

    monkeypatch.setattr(Contestant, "_answer", watched)
    assert not any(contestant.process for contestant in contestants)
    assert contest(contestants[:1], 1).results.keys() == {"fastgrpo"}
    assert contest(contestants, 1).results.keys() == {"fastgrpo", "peer"}
    assert started == [["fastgrpo"], ["fastgrpo", "peer"]]


def test_a_failure_of_ours_fails_the_benchmark(planted):
    with pytest.raises(Failed, match="OSError: no memory"):
        contest(planted("fastgrpo, raises"), 1)


def test_rollouts_have_the_same_layers(monkeypatch):
    wanted = []
    monkeypatch.setattr(bench_rollout, "apply_liger", lambda model, wants: wanted.append(wants))
    monkeypatch.setattr(bench_rollout, "LIGER", True)
    bench_rollout.engine_entry("embedded", [], [])
    bench_rollout.generate_entry("embedded", [])
    bench_rollout.continuous_entry("embedded")
    assert wanted == [True] * 3


@pytest.mark.parametrize("liger", (False, True))
def test_trainers_have_the_same_layers(monkeypatch, liger):
    """TRL loads its reference by itself, and so the classes are replaced in its process."""
    patched = []
    monkeypatch.setattr(bench_step, "LIGER", liger)
    monkeypatch.setattr(bench_step, "patch_classes", patched.append)
    monkeypatch.setattr(bench_step, "GRPOTrainer", lambda path, reward, config, rows: SimpleNamespace(step=config))
    assert bench_step.our_entry("model", "runs/none", "0.8m").calls["fastgrpo"].use_liger_kernel is liger
    trainer = SimpleNamespace(train=lambda: None)
    trl = SimpleNamespace(GRPOConfig=dict, GRPOTrainer=lambda path, reward, **options: trainer)
    monkeypatch.setitem(sys.modules, "trl", trl)
    assert bench_step.trl_entry("model", "runs/none", "0.8m", "trl").calls.keys() == {"trl"}
    assert patched == ["llama"] * liger
