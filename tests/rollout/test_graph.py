"""Graphs of the decode step: when a step runs, is recorded and is replayed, and how many kernels it launches."""

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks import architectures, launches
from benchmarks.launches import meta_gpu
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.load import prepare
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.rollout import graph
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.graph import Graphs, graph_obstacle


@pytest.mark.parametrize("names", [("qwen2",), pytest.param(launches.ARCHITECTURES, marks=pytest.mark.slow)])
def test_launches_of_a_step_are_those_of_the_committed_table(names, monkeypatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(launches, "ARCHITECTURES", names)
    committed = json.loads((Path(__file__).parent / "launches.json").read_text())
    expected = {name: counts for name, counts in committed.items() if name.split()[0] in names}
    assert launches.table() == expected and len(expected) == 7 * len(names)
    assert all(expected[f"{name} fused"]["a layer"] <= 10 for name in names)


@pytest.fixture
def cuda(monkeypatch):
    """`torch.cuda` without a GPU; the memory pools and modes with which graphs were recorded."""
    recordings = []

    def graph(graph, **how):
        recordings.append(how)
        return nullcontext()

    for name in ("CUDAGraph", "device", "stream", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return recordings


def test_a_step_runs_once_is_recorded_and_then_replayed(cuda, monkeypatch):
    graphs, steps = Graphs(torch.device("cuda"), enabled=True), []
    for _ in range(4):
        graphs.run(8, lambda: steps.append(8))
    assert steps == [8, 8]  # one run, and one recording
    assert graphs.graphs[8].replay.call_count == 3
    graphs.run(16, lambda: steps.append(16))
    assert steps == [8, 8, 16] and 16 not in graphs.graphs  # another key is a graph of its own
    graphs.run(16, lambda: steps.append(16))
    assert [how["pool"] for how in cuda] == [None, graphs.graphs[8].pool()]  # and shares the memory of the first
    assert {how["capture_error_mode"] for how in cuda} == {"thread_local"}
    graphs.clear()
    graphs.run(8, lambda: steps.append(8))
    assert steps[-1] == 8 and not graphs.graphs and graphs.pool is None
    eager = Graphs(torch.device("cpu"), enabled=False)
    for _ in range(3):
        eager.run("key", lambda: steps.append(1))
    assert steps[-3:] == [1, 1, 1] and not eager.graphs
    monkeypatch.setattr(graph, "MAX_GRAPHS", 1)
    few = Graphs(torch.device("cuda"), enabled=True)
    for key in (8, 8, 16, 16):
        few.run(key, lambda: None)
    assert [*few.graphs] == [16]


@pytest.mark.parametrize("dtype, capability, recorded", [
    (torch.bfloat16, (9, 0), True), (torch.bfloat16, (8, 0), False), (torch.float32, (9, 0), False),
])  # fmt: skip
@pytest.mark.parametrize("make", [Policy, prepare])
def test_a_mixture_of_experts_is_recorded_where_its_products_stay_on_the_device(make, dtype, capability, recorded):
    mixture, plain = (make(architectures.tiny_model(name).to(dtype)) for name in ("qwen3_moe", "qwen3"))
    assert graph_obstacle(plain, capability) is None
    assert (graph_obstacle(mixture, capability) is None) == recorded


@pytest.mark.parametrize("name, recorded", [("qwen2", True), ("qwen3_moe", False)])
def test_an_engine_is_made_of_a_model_with_liger_and_adapters(cuda, monkeypatch, caplog, name, recorded):
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with meta_gpu("transformers.models.qwen3_moe.modeling_qwen3_moe"):
        policy = prepare(architectures.tiny_model(name).to("meta"))
        assert apply_liger(policy.module)
        add_lora(policy.module, r=4, alpha=8, target_modules=("q_proj", "v_proj"))
        assert RolloutEngine(policy).graphs.enabled == recorded
        assert not RolloutEngine(policy, enforce_eager=True).graphs.enabled
    assert not launched
    assert caplog.text.count("decoding goes without CUDA graphs") == (not recorded)  # not where it was asked for
