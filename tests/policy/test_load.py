"""Loading a policy: files, GGUF files too, device, dtype, stop tokens, and errors."""

import json

import pytest
import tiny
import tiny_gguf
import torch

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.policy import load
from fastgrpo.policy.characters import character_model
from fastgrpo.policy.device import cast, choose_device, choose_dtype, package_obstacle
from fastgrpo.policy.fit import check_rows, examples_of
from fastgrpo.policy.gguf import find_gguf
from fastgrpo.policy.load import load_policy, policy_and_tokenizer, read_config, read_weights, stop_token_ids
from fastgrpo.policy.model import Policy
from fastgrpo.tools.prompts import Prompts
from fastgrpo.train import main


@pytest.mark.parametrize("named, ids", [(None, (1,)), (1, (1,)), (7, (1, 7)), ([9, 1, 4], (1, 4, 9)), (50256, (1,))])
def test_a_completion_ends_at_the_tokenizers_token_and_at_the_configs(named, ids):
    """50256 is the default of a GPT-2 config, whatever its vocabulary: no token of this model has it."""
    policy, tokenizer = Policy.of(tiny.model()), tiny.tokenizer()
    policy.module.generation_config.eos_token_id = named
    assert stop_token_ids(policy, tokenizer) == ids
    if named in (None, 50256):
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="no completion could end"):
            stop_token_ids(policy, tokenizer)


def test_every_loader_applies_use_liger_kernel(saved, monkeypatch):
    asked, config = [], GRPOConfig(device="cpu", use_liger_kernel=False)
    monkeypatch.setattr("fastgrpo.policy.load.apply_liger", lambda model, wanted: asked.append(wanted))
    load_policy(saved, device="cpu", use_liger_kernel=False)
    policy_and_tokenizer(saved, None, config)
    policy_and_tokenizer(tiny.model(vocab_size=258), tiny.tokenizer(), config)
    assert asked == [False] * 3


@pytest.mark.parametrize("change, message", [
    ({"num_hidden_layers": 1}, "lacks 12 "), ({"num_hidden_layers": 3}, "has 12 weights of layers beyond"),
    ({"intermediate_size": 32}, "has 6 weights of other shapes"),
])  # fmt: skip
def test_rejects_weights_of_another_model(tmp_path, change, message):
    tiny.model(**change).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_weights(Policy.of(tiny.model()), tmp_path)


def test_a_class_that_changes_the_forward_of_a_causal_lm_is_refused():
    model = tiny.model(vocab_size=258)
    model.__class__ = type("Own", (type(model),), {"forward": lambda self, **given: None})
    with pytest.raises(ValueError, match=r"Own.forward overrides that of Qwen2ForCausalLM"):
        policy_and_tokenizer(model, tiny.tokenizer(), GRPOConfig(device="cpu"))


def test_a_model_of_peft_is_refused_and_its_merged_model_taken():
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: lora)")
    model = peft.get_peft_model(tiny.model(vocab_size=258), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"merge_and_unload\(\)"):
        policy_and_tokenizer(model, tiny.tokenizer(), GRPOConfig(device="cpu"))
    policy_and_tokenizer(model.merge_and_unload(), tiny.tokenizer(), GRPOConfig(device="cpu"))
    with pytest.raises(ValueError, match="inv_freq of the model was cast to 16 bits"):
        policy_and_tokenizer(tiny.model(vocab_size=258).half(), tiny.tokenizer(), GRPOConfig(device="cpu"))


@pytest.fixture
def folder(tmp_path):
    """Writes the config of a tiny model with some fields changed, and returns its folder."""

    def write(**fields):
        tiny.config().save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return tmp_path

    return write


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"dtype": None}, {"quantization_config": None}])
def test_configs_are_read_also_those_of_adapters_base(folder, tmp_path_factory, fields):
    adapters, base = tmp_path_factory.mktemp("adapters"), folder(**fields)
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert read_config(base).num_hidden_layers == read_config(adapters).num_hidden_layers == 2
    assert load.read_json(base, "generation_config.json") == {}  # there is none
    base.rename(adapters / "moved")
    with pytest.raises(ValueError, match=r"base model cannot be used: no such model folder: .*; correct"):
        read_config(adapters)


def test_configs_choose_no_code(tmp_path):
    """A kernel of the hub would be downloaded and run."""
    kernel = {name: "any/kernel" for name in ("attn_implementation", "_attn_implementation", "_experts_implementation")}
    inner = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "head_dim": 8, **kernel}
    config = {"model_type": "gemma3", "text_config": inner, "vision_config": inner, **kernel}
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = read_config(tmp_path)
    for part in (config, config.text_config, config.vision_config):
        assert part._attn_implementation is None and part._experts_implementation is None
    with pytest.raises(ValueError, match="--trust_remote_code"), load.loading("org/name", "x"):
        raise ValueError("pass trust_remote_code=True")


@pytest.mark.parametrize(
    "fields", [{"quantization_config": {"quant_method": "fp8"}}, {"rms_norm_eps": "x"}, {"model_type": None}]
)
def test_a_field_that_cannot_be_used_is_named_with_its_file(folder, fields):
    with pytest.raises(ValueError, match=r"config\.json.*" + next(iter(fields)).replace("model_type", "loaded")):
        read_config(folder(**fields))


@pytest.mark.parametrize("count, name, device", [(0, "auto", "cpu"), (2, "auto", "cuda"), (2, "cpu", "cpu"),
                                                 (0, "cuda", None), (2, "cuda:2", None)])  # fmt: skip
def test_auto_is_the_gpu_where_there_is_one(monkeypatch, count, name, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if device is None:
        with pytest.raises(ValueError, match="device"):
            choose_device(name)
    else:
        assert choose_device(name) == torch.device(device)


def test_the_folder_of_a_run_is_no_model(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="is the folder of a run; name a model in it"):
        load.load_tokenizer(tmp_path)


def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu_and_the_rotary_frequencies_stay_exact():
    assert choose_dtype("auto", torch.device("cuda")) == choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    model = tiny.model()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_a_package_that_does_not_load_is_named_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package_oserror.py").write_text("raise OSError('undefined symbol')")
    assert "OSError: undefined symbol" in package_obstacle("package_oserror")
    assert package_obstacle("json.decoder") is None
    assert package_obstacle("some_package.inside") == "needs the package: pip install some-package"


def test_character_models_follow_their_seed_and_refuse_unknown_characters():
    (first, tokenizer), (again, _), (other, _) = (
        character_model("ab=", seed, hidden_size=32, layers=2, heads=2, positions=20) for seed in (3, 3, 4)
    )
    assert tokenizer("b=a")["input_ids"] == [2, 3, 1] and tokenizer.decode([2, 3, 1]) == "b=a"
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (4, 0, 0)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))
    check_rows([{"prompt": "ab="}, {"prompt": "a<eos>b"}], Prompts(tokenizer), Policy.of(first), 8)
    with pytest.raises(ValueError, match=r"data row 1: .*'!z'"):
        check_rows([{"prompt": "ab="}, {"prompt": "ab!z="}], Prompts(tokenizer), Policy.of(first), 8)
    with pytest.raises(ValueError, match=r"data row 0: the completion .*'!z'"):
        list(examples_of([{"prompt": "ab=", "completion": "ab!z="}], tokenizer, Policy.of(first), [0]))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, *tiny_gguf.save(path)


def test_weights_config_and_tokenizer_are_those_of_the_model(written, tmp_path):
    path, model, tokenizer = written
    (tmp_path / "TINY.GGUF").symlink_to(path)
    for source in (path, path.parent, tmp_path):
        weights = load.load_model(source, device="cpu").state_dict()
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
    tiny_gguf.save(tmp_path / "chat.gguf", end="<|im_end|>")
    assert load.load_model(tmp_path / "chat.gguf", device="cpu").generation_config.eos_token_id == [1, 259]
    tiny_gguf.save(tmp_path / "scaled.gguf", scaling="linear")
    with pytest.raises(ValueError, match="scaled rotary frequencies"):
        load.load_model(tmp_path / "scaled.gguf", device="cpu")
    templated = [t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in (read, tokenizer)]
    assert templated[0] == templated[1]


def test_a_run_on_a_gguf_file_saves_ordinary_checkpoints(written, tmp_path, without_curves):
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
    after = load.load_model(saved, device="cpu").state_dict()
    assert all(torch.allclose(value, after[name], atol=1e-6) for name, value in model.state_dict().items())
    tokenizer = load.load_tokenizer(saved)
    assert tokenizer.eos_token == "<eos>" and tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert main([*argv, "2", "--resume_from_checkpoint", "auto"]) == 0
