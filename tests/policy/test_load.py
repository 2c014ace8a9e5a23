"""Loading a policy: where it goes, in which precision, what ends a completion, and what does not fit is named."""

import pytest
import tiny
import torch

from fastgrpo.policy.load import cast, check_vocabulary, choose_device, choose_dtype, load_policy, stop_token_ids
from fastgrpo.policy.model import Policy


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see this many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    "count, name, device",
    [(0, "auto", "cpu"), (0, "cpu", "cpu"), (2, "auto", "cuda"), (2, "cuda:1", "cuda:1"), (2, "cpu", "cpu")],
)
def test_auto_is_the_gpu_where_there_is_one(gpus, count, name, device):
    gpus(count)
    assert choose_device(name) == torch.device(device)


@pytest.mark.parametrize(
    "count, name, match",
    [
        (0, "cuda", "torch sees no CUDA device; use --device cpu"),
        (2, "cuda:2", r"torch sees 2 CUDA device\(s\)"),
        (2, "gpu", "device must be cuda, cuda:N, cpu or auto, got 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(gpus, count, name, match):
    gpus(count)
    with pytest.raises(ValueError, match=match):
        choose_device(name)


def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu():
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


def test_a_cast_leaves_the_rotary_frequencies_exact():
    model = tiny.model()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("configured, ids", [(None, (1,)), (1, (1,)), (7, (1, 7)), ([9, 1, 4], (1, 4, 9))])
def test_a_completion_ends_at_the_tokenizers_token_and_at_the_configs(configured, ids):
    policy = Policy.of(tiny.model())
    policy.module.generation_config.eos_token_id = configured
    assert stop_token_ids(policy, tiny.tokenizer()) == ids


def test_without_an_end_token_no_completion_could_end():
    policy, tokenizer = Policy.of(tiny.model()), tiny.tokenizer()
    policy.module.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no end token"):
        stop_token_ids(policy, tokenizer)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused():
    with pytest.raises(ValueError, match="the tokenizer has 258 tokens, the model's embedding only 64"):
        check_vocabulary(Policy.of(tiny.model(vocab_size=64)), tiny.tokenizer())
    check_vocabulary(Policy.of(tiny.model(vocab_size=258)), tiny.tokenizer())


def test_a_folder_gives_the_policy_and_its_tokenizer(tmp_path):
    policy, tokenizer = load_policy(tiny.save(tmp_path / "model"), device="cpu")
    assert isinstance(policy, Policy) and policy.dtype == torch.float32
    assert tokenizer.decode(tokenizer("ab")["input_ids"]) == "ab"
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        load_policy(tmp_path / "nowhere")
