"""Rollouts on vLLM servers: what they draw, that they have the trained weights, and servers that fail."""

import copy
import gc
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from dialogues import Scripted
from drawing import PROMPTS, finish, ids_of
from fake_vllm import FakeVLLM
from runs import lines, make_trainer
from transformers import AutoModelForCausalLM
from updates import asynchronous, mixed_samples, rising

from fastgrpo.check import main as check
from fastgrpo.policy.lora import add_lora
from fastgrpo.rollout import vllm
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.vllm import VLLMBackend
from fastgrpo.trainer.ahead import Ahead

pytestmark = pytest.mark.usefixtures("without_curves")
STOPS, SHORT = (1, 2, 3), SamplingParams(max_tokens=4)
LORA = {"use_peft": True, "lora_target_modules": "all-linear"}


@pytest.fixture
def serve():
    """Starts servers, which have none of the weights."""
    made = []

    def start(count=1, **how):
        made.extend(FakeVLLM(tiny.model("smollm3-like", seed=9), **how) for _ in range(count))
        return made[-count:]

    yield start
    for server in made:
        server.stop()


def backend_of(servers, model, **how):
    return VLLMBackend(model, base_urls=[server.url for server in servers], **how)


def hold_load(server, backend):
    """Hold the next load of weights until the trainer waits for the backend. Return an event that the load sets."""
    begun, go, load = threading.Event(), threading.Event(), server.load_policy
    server.load_policy = lambda path: (begun.set(), go.wait(30), load(path))
    backend._wait = lambda work: (begun.is_set() and go.set(), VLLMBackend._wait(backend, work))[1]
    return begun


def send_weights(backend, model, begun=None):
    """Send new weights while a request is in flight, and compare its log-probs with its weights."""
    old = copy.deepcopy(model)
    backend.add_request(PROMPTS[0], 2, SHORT)
    backend.step(0)
    assert begun is None or begun.wait(30)
    write(model, 1.5)
    backend.sync(step=1)
    mixed_samples({0: (old, []), 1: (model, finish(backend)[0])}, 1, 1e-5)


def nccl(monkeypatch, server):
    """Replace vLLM's classes that send weights. Return the arguments of each group."""
    groups = []

    def trainer_init(group, client, source):
        groups.append(group)
        return SimpleNamespace(send_weights=lambda: server.model.load_state_dict(source.state_dict()))

    classes = SimpleNamespace(HTTPVLLMWeightSyncClient=lambda url, timeout: url, ModuleSource=lambda module: module)
    classes.NCCLTrainerInitInfo = lambda *given, rank: given
    classes.NCCLTrainerWeightTransferEngine = SimpleNamespace(trainer_init=trainer_init)
    for name in ("", ".nccl_engine"):
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer{name}", classes)
    return groups


def write(model, factor=1.01):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def test_greedy_tokens_equal_the_engines(serve):
    model, sampling = tiny.model("smollm3-like"), SamplingParams(temperature=0, max_tokens=9, stop_token_ids=STOPS)
    backend, engine = backend_of(serve(2), model), RolloutEngine(model)
    backend.sync(step=3)
    for _ in range(2):
        for one, other in zip(*(it.generate(PROMPTS, 2, sampling) for it in (backend, engine)), strict=True):
            assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason) and {*one.versions.tolist()} == {3}
            torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)
        write(model)  # both draw with the new weights


def test_draws_depend_on_seed_and_prompt_and_not_on_the_servers(serve):
    model, sampling = tiny.model("smollm3-like"), SamplingParams(max_tokens=9, seed=4)
    one = backend_of(serve(1), model).generate(PROMPTS, 3, sampling)
    servers = serve(3)
    other = backend_of(servers, model, max_num_seqs=6).generate(PROMPTS, 3, sampling)
    assert ids_of(one) == ids_of(other) and len({*map(tuple, ids_of(one))}) == 12
    assert sum(server.drawn for server in servers) == 12 and max(server.drawn for server in servers) < 12
    mixed_samples({0: (model, one)}, 0, 1e-5)


@pytest.mark.parametrize("kind", ["full", "nccl", "merged", "adapters"])
def test_training_draws_with_the_weights_of_each_step(serve, tmp_path, kind, monkeypatch):
    (server,) = serve(loras={} if kind == "adapters" else None, transfer=kind)
    groups = nccl(monkeypatch, server)
    how = {"max_steps": 3, "learning_rate": 1e-2, "rollout_backend": "vllm", "vllm_server_base_url": server.url}
    trainer = make_trainer(tmp_path, rising, **how, **(LORA if kind in ("merged", "adapters") else {}))
    base = kind in ("nccl", "adapters") and AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    server.model = base or server.model
    trainer.train()
    assert [(given[0], given[2]) for given in groups] == [("127.0.0.1", 3)] * (kind == "nccl")
    steps = [row for row in lines(tmp_path / "run") if "sampler/kl" in row]
    assert len(steps) == 3 and all(row["sampler/logp_gap_max"] < 1e-4 and row["sampler/kl"] < 1e-8 for row in steps)
    assert (server.weights if server.loras is None else "".join(server.loras)).endswith("-4")


@pytest.mark.parametrize("policy", ["wait", "continue", "adapters"])
def test_each_token_has_the_log_prob_and_the_version_of_the_weights_that_drew_it(serve, tmp_path, policy):
    lora, trained = policy == "adapters", {}
    (server,) = serve(loras={} if lora else None)

    def between():
        deadline = time.monotonic() + 30
        while 0 in trained and server.weights.endswith("-2") and time.monotonic() < deadline:
            time.sleep(0.01)  # until the weights of the second step arrive

    server.between = between if policy == "continue" else server.between
    how = dict(LORA) if lora else {"staleness_policy": policy}
    how["max_num_seqs"] = 16 if policy == "continue" else None
    trainer = asynchronous(tmp_path, server.url, trained, **how)
    server.model = AutoModelForCausalLM.from_pretrained(tmp_path / "model") if lora else server.model
    trainer.train()
    assert bool(mixed_samples(trained, 2, 1e-5)) == (policy == "continue")
    assert not lora or len(server.loras) == 1
    steps = [row for row in lines(tmp_path / "run") if "sampler/kl" in row]
    assert steps[1]["sampler/version_min"] == 0 and all(row["sampler/idle_s"] >= 0 for row in steps)
    assert all(sum(row[f"sampler/staleness_{age}"] for age in range(3)) == pytest.approx(1) for row in steps)
    exact = [row[f"sampler/staleness_{min(step, 2)}"] == 1 for step, row in enumerate(steps)]
    assert policy == "continue" or all(exact)  # however fast trainer and server are


@pytest.mark.parametrize("finished, steps", [(True, 5), pytest.param(False, 11, marks=pytest.mark.slow)])
def test_kills_neither_repeat_nor_lose_prompts_of_asynchronous_rollouts(serve, tmp_path, finished, steps):
    (server,), whole, parts, drawn = serve(), {}, {}, []
    asynchronous(tmp_path, server.url, whole, "whole", max_steps=steps).train()

    def failing(trainer_state, completions, **columns):
        if trainer_state.global_step == len(drawn) < steps:
            raise RuntimeError("killed")
        return rising(completions)

    for kill in range(1, steps + 1):
        drawn.append(server.drawn)
        how = {"resume_from_checkpoint": "auto", "max_steps": steps}
        trainer = asynchronous(tmp_path, server.url, parts, "parts", failing, **how)
        if finished:
            save = trainer._save
            trainer._save = lambda step, trainer=trainer, save=save: (trainer.ahead.settle(), save(step))
        with pytest.raises(ValueError, match="killed") if kill < steps else nullcontext():
            trainer.train()
    whole, parts = (
        {step: [it.prompt for it in samples] for step, (_, samples) in run.items()} for run in (whole, parts)
    )
    assert whole == parts and len(whole) == steps
    if finished:
        assert server.drawn - drawn[0] <= (5 + 4) * 16  # a kill loses the batch that was begun in its step


def test_completions_of_other_rows_than_the_resumed_ones_are_drawn_again(serve, tmp_path):
    (server,), trained = serve(), {}

    def failing(trainer_state, completions, **columns):
        if trainer_state.global_step == 2:
            raise RuntimeError("killed")
        return rising(completions)

    for reward, texts in ((failing, ["ab", "c"]), (rising, ["ab", "yz"])):
        trainer = asynchronous(tmp_path, server.url, trained, "run", reward, texts, resume_from_checkpoint="auto")
        save = trainer._save
        trainer._save = lambda step, trainer=trainer, save=save: (trainer.ahead.settle(), save(step))
        with nullcontext() if reward is rising else pytest.raises(ValueError, match="killed"):
            trainer.train()
    assert not mixed_samples(trained, 2, 1e-5)


@pytest.mark.parametrize("learning_rate", [1e-2, 1e-6])
@pytest.mark.parametrize("fault", ["no load", "old head"])
def test_a_server_with_old_weights_stops_the_run_before_it_trains(serve, tmp_path, fault, learning_rate):
    (server,) = serve()
    how = {"max_steps": 3, "learning_rate": learning_rate, "rollout_backend": "vllm"}
    model = tiny.model("smollm3-like", vocab_size=258)
    trainer = make_trainer(tmp_path, rising, model=model, vllm_server_base_url=server.url, **how)
    trainer.step()
    server.faults.add(fault)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"does not have the policy's weights.* differ by .* there, and .* here"):
        trainer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    trainer.log.close()


@pytest.mark.parametrize("fault", ["no load", "old head", "no adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_that_keeps_other_weights_fails_the_first_probe(serve, dtype, fault):
    lora, model = fault == "no adapters", tiny.model("smollm3-like").to(dtype)
    (server,) = serve(loras={} if lora else None)
    server.model = copy.deepcopy(model)
    model = add_lora(model, target_modules=["all-linear"]) if lora else model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    write(server.model, 1.0 if lora else 1.01)
    server.faults.add("no load" if lora else fault)
    with pytest.raises(ValueError, match="does not have the policy's weights"):
        backend_of([server], model).generate(PROMPTS, 1, SHORT)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    "how, named", [({"version": "0.31.2"}, "0.31.2"), ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode")]
)
def test_servers_with_another_version_or_mode_are_refused(serve, how, named):
    with pytest.raises(ValueError, match=named):
        backend_of(serve(**how), tiny.model("smollm3-like"))


def test_a_server_that_cannot_read_the_weights_is_told(serve, monkeypatch):
    backend = backend_of(servers := serve(), tiny.model("smollm3-like"))
    monkeypatch.setattr(servers[0], "load_policy", lambda path: Path(path, "none").read_text())
    with pytest.raises(ValueError, match=r"refused /collective_rpc with code 500: .*No such file"):
        backend.generate(PROMPTS, 1, SHORT)


@pytest.mark.parametrize("fault", ["dead", "silent", "restarted", "hung", "stopped"])
def test_requests_of_a_server_that_fails_go_to_another_one(serve, fault, monkeypatch):
    monkeypatch.setattr(vllm, "PATIENCE", 0.3)
    model, sampling = tiny.model("smollm3-like"), SamplingParams(max_tokens=9, seed=4)
    expected = ids_of(backend_of(serve(), model).generate(PROMPTS, 2, sampling))
    servers = failing, other = serve(2)
    backend, late = backend_of(servers, model), []
    backend.generate(PROMPTS, 2, sampling)
    failing_at, other_at = backend.servers
    failing_at.timeout = other_at.timeout = 0.5

    def fail(_):  # in the middle of a request
        if fault == "hung":
            failing.faults.add(fault)
            late.append(1) if not failing.released.wait(30) else None
        elif fault == "restarted":
            failing.weights, failing.model = "default", tiny.model("smollm3-like", seed=9)
        else:
            failing.faults.add(fault)

    def slow(_):  # longer than the timeout, while it generates tokens
        while fault == "hung" and other.looks < 4:
            time.sleep(0.01)

    failing.before, other.before = fail, slow
    assert ids_of(backend.generate(PROMPTS, 2, sampling)) == expected and not late
    drawn, failing.before = failing.drawn, lambda _: None
    failing.faults.clear()
    write(model)  # it is tried again with the next weights
    again = ids_of(backend.generate(PROMPTS, 2, sampling))
    assert again == ids_of(backend_of(serve(), model).generate(PROMPTS, 2, sampling)) and failing.drawn > drawn
    assert failing.weights == other.weights


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lost", [True, False])
def test_a_request_that_fails_is_drawn_again_with_the_same_adapters(serve, lost):
    (server,), model, sampling = serve(loras={}), tiny.model("smollm3-like"), SamplingParams(max_tokens=4, seed=4)
    server.model = copy.deepcopy(model)
    backend = backend_of([server], add_lora(model, target_modules=["all-linear"]))
    expected = ids_of(backend.generate(PROMPTS, 2, sampling))

    def fail(_):
        server.before = lambda _: None
        if not lost:
            raise SystemExit  # of the thread, which drops the connection
        server.loras.clear()

    server.before = fail
    assert ids_of(backend.generate(PROMPTS, 2, sampling)) == expected and len(server.loras) == 1


def test_a_completion_that_the_server_cuts_is_an_error(serve):
    (server,) = serve()
    server.faults.add("cut")
    with pytest.raises(ValueError, match=r"stopped after 2 of 4 tokens .* --max-model-len"):
        backend_of([server], tiny.model("smollm3-like")).generate(PROMPTS, 1, SHORT)


@pytest.mark.parametrize("staleness_policy", ["wait", "continue"])
def test_new_weights_wait_for_a_server_that_is_revived(serve, staleness_policy):
    (server,), model = serve(), tiny.model("smollm3-like")
    server.going.clear()  # as a run leaves it that is killed
    backend = backend_of([server], model, staleness_policy=staleness_policy)

    def restart(_):
        server.weights, server.before = "default", lambda _: None

    backend.sync(step=0)
    server.before = restart
    send_weights(backend, model, hold_load(server, backend))
    assert server.weights == backend.version


def test_tokens_after_a_load_that_fails_are_drawn_again(serve):
    (server,), model, failed = serve(), tiny.model("smollm3-like"), threading.Event()
    backend, answer = backend_of([server], model, staleness_policy="continue"), server.answer

    def failing(route, body):
        server.faults.clear()
        if route != "/update_weight_version" or failed.is_set():
            return answer(route, body)
        server.faults.add("dead")
        failed.set()

    backend.sync(step=0)
    server.answer, server.between = failing, lambda: failed.wait(30)
    send_weights(backend, model)


def test_an_ended_run_leaves_no_server_paused_and_no_thread(serve):
    (server,), model = serve(), tiny.model("smollm3-like")
    backend = backend_of([server], model, staleness_policy="continue")
    backend.sync()
    begun = hold_load(server, backend)
    server.between = lambda: begun.wait(30)
    backend.add_request(PROMPTS[0], 2, SHORT)
    backend.step(0)
    write(model)
    backend.sync()
    assert begun.wait(30) and not server.going.is_set()
    backend.abort_all()
    Ahead(backend).close()
    assert server.going.is_set()
    thread = backend.thread
    del backend
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_server_that_comes_back_ends_the_wait(serve, monkeypatch):
    (server,) = serve()
    backend, sampling = backend_of([server], tiny.model("smollm3-like"), timeout=0.7), SamplingParams(max_tokens=4)
    server.faults.add("dead")
    with pytest.raises(ConnectionError, match=r"no answer of a vLLM server for 0\.7 s"):
        backend.generate(PROMPTS, 2, sampling)
    assert not backend.has_unfinished_requests()
    monkeypatch.setattr(backend, "timeout", 20.0)
    monkeypatch.setattr(vllm.asyncio, "sleep", lambda _, sleep=vllm.asyncio.sleep: server.faults.clear() or sleep(0))
    assert len(backend.generate(PROMPTS, 2, sampling)) == 8


def test_new_weights_revive_a_server_while_a_request_waits_for_the_next_try(serve, monkeypatch):
    (server,), model, tried, go = serve(), tiny.model("smollm3-like"), threading.Event(), threading.Event()
    monkeypatch.setattr(vllm.asyncio, "sleep", lambda _: (tried.set(), vllm.asyncio.to_thread(go.wait, 30))[1])
    backend = backend_of([server], model)
    backend.sync()
    server.faults.add("dead")
    backend.add_request(PROMPTS[0], 2, SHORT)
    backend.step(0)
    assert tried.wait(30)
    server.faults.clear()
    write(model)
    backend.sync()
    vllm.in_thread(backend.sync).result(30)  # the revival still waits
    go.set()
    assert len(finish(backend)[0]) == 2 and server.weights == backend.version


@pytest.mark.parametrize("factor, code, told", [(1.0, 0, "No problems found"), (1.01, 2, "not have the policy's")])
def test_check_compares_a_server_with_a_folder(serve, tmp_path, capsys, factor, code, told):
    folder, (server,) = tiny.save(tmp_path / "model"), serve()
    server.load_policy(folder)
    write(server.model, factor)
    assert check(["--sampler", server.url, "--model", str(folder), "--device", "cpu"]) == code
    assert told in "".join(capsys.readouterr())


def test_a_load_that_fails_after_its_sync_is_reported_and_an_aborted_request_is_cancelled(serve):
    (server,), model, waits = serve(), tiny.model("smollm3-like"), Scripted([[1]], delay=10**9)
    backend, sampling = backend_of([server], model), SamplingParams(max_tokens=20, stop_token_ids=range(64))
    backend.add_request(PROMPTS[0], 1, sampling, request_id=0, dialogues=[waits])
    backend.sync()
    backend.step()  # the tool keeps the request in flight
    write(model)
    server.faults.add("no load")
    backend.sync()
    wait([backend.loading])
    with pytest.raises(ValueError, match="does not have the policy's weights"):
        backend.step(0)
    assert backend.abort_request(0) == 1 and waits.closed == ["aborted"] and not backend.flying
    server.faults.clear()
    backend.add_request(PROMPTS[1], 1, sampling, request_id=1, dialogues=[never := Scripted([])])
    assert backend.abort_request(1) == 0 and never.closed == ["aborted"]
    backend.add_request(PROMPTS[1], 2, sampling)
    assert len(finish(backend)) == 1
