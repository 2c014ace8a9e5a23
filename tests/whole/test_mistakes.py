"""Mistakes that a person can mend: every command exits with code 2 and names the cause in a line or two."""

import errno
import importlib
import json
import os
import pickle
import shutil

import pytest
import tiny
import tiny_gguf
import torch
from mistakes import Case, check

from fastgrpo import train

pytestmark = pytest.mark.usefixtures("without_curves")
LONG = "x" * 300
RUN = "--task dataset --dataset_name {rows} --reward_funcs own_rewards:share --device cpu --max_completion_length 2"
LINES = {
    # command line: what the message names
    "train --learning_rat 1": "learning_rat.*did you mean --learning_rate",
    "train gsm8k": "gsm8k",
    "train --beta": "'--beta'",
    "train --gradient_checkpointing maybe": "gradient_checkpointing",
    "train --num_generations 1": "num_generations must be at least 2, got 1",
    "train --max_steps " + "9" * 400: "max_steps",
    "train --device gpu": "device",
    "train --max_num_seqs 4": "max_num_seqs=4 .* num_generations=8",
    "train --task gsm8k --updates_per_rollout 9": "updates_per_rollout=9",
    "train --task gsm9k": "task .*'gsm9k'",
    "train --task ../elsewhere": "task",
    "train --dataset_name x.jsonl": "arithmetic makes its own data",
    "train --task bandit --beta 0": "pass --kl k3",  # which the bandit's recipe sets
    "train --lr_scheduler_type cosin": "lr_scheduler_type 'cosin'",
    "train --config no.yaml": "no.yaml",
    "train --config .": r"cannot be read: \.",
    "train --config {model}/model.safetensors": "safetensors is not YAML",
    f"train --config {LONG}": "too long",
    f"train {RUN} --model_name_or_path {{model}} --output_dir {LONG}": "output_dir",
    f"train {RUN} --model_name_or_path {{model}} --output_dir {{rows}}/x": "output_dir",
    f"train {RUN} --model_name_or_path {LONG}": "x+. cannot be loaded",
    f"train {RUN} --model_name_or_path ./no/such": "no such model folder: ./no/such",
    f"train {RUN} --model_name_or_path none.gguf": "none.gguf",
    "train --sweep num_generation=2,4": "--sweep: .*'num_generations'",
    "train --sweep beta": "--sweep .*'beta'",
    "train --sweep num_generations=4,1": "num_generations",
    "train --beta 1 --sweep beta=0,1": "beta is set by the sweep",
    "train --sweep output_dir=a,b": "output_dir is set by the sweep",
    f"train {RUN} --sweep model_name_or_path={{model}},/no/such": "no such model folder: /no/such",
    f"train {RUN} --model_name_or_path {{model}} --output_dir {{model}} --sweep_seeds 0,1": "holds no sweep",
    "evaluate": "model",
    "evaluate /no/such": "/no/such",
    "evaluate {model} --task dataset --dataset_name . --reward_funcs own_rewards:share": "split 'test'",
    "evaluate {model} --output {rows}": "train.jsonl exists",
    "evaluate m --learning_rate 1": "--learning_rate",
    f"evaluate {{model}} {RUN} --output {{rows}}/x": "train.jsonl/x",
    "chat": "an argument is missing",
    "chat {model} --top_p 2": "top_p",
    "chat {model} --prompt " + "abc" * 700: "2100 tokens",
    "doctor --model /no/such": "/no/such",
    "doctor --beta 1": "--model",
    "report": "folder of a run",
    "report .": "is not the folder of a run",
    f"report {LONG}": "too long",
    "sft --model_name_or_path {model} --train_file {rows}/x --output_dir {run}": "train.jsonl/x",
    f"distill {{model}} {RUN} --output {LONG}": "too long",
}  # fmt: skip


@pytest.fixture
def case(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Case(tmp_path, saved, monkeypatch)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_rejects_a_wrong_command_line(line, case, capfd):
    """Nothing may start: no warm start of the built-in example, no run of a sweep, no folder."""
    case.patch("fastgrpo.train._make_policy", lambda *_: pytest.fail("the warm start began"))
    case.patch("fastgrpo.run.sweep.COMMAND", ("no such command",))
    command, *argv = line.format(**vars(case)).split(" ")
    check(importlib.import_module(f"fastgrpo.{command}").main, argv, LINES[line], capfd)
    assert not case.run.exists() and not (case.folder / "runs").exists()


@pytest.mark.parametrize("text, named", [("beta: much", "beta .*'much'"), ("beta: 1\nbeta: 2", "beta is given twice")])
def test_rejects_a_wrong_recipe(text, named, tmp_path, capfd):
    (tmp_path / "mine.yaml").write_text(text)
    check(train.main, ["--config", str(tmp_path / "mine.yaml")], named, capfd)


def written(file, content):
    """Write a file of the model."""
    return lambda c: (c.model / file).write_text(content)


class Code:
    def __reduce__(self):
        return print, ("the code of the model ran",)


def pickled(c):
    (c.model / "model.safetensors").unlink()
    (c.model / "pytorch_model.bin").write_bytes(pickle.dumps(Code(), protocol=2))


def gguf(change=lambda file: None, **options):
    """Replace the folder by a GGUF file."""

    def spoil(c):
        shutil.rmtree(c.model)
        c.model.mkdir()
        tiny_gguf.save(c.model / "tiny.gguf", chat=False, **options)
        change(c.model / "tiny.gguf")

    return spoil


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
MODELS = {
    # name: (how the model is spoilt, what the message names)
    "an empty folder": (lambda c: shutil.rmtree(c.model) or c.model.mkdir(), "model' cannot be loaded"),
    "damaged config": (written("config.json", "{oops"), "model' cannot be loaded.*damaged"),
    "brackets for a config": (written("config.json", "[" * 100_000), "model'"),
    "unknown activation": (lambda c: c.edit("config.json", hidden_act="x"), "model' cannot be loaded"),
    "null for a tokenizer": (written("tokenizer.json", "null"), "the tokenizer of .*model'"),
    "empty generation config": (written("generation_config.json", ""), "generation_config.json of .*model'"),
    "cut weights": (lambda c: os.truncate(c.model / "model.safetensors", 1000), "model' cannot be loaded"),
    "another width": (lambda c: c.edit("config.json", intermediate_size=7), "6 weights of other shapes"),
    "vocabulary beyond the embedding": (
        lambda c: (shutil.rmtree(c.model), tiny.save(c.model, vocab_size=100)), "the tokenizer has 258 tokens",
    ),
    "pickled code for weights": (pickled, "a .bin file is damaged or holds code"),
    "quantized weights": (lambda c: c.edit("config.json", quantization_config=GPTQ), r"quantization_config .*\(gptq\)"),
    "gguf without its package": (lambda c: (gguf()(c), c.monkeypatch.setitem(os.sys.modules, "gguf", None)),
                                 r"tiny.gguf .*pip install 'fastgrpo\[gguf\]'"),
    "two gguf files": (gguf(lambda file: shutil.copy(file, file.with_name("b.gguf"))), "b.gguf, tiny.gguf"),
    "cut gguf": (gguf(lambda file: file.write_bytes(file.read_bytes()[:3000])), "model' cannot be loaded"),
    "gguf of another architecture": (gguf(architecture="rwkv6"), "rwkv6"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_rejects_a_wrong_model(name, case, capfd):
    spoil, message = MODELS[name]
    spoil(case)
    check(train.main, case.argv(), message, capfd)
    assert "the code of the model ran" not in capfd.readouterr().out


@pytest.mark.parametrize("command", ["evaluate", "chat", "doctor"])
@pytest.mark.parametrize("name", ["quantized weights", "gguf without its package"])
def test_other_commands_reject_a_wrong_model(command, name, case, capfd):
    spoil, message = MODELS[name]
    spoil(case)
    argv = {"evaluate": [str(case.model)], "chat": [str(case.model), "--prompt", "a"],
            "doctor": ["--model", str(case.model)]}[command]  # fmt: skip
    check(importlib.import_module(f"fastgrpo.{command}").main, argv, message, capfd)


@pytest.mark.parametrize("value", ["kernels-community/x", {"": "any/kernel"}, "flash_attention_2"], ids=str)
def test_no_field_of_a_model_makes_a_command_look_for_a_kernel(value, case, capfd):
    asked = []
    for sink in (
        "modeling_utils.lazy_import_flash_attention", "modeling_utils.lazy_import_paged_flash_attention",
        "integrations.hub_kernels.load_and_register_attn_kernel", "integrations.hub_kernels.lazy_load_kernel",
    ):  # fmt: skip
        case.patch(f"transformers.{sink}", lambda *args, **kwargs: asked.append(args))
    names = ("attn_implementation", "_attn_implementation", "experts_implementation")
    case.edit("config.json", **dict.fromkeys(names, value))
    assert importlib.import_module("fastgrpo.doctor").main(["--model", str(case.model)]) == 0
    argv = [str(case.model), "--prompt", "a", "-n", "1", "--device", "cpu"]
    assert importlib.import_module("fastgrpo.chat").main(argv) == 0
    assert asked == [], capfd.readouterr().err


ROWS = {
    # lines of train.jsonl behind a good one and an empty one: what the message names
    "[" * 100_000: "train.jsonl:3: invalid JSON",
    '{"question": "b"}': "train.jsonl:3: .*'prompt'",
    '{"prompt": ""}': "train.jsonl:3: the prompt '' has no tokens",
    '{"prompt": [{"role": "user", "content": "hi"}]}': "train.jsonl:3: .*chat template",
    json.dumps({"prompt": "abc" * 700}): "train.jsonl:3: .* has 2100 tokens",
}


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:20])
def test_rejects_a_wrong_row(row, command, case, capfd):
    """Found before the first step, by its file and line."""
    case.write('{"prompt": "ab"}', "", row)
    case.patch("fastgrpo.trainer.GRPOTrainer.step", lambda self: pytest.fail("the first step began"))
    argv = case.argv() if command == "train" else [str(case.model), *RUN.format(**vars(case)).split()]
    check(importlib.import_module(f"fastgrpo.{command}").main, argv, ROWS[row], capfd)


def reward(body, kind="def"):
    code = f"import sys\n\n{kind} f(completions, log_metric, log_extra, **_):\n    {body}\n    return [1.0] * 4\n"
    return lambda c: (c.folder / "own_rewards.py").write_text(code)


FULL = OSError(errno.ENOSPC, "No space left on device", "run/checkpoint-1/model.safetensors")
NO_ROOM = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096"
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB")
F = {"reward_funcs": "own_rewards:f"}
RUNS = {
    # name: (changed settings, how the case is spoilt, what the message names)
    "no data": ({"dataset_name": None}, None, "--dataset_name"),
    "no data file": ({"dataset_name": "./no.jsonl"}, None, "no.jsonl"),
    "no such split": ({"dataset_name": ".", "dataset_train_split": "dev"}, None, "'dev'"),
    "no rows": ({}, lambda c: c.write(""), "train.jsonl has no rows"),
    "rows that are not UTF-8": ({}, lambda c: c.rows.write_bytes(b'{"prompt": "\xe9"}\n'), "train.jsonl:1: not UTF-8"),
    "a held-out row": (
        {"dataset_name": "."}, lambda c: (c.folder / "test.jsonl").write_text('{"question": "?"}\n'), "test.jsonl:1",
    ),
    "a question without its answer": (
        {"task": "gsm8k", "reward_funcs": None}, lambda c: c.write('{"question": "b"}'), "train.jsonl:1: .*'answer'",
    ),
    "a data set that the hub does not have": (
        {"dataset_name": "a/b"}, lambda c: c.fail("datasets.load_dataset", FileNotFoundError("none")),
        "data set 'a/b'",
    ),
    "an unwritable cache": (
        {"dataset_name": "a/b"},
        lambda c: c.fail("datasets.load_dataset", PermissionError(errno.EACCES, "no", "/root/.cache")),
        "/root/.cache.*HF_HOME",
    ),
    "no reward": ({"reward_funcs": None}, None, "--reward_funcs"),
    "an unknown reward": ({"reward_funcs": "brevity"}, None, "'brevity'"),
    "a reward module that exits": (
        F, lambda c: (c.folder / "own_rewards.py").write_text("raise SystemExit(0)"), "own_rewards:f' .*SystemExit",
    ),
    "a reward that exits": (F, reward("sys.exit(0)", "async def"), "'f' raised SystemExit.*own_rewards.py:4"),
    "weights of other rewards": ({"reward_weights": "[1, 2]"}, None, "reward_weights"),
    "a gpu that is not there": (
        {"device": "cuda"}, lambda c: c.patch("torch.cuda.is_available", lambda: False), "device='cuda'",
    ),
    "no transformers": (
        {}, lambda c: c.fail("fastgrpo.train.make_trainer", ModuleNotFoundError(name="transformers")),
        r"pip install 'fastgrpo\[train\]'",
    ),
    "a folder with something in it": (
        {}, lambda c: (c.run.mkdir(), (c.run / "notes").write_text("x")), "run .*--overwrite_output_dir",
    ),
    "a folder without permission": (
        {}, lambda c: c.fail("pathlib.Path.mkdir", PermissionError(errno.EACCES, "Not yours", "/x")),
        "output_dir /x",
    ),
    "a full disk": (
        {}, lambda c: c.fail("transformers.PreTrainedModel.save_pretrained", FULL),
        "checkpoint-1 .*No space left.*--resume_from_checkpoint auto",
    ),
    "a full disk inside of torch": (  # which tells of an unexpected position
        {}, lambda c: c.patch("transformers.PreTrainedModel.save_pretrained", lambda *_, **__: (
            c.run / ".tmp-checkpoint-1" / "optimizer.pt").symlink_to("/dev/full")), "checkpoint-1 .*No space left",
    ),
    "no memory of the gpu": (
        {}, lambda c: c.fail("fastgrpo.trainer.GRPOTrainer.step", OUT), "max_tokens_per_microbatch",
    ),
    "no memory to load": (
        {}, lambda c: c.fail("fastgrpo.policy.load.AutoModelForCausalLM.from_pretrained", RuntimeError(NO_ROOM)),
        "enough memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_rejects_a_wrong_run(name, case, capfd):
    changes, spoil, message = RUNS[name]
    if spoil is not None:
        spoil(case)
    check(train.main, case.argv(**changes), message, capfd)


def test_a_correct_run_passes(case):
    """And its folder is free again."""
    for changes in ({}, {"overwrite_output_dir": True}):
        assert train.main(case.argv(**changes)) == 0
        assert (case.run / "checkpoint-1" / "model.safetensors").exists()
