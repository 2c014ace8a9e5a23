"""Rollouts on vLLM servers: what they draw, that they have the trained weights, and servers that fail."""

import copy
import gc
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import torch
from dialogues import Scripted
from drawing import PROMPTS, finish, ids_of
from fake_vllm import FakeVLLM
from runs import lines, make_trainer
from updates import asynchronous, mixed_samples, rising

from fastgrpo.check import main as check
from fastgrpo.rollout import vllm
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.vllm import VLLMBackend

STOPS, SHORT = (1, 2, 3), SamplingParams(max_tokens=4)


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


def write(model, factor=1.01):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def test_greedy_tokens_equal_the_engines(serve):
    model, sampling = tiny.model("smollm3-like"), SamplingParams(temperature=0, max_tokens=9, stop_token_ids=STOPS)
    backend, engine = backend_of(serve(2), model), RolloutEngine(model)
    for _ in range(2):
        for one, other in zip(*(it.generate(PROMPTS, 2, sampling) for it in (backend, engine)), strict=True):
            assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
            torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)
        write(model)  # both draw with the new weights


def test_draws_depend_on_seed_and_prompt_and_not_on_the_servers(serve):
    model, sampling = tiny.model("smollm3-like"), SamplingParams(temperature=1.3, max_tokens=9, seed=4)
    one = backend_of(serve(1), model).generate(PROMPTS, 3, sampling)
    servers = serve(3)
    other = backend_of(servers, model, max_num_seqs=6).generate(PROMPTS, 3, sampling)
    assert ids_of(one) == ids_of(other) and len({*map(tuple, ids_of(one))}) == 12
    assert sum(server.drawn for server in servers) == 12 and max(server.drawn for server in servers) < 12
    for i, rollout in enumerate(one):
        ids = PROMPTS[i // 3] + rollout.ids
        logps = (model(torch.tensor([ids])).logits[0] / 1.3).log_softmax(-1)
        logps = logps[:-1].gather(1, torch.tensor(ids[1:])[:, None])[-9:, 0]
        torch.testing.assert_close(rollout.logps, logps, atol=1e-5, rtol=0)


def test_turns_of_tools_follow_each_other(serve):
    model, sampling = tiny.model("smollm3-like"), SamplingParams(temperature=0, max_tokens=20, stop_token_ids=range(32))
    found = []
    for make in (RolloutEngine, lambda model: backend_of(serve(2), model)):
        scripts = [Scripted([[9, 8, 7], [3, 4]]), Scripted([[12]]), Scripted([]), Scripted([[6] * 60])]
        backend = make(model)
        backend.add_request(PROMPTS[0], 4, sampling, request_id=0, dialogues=scripts)
        found.append(finish(backend)[0])
        assert [script.closed for script in scripts] == [[sample.finish_reason] for sample in found[-1]]
    for one, other in zip(*found, strict=True):
        assert (one.ids, one.tool_mask, one.finish_reason) == (other.ids, other.tool_mask, other.finish_reason)
        torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("how", [{}, {"use_peft": True, "lora_target_modules": "all-linear"}], ids=["full", "lora"])
def test_training_draws_with_the_weights_of_each_step(serve, tmp_path, how):
    (server,) = serve()
    how |= {"max_steps": 3, "learning_rate": 1e-2, "rollout_backend": "vllm", "vllm_server_base_url": server.url}
    make_trainer(tmp_path, rising, **how).train()
    steps = [row for row in lines(tmp_path / "run") if "sampler/kl" in row]
    assert len(steps) == 3 and all(row["sampler/logp_gap_max"] < 1e-4 and row["sampler/kl"] < 1e-8 for row in steps)
    assert server.weights.endswith("-4")


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("staleness_policy", ["wait", "continue"])
def test_each_token_has_the_log_prob_and_the_version_of_the_weights_that_drew_it(serve, tmp_path, staleness_policy):
    """Servers draw up to two steps ahead. A completion in flight ends before they load new weights, or goes on."""
    (server,), trained = serve(), {}

    def between():
        deadline = time.monotonic() + 30
        while 0 in trained and server.weights.endswith("-2") and time.monotonic() < deadline:
            time.sleep(0.01)  # until the weights of the second step arrive

    server.between = between if staleness_policy == "continue" else server.between
    asynchronous(tmp_path, server.url, trained, staleness_policy=staleness_policy, max_num_seqs=16).train()
    assert bool(mixed_samples(trained, 2, 1e-5)) == (staleness_policy == "continue")
    steps = [row for row in lines(tmp_path / "run") if "sampler/kl" in row]
    assert steps[1]["sampler/version_min"] == 0 and all(row["sampler/idle_s"] >= 0 for row in steps)
    assert all(sum(row[f"sampler/staleness_{age}"] for age in range(3)) == pytest.approx(1) for row in steps)


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("finished", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kills_neither_repeat_nor_lose_prompts_of_asynchronous_rollouts(serve, tmp_path, finished):
    """Each step trains on the rows of a run without kills. What had finished at a checkpoint is not drawn again."""
    (server,), whole, parts, drawn = serve(), {}, {}, []
    asynchronous(tmp_path, server.url, whole, "whole").train()

    def failing(trainer_state, completions, **columns):
        if trainer_state.global_step == len(drawn) < 5:
            raise RuntimeError("killed")
        return rising(completions)

    for kill in range(1, 6):
        drawn.append(server.drawn)
        trainer = asynchronous(tmp_path, server.url, parts, "parts", failing, resume_from_checkpoint="auto")
        if finished:
            save = trainer._save
            trainer._save = lambda step, trainer=trainer, save=save: (trainer.ahead.settle(), save(step))
        if kill < 5:
            with pytest.raises(ValueError, match="killed"):
                trainer.train()
        else:
            trainer.train()
    prompts = [
        {step: [sample.prompt for sample in samples] for step, (_, samples) in run.items()} for run in (whole, parts)
    ]
    assert prompts[0] == prompts[1] and len(whole) == 5
    if finished:
        assert server.drawn - drawn[0] <= (5 + 4) * 16  # a kill loses the batch that was begun in its step


@pytest.mark.usefixtures("without_curves")
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


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("learning_rate", [1e-2, 1e-6])
@pytest.mark.parametrize("fault", ["no load", "old head"])
def test_a_server_with_old_weights_stops_the_run_before_it_trains(serve, tmp_path, fault, learning_rate):
    """Also where the update is far smaller than the tolerance."""
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


@pytest.mark.parametrize("fault", ["no load", "old head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_that_keeps_other_weights_fails_the_first_probe(serve, dtype, fault):
    """Also where they are so close that the tolerance would let them pass, as after a resumption."""
    (server,), model = serve(), tiny.model("smollm3-like").to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    server.model = copy.deepcopy(model)
    write(server.model)
    server.faults.add(fault)
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
    servers = serve()
    backend = backend_of(servers, tiny.model("smollm3-like"))
    monkeypatch.setattr(servers[0], "load_policy", lambda path: Path(path, "none").read_text())
    with pytest.raises(ValueError, match=r"refused /collective_rpc with code 500: .*No such file"):
        backend.generate(PROMPTS, 1, SHORT)


@pytest.mark.parametrize("fault", ["dead", "silent", "restarted"])
def test_requests_of_a_server_that_fails_go_to_another_one(serve, fault, monkeypatch):
    monkeypatch.setattr(vllm, "PATIENCE", 0.3)
    model, sampling = tiny.model("smollm3-like"), SamplingParams(max_tokens=9, seed=4)
    expected = ids_of(backend_of(serve(), model).generate(PROMPTS, 2, sampling))
    servers = failing, other = serve(2)
    backend = backend_of(servers, model)
    backend.generate(PROMPTS, 2, sampling)

    def fail(_):  # in the middle of a request
        if fault == "restarted":
            failing.weights, failing.model = "default", tiny.model("smollm3-like", seed=9)
        else:
            failing.faults.add(fault)

    failing.before = fail
    assert ids_of(backend.generate(PROMPTS, 2, sampling)) == expected
    drawn, failing.before = failing.drawn, lambda _: None
    failing.faults.clear()
    write(model)  # it is tried again with the next weights
    again = ids_of(backend.generate(PROMPTS, 2, sampling))
    assert again == ids_of(backend_of(serve(), model).generate(PROMPTS, 2, sampling)) and failing.drawn > drawn
    assert failing.weights == other.weights


def test_a_completion_that_the_server_cuts_is_an_error(serve):
    (server,) = serve()
    server.faults.add("cut")
    with pytest.raises(ValueError, match=r"stopped after 2 of 4 tokens .* --max-model-len"):
        backend_of([server], tiny.model("smollm3-like")).generate(PROMPTS, 1, SHORT)


def test_an_ended_backend_ends_its_thread(serve):
    backend = backend_of(serve(), tiny.model("smollm3-like"))
    backend.generate(PROMPTS, 1, SHORT)
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


@pytest.mark.parametrize("factor, code, told", [(1.0, 0, "No problems found"), (1.01, 2, "not have the policy's")])
def test_check_compares_a_server_with_a_folder(serve, tmp_path, capsys, factor, code, told):
    folder, (server,) = tiny.save(tmp_path / "model"), serve()
    server.load_policy(folder)
    write(server.model, factor)
    assert check(["--sampler", server.url, "--model", str(folder), "--device", "cpu"]) == code
    assert told in "".join(capsys.readouterr())


def test_an_aborted_request_is_cancelled(serve):
    backend, waits = backend_of(serve(), tiny.model("smollm3-like")), Scripted([[1]], delay=10**9)
    sampling = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=range(64))
    backend.add_request(PROMPTS[0], 1, sampling, request_id=0, dialogues=[waits])
    backend.sync()
    backend.step()
    assert backend.abort_request(0) == 1 and waits.closed == ["aborted"] and not backend.flying
    backend.add_request(PROMPTS[1], 2, sampling)
    assert len(finish(backend)) == 1
