"""A training run that serves its policy: replies have the weights of the moment, and the run is not changed."""

import socket
import threading
from functools import partial

import httpx
import pytest
import tiny
import torch
from tool_runs import make_trainer
from transformers import TrainerCallback

PROMPT = [5, 6, 7]


class Client(TrainerCallback):
    """Sends requests in a thread, and ends the training when it has seen enough; records the log-probs of each step."""

    def __init__(self):
        self.done, self.expected, self.single, self.long, self.error = threading.Event(), {}, [], [], None

    def on_step_begin(self, args, state, control, model, **_):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0, -1]
        self.expected[str(2 * state.global_step)] = logits.log_softmax(-1)
        if state.global_step == 0:
            self.thread = threading.Thread(target=self.ask, args=(self.trainer.live.url,))
            self.thread.start()

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = self.done.is_set()

    def ask(self, url):
        try:
            assert httpx.get(f"{url}/models").status_code == 401
            with httpx.Client(timeout=60, headers={"authorization": "Bearer key"}) as client:
                post = partial(client.post, url.replace("/v1", "/inference/v1/generate"))
                while len({version for version, *_ in self.single}) < 3:
                    self.single += drawn(post, 1)
                self.long = drawn(post, 300)
                assert client.get(f"{url}/models").json()["data"][0]["id"] == "policy"
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def drawn(post, count):
    sampling = {"max_tokens": count, "ignore_eos": True, "logprobs": 0}
    [choice] = post(json={"token_ids": PROMPT, "sampling_params": sampling}).raise_for_status().json()["choices"]
    logps = [each["logprob"] for each in choice["logprobs"]["content"]]
    versions = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
    return list(zip(versions, choice["token_ids"], logps, strict=True))


def make(tmp_path, name, **how):
    how = {"lr_scheduler_type": "constant", "updates_per_rollout": 2, "log_completions": True, "logging_steps": 1} | how
    return make_trainer(tmp_path, model=tiny.model(vocab_size=258, max_position_embeddings=512), name=name, **how)


def test_a_run_serves_its_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGRPO_API_KEY", "key")
    trainer, client = make(tmp_path, "served", serve_port=0, max_steps=10_000), Client()
    client.trainer = trainer
    trainer.add_callback(client)
    trainer.train()
    client.thread.join(60)
    assert client.error is None
    known = [(version, token, logp) for version, token, logp in client.single if version in client.expected]
    expected = [client.expected[version][token].item() for version, token, _ in known]
    assert known and expected == pytest.approx([logp for *_, logp in known], abs=1e-5)
    versions = [int(version) for version, *_ in client.long]
    assert len(versions) == 300 and versions == sorted(versions) and versions[-1] > versions[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(trainer.live.url)
    make(tmp_path, "alone", max_steps=trainer.state.global_step).train()
    mine, other = ((tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("served", "alone"))
    assert len(mine) > 0 and mine == other


def test_failures_stay_in_the_server(tmp_path, monkeypatch, caplog):
    trainer = make(tmp_path, "run", serve_port=0)
    monkeypatch.setattr(trainer.live.scheduler, "_step", lambda: 1 / 0)
    trainer.train()
    assert trainer.state.global_step == 2 and "serving failed" in caplog.text and not trainer.live.scheduler.alive


def test_refuses_what_cannot_be_served(tmp_path):
    with pytest.raises(ValueError, match="serve_port"):
        make(tmp_path, "run", serve_port=0, rollout_backend="hf")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="--serve_port"):
        make(tmp_path, "run", serve_port=taken.getsockname()[1])
    assert not (tmp_path / "run").exists()
