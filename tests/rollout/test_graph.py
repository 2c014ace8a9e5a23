"""Graphs of the decode step: when a step runs, is recorded and is replayed. The GPU itself is in test_engine_gpu.py."""

from contextlib import contextmanager

import pytest
import tiny
import torch
from triton.runtime.jit import JITFunction

from benchmarks import architectures
from benchmarks.launches import meta_gpu
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.load import prepare
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.graph import Graphs, graph_obstacle


class RecordedGraph:
    """Stands in for `torch.cuda.CUDAGraph`: counts its replays."""

    def __init__(self):
        self.replays = 0

    def pool(self):
        return "pool"

    def replay(self):
        self.replays += 1


@pytest.fixture
def cuda(monkeypatch):
    """`torch.cuda` without a GPU; the memory pools and modes with which graphs were recorded."""
    recordings = []

    @contextmanager
    def graph(graph, **how):
        recordings.append(how)
        yield

    @contextmanager
    def nothing(*args):
        yield

    for name, stand_in in (
        ("CUDAGraph", RecordedGraph), ("graph", graph), ("device", nothing), ("stream", nothing),
        ("Stream", lambda device: "stream"), ("current_stream", lambda device: "current"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return recordings


def test_without_graphs_every_step_runs():
    graphs, steps = Graphs(torch.device("cpu"), enabled=False), []
    for _ in range(3):
        graphs.run("key", lambda: steps.append(1))
    assert len(steps) == 3 and not graphs.graphs


def test_a_step_runs_once_is_recorded_and_then_replayed(cuda):
    graphs, steps = Graphs(torch.device("cuda"), enabled=True), []
    for _ in range(4):
        graphs.run(8, lambda: steps.append(8))
    assert steps == [8, 8]  # one run, and one recording
    assert graphs.graphs[8].replays == 3
    graphs.run(16, lambda: steps.append(16))
    assert steps == [8, 8, 16] and 16 not in graphs.graphs  # another key is a graph of its own
    graphs.run(16, lambda: steps.append(16))
    assert [how["pool"] for how in cuda] == [None, "pool"]  # and shares the memory of the first
    assert {how["capture_error_mode"] for how in cuda} == {"thread_local"}


def test_forgotten_graphs_are_recorded_anew(cuda):
    graphs, steps = Graphs(torch.device("cuda"), enabled=True), []
    for _ in range(2):
        graphs.run(8, lambda: steps.append(1))
    graphs.clear()
    graphs.run(8, lambda: steps.append(1))
    assert len(steps) == 3 and not graphs.graphs and graphs.pool is None


def test_a_step_that_cannot_be_recorded_names_the_cause_and_the_remedy(cuda):
    def step():
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    graphs = Graphs(torch.device("cuda"), enabled=True)
    graphs.run(8, lambda: None)
    with pytest.raises(ValueError, match=r"rollout_backend eager \(operation not permitted when stream is capturing\)"):
        graphs.run(8, step)
    assert not graphs.graphs


def test_memory_that_runs_out_is_not_taken_for_a_step_that_waits(cuda):
    def step():
        raise torch.OutOfMemoryError("full")

    graphs = Graphs(torch.device("cuda"), enabled=True)
    graphs.run(8, lambda: None)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        graphs.run(8, step)


@pytest.mark.parametrize(
    "dtype, capability, recorded",
    [
        (torch.bfloat16, (9, 0), True), (torch.bfloat16, (10, 0), True), (torch.bfloat16, (8, 0), False),
        (torch.bfloat16, (8, 9), False), (torch.bfloat16, (12, 0), False), (torch.float16, (9, 0), False),
        (torch.float32, (9, 0), False),
    ],
)  # fmt: skip
def test_a_mixture_of_experts_is_recorded_where_its_products_stay_on_the_device(dtype, capability, recorded):
    mixture, plain = (architectures.tiny_model(name).to(dtype) for name in ("qwen3_moe", "qwen3"))
    for make in (Policy, prepare):
        assert graph_obstacle(make(plain), capability) is None
        obstacle = graph_obstacle(make(mixture), capability)
        assert (obstacle is None) == recorded
        if not recorded:
            assert obstacle == (
                "the grouped products of the experts of Qwen3MoeForCausalLM wait for the host "
                f"for {dtype} at compute capability {capability[0]}.{capability[1]}"
            )


def test_what_is_prepared_is_not_run_again(monkeypatch):
    mixture = prepare(architectures.tiny_model("qwen3_moe"))
    monkeypatch.setattr("fastgrpo.rollout.graph.dry_run", None)
    assert mixture.grouped and graph_obstacle(mixture, (8, 0))
    assert graph_obstacle(prepare(tiny.model()), (8, 0)) is None


def test_a_model_that_the_engine_cannot_serve_is_not_recorded():
    """Its dry run has ended early, so that nothing is known of its products."""
    policy = prepare(architectures.tiny_model("gpt_oss"), own_attention=True)
    assert policy.grouped is None
    assert graph_obstacle(policy, (9, 0)) == "GptOssForCausalLM has attention sinks"


@pytest.mark.parametrize("make", [Policy, prepare])
@pytest.mark.parametrize("name, recorded", [("qwen2", True), ("qwen3_moe", False)])
def test_an_engine_is_made_of_a_model_with_liger_and_adapters(cuda, monkeypatch, make, name, recorded):
    """In the order of a run on a GPU: load, liger's layers, adapters, engine. No kernel is launched on the way."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with meta_gpu("transformers.models.qwen3_moe.modeling_qwen3_moe"):
        policy = make(architectures.tiny_model(name).to("meta"))
        assert apply_liger(policy.module)
        add_lora(policy.module, r=4, alpha=8, target_modules=("q_proj", "v_proj"))
        assert RolloutEngine(policy).graphs.enabled == recorded
    assert not launched


@pytest.mark.parametrize("enforce_eager, warnings", [(False, 1), (True, 0)])
def test_an_engine_on_a_gpu_goes_without_graphs_by_itself_and_says_so_once(
    cuda, monkeypatch, caplog, enforce_eager, warnings
):
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    mixture = RolloutEngine(architectures.tiny_model("qwen3_moe"), enforce_eager=enforce_eager)
    assert not mixture.graphs.enabled
    assert caplog.text.count("decoding goes without CUDA graphs: the grouped products") == warnings
    assert RolloutEngine(tiny.model(), enforce_eager=enforce_eager).graphs.enabled != enforce_eager
    assert len(caplog.records) == warnings
