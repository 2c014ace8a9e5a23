"""The vLLM backend with a real server on a CPU (make test-vllm)."""

import os

import pytest
import torch
from runs import lines, make_trainer
from updates import asynchronous, mixed_samples, rising

from benchmarks.vllm_server import VLLMServer
from fastgrpo.policy.load import load_policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.vllm import GENERATE, Server, VLLMBackend, compare

PYTHON, MODEL = (os.environ.get(f"FASTGRPO_VLLM{name}", "") for name in ("", "_MODEL"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="needs make test-vllm")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder that vLLM reads; the recipe's has a GGUF file."""
    policy, tokenizer = load_policy(MODEL, dtype="float32", device="cpu")
    folder = tmp_path_factory.mktemp("model")
    policy.module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(model):
    made = VLLMServer(model)
    yield made
    made.kill()


def test_weights_of_an_update_give_the_engines_tokens_and_a_stale_head_fails_the_probe(server, model, monkeypatch):
    url = server.url
    policy, tokenizer = load_policy(model, dtype="float32", device="cpu")
    prompts = [tokenizer(text)["input_ids"] for text in ("What is 3 + 4?", "Name a colour.", "Count to five:")]
    sampling = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(0, 2))
    backend, engine = VLLMBackend(policy, base_urls=[url], timeout=1800), RolloutEngine(policy)
    for _ in range(2):
        for one, other in zip(*(it.generate(prompts, 1, sampling) for it in (backend, engine)), strict=True):
            assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
            torch.testing.assert_close(one.logps, other.logps, atol=1e-3, rtol=0)
        assert compare(policy, url)[0] < 1e-3
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)
    call = Server.call

    def without_extension(self, method, route, timeout=None, /, **body):
        if route == "/collective_rpc":
            body = {"method": "reload_weights", "kwargs": {"weights_path": body["args"][0]}}
        return call(self, method, route, timeout, **body)

    monkeypatch.setattr(Server, "call", without_extension)
    with pytest.raises(ValueError, match="does not have the policy's weights"):
        backend.generate(prompts, 1, sampling)


@pytest.mark.usefixtures("without_curves")
def test_training_goes_on_when_the_server_is_killed_within_a_step(server, model, tmp_path, monkeypatch):
    call, drawn = Server.call, []

    async def killed(self, method, route, timeout=None, /, **body):
        if route == GENERATE:
            drawn.append(body)
            if len(drawn) == 3:  # the first group of the second step
                server.kill()
                server.start()
        return await call(self, method, route, timeout, **body)

    monkeypatch.setattr(Server, "call", killed)
    how = {"max_steps": 3, "prompts_per_step": 2, "max_completion_length": 16, "learning_rate": 1e-5}
    how |= {"rollout_backend": "vllm", "vllm_server_base_url": server.url, "vllm_server_timeout": 1800}
    make_trainer(tmp_path, rising, model=model, **how).train()
    steps = [row for row in lines(tmp_path / "run") if "sampler/kl" in row]
    assert len(drawn) > 6 and len(steps) == 3 and all(row["sampler/logp_gap_max"] < 1e-3 for row in steps)


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize("policy", ["wait", "continue", "adapters"])
def test_tokens_of_asynchronous_rollouts_have_the_version_of_their_weights(request, server, model, tmp_path, policy):
    trained = {}
    how = {"model": model, "prompts_per_step": 2, "max_completion_length": 48, "learning_rate": 1e-5, "save_steps": 5}
    how |= {"vllm_server_timeout": 1800, "staleness_policy": "continue" if policy == "continue" else "wait"}
    if policy == "adapters":
        server.kill()  # two servers are too large for a small machine
        server = VLLMServer(model, options="--enable-lora", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
        request.addfinalizer(server.kill)
        how |= {"use_peft": True, "lora_target_modules": "all-linear", "learning_rate": 1e-3}
    asynchronous(tmp_path, server.url, trained, **how).train()
    mixed = mixed_samples(trained, 2, 1e-3, mixed_too=False)  # vLLM keeps the keys and values of earlier tokens
    assert policy == "continue" or not mixed
    rows = [row for row in lines(tmp_path / "run") if "sampler/kl" in row]
    assert len(rows) == 5 and min(row["sampler/version_min"] - step for step, row in enumerate(rows)) == -2
