"""A GGUF file is read as the model and the tokenizer that it was written from, and trains as any model does."""

import json

import pytest
import tiny
import tiny_gguf
import torch

from fastgrpo.policy.gguf import find_gguf
from fastgrpo.policy.load import load_model, load_policy, load_tokenizer, read_config, stop_token_ids
from fastgrpo.train import main

pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, *tiny_gguf.save(path)


def test_weights_config_and_tokenizer_are_those_of_the_model(written, tmp_path):
    path, model, tokenizer = written
    (tmp_path / "TINY.GGUF").symlink_to(path)
    for source in (path, path.parent, tmp_path):
        weights = load_model(source, device="cpu").state_dict()
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    config = read_config(path)
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "vocab_size"):
        assert getattr(config, name) == getattr(model.config, name)
    policy, read = load_policy(path, dtype="bfloat16", device="cpu")
    assert policy.dtype == torch.bfloat16
    text, messages = "a b\n ünï 7 + 5", [{"role": "user", "content": "What is 7 + 5?"}]
    assert read(text).input_ids == tokenizer(text).input_ids and read.decode(read(text).input_ids) == text
    assert (read.eos_token, read.pad_token, read.bos_token) == ("<eos>", "<pad>", "<pad>")
    assert stop_token_ids(policy, read) == (tokenizer.eos_token_id,)
    templated = [t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in (read, tokenizer)]
    assert templated[0] == templated[1]


def test_a_run_on_a_gguf_file_saves_ordinary_checkpoints(written, tmp_path):
    path, model, _ = written
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    argv = (
        f"--task gsm8k --dataset_name {rows} --model_name_or_path {path} --output_dir {tmp_path / 'run'} --device cpu "
        "--prompts_per_step 1 --num_generations 2 --max_completion_length 4 --learning_rate 1e-9 --max_steps"
    ).split()
    assert main([*argv, "1"]) == 0
    saved = tmp_path / "run" / "checkpoint-1"
    assert find_gguf(saved) is None and "quantization_config" not in json.loads((saved / "config.json").read_text())
    after = load_model(saved, device="cpu").state_dict()
    assert all(torch.allclose(value, after[name], atol=1e-6) for name, value in model.state_dict().items())
    tokenizer = load_tokenizer(saved)
    assert tokenizer.eos_token == "<eos>" and tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert main([*argv, "2", "--resume_from_checkpoint", "auto"]) == 0
