"""What is wrong with the files of a model: told in a line or two that name the folder, the file and the field."""

import json
import pickle
import shutil

import pytest
import torch
from mistakes import Case, check, raising, spoilt

from fastgrpo import chat, doctor, evaluate, train

pytestmark = pytest.mark.usefixtures("without_curves")


class Code:
    def __reduce__(self):
        return print, ("the code of the model ran",)


def field(file="config.json", **fields):
    """A case in which a file of the model has these fields."""
    return spoilt(lambda case: case.edit(file, **fields))


def text(file, content):
    """A case in which a file of the model holds this text."""
    return spoilt(lambda case: (case.model / file).write_text(content))


def pickled(case):
    (case.model / "model.safetensors").unlink()
    (case.model / "pytorch_model.bin").write_bytes(pickle.dumps(Code(), protocol=2))


def fewer_layers(case):
    case.edit("config.json", num_hidden_layers=1, layer_types=["full_attention"])


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
BRACKETS = "[" * 100_000
NO_ROOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)
CASES = {
    # name: (command line, what its message must say)
    "GPTQ": (field(quantization_config=GPTQ), r"model/config.json: quantization_config .*\(gptq\).*use the checkpoint"),
    "AWQ": (field(quantization_config={"quant_method": "awq"}), r"config.json: quantization_config .*\(awq\)"),
    "bitsandbytes": (field(quantization_config={"load_in_4bit": True}), "quantized .None., and training needs plain"),
    "more layers than layer types": (
        field(num_hidden_layers=3), r"model/config.json: .*`num_hidden_layers` \(3\) must be equal to .*2",
    ),
    "more layers than weights": (
        field(num_hidden_layers=3, layer_types=["full_attention"] * 3), "model' lacks 12 of its weights .model.layers",
    ),
    "fewer layers than weights": (
        spoilt(fewer_layers), "model' has 12 weights of layers beyond those that config.json counts .model.layers.1",
    ),
    "another width": (
        field(intermediate_size=7), r"6 weights of other shapes than config.json .*: \(32, 64\) and not \(32, 7\)",
    ),
    "field of another type": (
        field(hidden_size="32"), "model/config.json: Field 'hidden_size' expected int, got str .value: '32'.; correct",
    ),
    "padding beyond the vocabulary": (field(pad_token_id=999), "the model of .*AssertionError: Padding_idx must be"),
    "activation that nobody knows": (field(hidden_act="x"), "the model of .*model' cannot be loaded .*KeyError: 'x'"),
    "pickled code for weights": (spoilt(pickled), "the model of .*model' .*a .bin file is damaged or holds code"),
    "brackets for a config": (text("config.json", BRACKETS), "the tokenizer of .*model' .*RecursionError"),
    "number for a config": (text("config.json", "7"), "the tokenizer of .*model' cannot be loaded .*TypeError"),
    "empty generation config": (text("generation_config.json", ""), "the generation_config.json of .*model' cannot be"),
    "null for a tokenizer": (text("tokenizer.json", "null"), "the tokenizer of .*model' cannot .*AttributeError"),
    "empty name of a model": (lambda c: c.argv(model_name_or_path=""), "no such model folder: .an empty name."),
    "name that is too long": (lambda c: c.argv(model_name_or_path="/" + "x" * 5000), "no such model folder: /xxx"),
    "no memory to load": (
        spoilt(lambda c: c.patch("fastgrpo.policy.load.AutoModelForCausalLM.from_pretrained",
                                 raising(RuntimeError(f"{NO_ROOM} 4096 bytes. Error code 12")))),
        "^error: this machine has not enough memory for another 4,096 bytes *lower max_tokens_per_microbatch",
    ),
    "no memory in a step": (
        spoilt(lambda c: c.patch("fastgrpo.trainer.GRPOTrainer.step", raising(MemoryError()))),
        "this machine has not enough memory *lower max_tokens_per_microbatch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(train.main, build(case), message, capfd)


COMMANDS = {"evaluate": (evaluate, ()), "chat": (chat, ("--prompt", "a")), "doctor": (doctor, ())}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_quantized_weights(name, tmp_path, saved, monkeypatch, capfd):
    command, flags = COMMANDS[name]
    case = Case(tmp_path, saved, monkeypatch)
    case.edit("config.json", quantization_config=GPTQ)
    model = [f"--model={case.model}"] if name == "doctor" else [str(case.model)]
    check(command.main, [*model, *flags], r"model/config.json: quantization_config .*\(gptq\)", capfd)


SINKS = (
    "transformers.modeling_utils.lazy_import_flash_attention",
    "transformers.modeling_utils.lazy_import_paged_flash_attention",
    "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
    "transformers.integrations.hub_kernels.lazy_load_kernel",
)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/x", "paged|any/kernel", {"": "any/kernel"}, "flash_attention_2"])
def test_no_field_makes_a_command_look_for_a_kernel(name, value, tmp_path, saved, monkeypatch, capfd):
    case, asked = Case(tmp_path, saved, monkeypatch), []
    for sink in SINKS:
        monkeypatch.setattr(sink, lambda *args, **kwargs: asked.append(args))
    case.edit("config.json", **{name: value})
    assert doctor.main(["--model", str(case.model)]) == 0
    assert chat.main([str(case.model), "--prompt", "a", "-n", "1", "--device", "cpu"]) == 0
    assert asked == [], capfd.readouterr().err


def test_a_resumed_run_reads_no_kernel_from_its_checkpoint(tmp_path, saved, monkeypatch):
    from fastgrpo.policy.load import load_policy, read_weights

    case, asked = Case(tmp_path, saved, monkeypatch), []
    policy, _ = load_policy(case.model, device="cpu")
    case.edit("config.json", attn_implementation="any/kernel", quantization_config=GPTQ)
    for sink in SINKS:
        monkeypatch.setattr(sink, lambda *args, **kwargs: asked.append(args))
    weights = read_weights(policy, case.model)
    assert asked == [] and all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())


def test_a_model_in_the_cache_of_the_hub_is_loaded_and_checked(tmp_path, saved, monkeypatch, capfd):
    repo = tmp_path / "models--org--name"
    shutil.copytree(saved, repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    argv = ["org/name", "--prompt", "a", "-n", "1", "--device", "cpu"]
    assert chat.main(argv) == 0
    config = json.loads((repo / "snapshots" / "abc" / "config.json").read_text())
    (repo / "snapshots" / "abc" / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    check(chat.main, argv, r"org/name/config.json: quantization_config .*\(gptq\)", capfd)
