"""Mistakes that a person can mend: a command exits with code 2 and a line or two. Pipes and terminals that fail."""

import errno
import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import tiny
import tiny_gguf
from mistakes import Case, check
from paths import ROOT

from fastgrpo import train
from fastgrpo.chat import main
from fastgrpo.run.checkpoint import checkpoints, verify

pytestmark = pytest.mark.usefixtures("without_curves")
RUN = "--task dataset --dataset_name {rows} --reward_funcs own_rewards:share --device cpu --max_completion_length 2"
LINES = {
    # command line: what the message names
    "train --task gsm9k": "task .*'gsm9k'",
    "train --task gsm8k": "task gsm8k needs --model_name_or_path",
    "train --environment my_tools:Guess": "arithmetic makes its own data",
    f"train {RUN} --model_name_or_path {{model}} --output_dir {{rows}}/x": "output_dir",
    f"train {RUN} --model_name_or_path ./no/such": "no such model folder: ./no/such",
    "train --sweep num_generation=2,4": "--sweep: .*'num_generations'",
    f"train {RUN} --sweep model_name_or_path={{model}},/no/such": "no such model folder: /no/such",
    "sft --train_file {rows} --model_name_or_path {model}": "needs --task",
    "evaluate": "model",
    "chat": "an argument is missing",
    "chat {model} --prompt " + "abc" * 700: "2100 tokens",
    "doctor --model /no/such": "/no/such",
    "doctor --check maybe": "check must be true or false",
    "report .": "is not the folder of a run",
}  # fmt: skip


@pytest.fixture
def case(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Case(tmp_path, saved, monkeypatch)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_rejects_a_wrong_command_line(line, case, capfd):
    case.patch("fastgrpo.train._make_policy", lambda *_: pytest.fail("the warm start began"))
    case.patch("fastgrpo.run.sweep.COMMAND", ("no such command",))
    command, *argv = line.format(**vars(case)).split(" ")
    check(importlib.import_module(f"fastgrpo.{command}").main, argv, LINES[line], capfd)
    assert not case.run.exists() and not (case.folder / "runs").exists()


def test_a_mistake_found_after_the_warm_start_leaves_no_folder(case, capfd):
    case.patch("fastgrpo.train._make_policy", lambda module, config, log: log.folder.claim("warm-start") and case.model)
    check(train.main, ["--max_steps", "1", "--profile", "2", "--output_dir", str(case.run)], "profile", capfd)
    assert not case.run.exists()


def written(file, content):
    """Write a file of the model."""
    return lambda c: (c.model / file).write_text(content)


def pickled(c):
    (c.model / "model.safetensors").unlink()
    (c.model / "pytorch_model.bin").write_bytes(b"\x80\x02c__builtin__\nprint\n(S'the code of the model ran'\ntR.")


def gguf(change=lambda file: None):
    """Replace the folder by a GGUF file."""

    def spoil(c):
        shutil.rmtree(c.model)
        c.model.mkdir()
        tiny_gguf.save(c.model / "tiny.gguf", chat=False)
        change(c.model / "tiny.gguf")

    return spoil


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
MODELS = {
    # name: (how the model is spoilt, what the message names)
    "damaged config": (written("config.json", "{oops"), "model' cannot be loaded.*damaged"),
    "null for a tokenizer": (written("tokenizer.json", "null"), "the tokenizer of .*model'"),
    "cut weights": (lambda c: os.truncate(c.model / "model.safetensors", 1000), "model' cannot be loaded"),
    "vocabulary beyond the embedding": (
        lambda c: (shutil.rmtree(c.model), tiny.save(c.model, vocab_size=100)), "the tokenizer has 258 tokens",
    ),
    "pickled code for weights": (pickled, "a .bin file is damaged or holds code"),
    "quantized weights": (lambda c: c.edit("config.json", quantization_config=GPTQ), r"quantization_config .*\(gptq\)"),
    "gguf without its package": (lambda c: (gguf()(c), c.monkeypatch.setitem(os.sys.modules, "gguf", None)),
                                 r"tiny.gguf .*pip install 'fastgrpo\[gguf\]'"),
    "two gguf files": (gguf(lambda file: shutil.copy(file, file.with_name("b.gguf"))), "b.gguf, tiny.gguf"),
    "cut gguf": (gguf(lambda file: file.write_bytes(file.read_bytes()[:3000])), "model' cannot be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_rejects_a_wrong_model(name, case, capfd):
    spoil, message = MODELS[name]
    spoil(case)
    check(train.main, case.argv(), message, capfd)
    assert "the code of the model ran" not in capfd.readouterr().out


@pytest.mark.parametrize("value", ["kernels-community/x", {"": "any/kernel"}], ids=str)
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
    '{"question": "b"}': "train.jsonl:3: .*'prompt'",
    '{"prompt": ""}': "train.jsonl:3: the prompt '' has no tokens",
    json.dumps({"prompt": "abc" * 682}): "train.jsonl:3: .* has 2046 tokens.*max_completion_length=4 it exceeds",
}


@pytest.mark.parametrize("row, command", [*((row, "train") for row in ROWS), ('{"question": "b"}', "evaluate")])
def test_rejects_a_wrong_row(row, command, case, capfd):
    case.write('{"prompt": "ab"}', "", row)
    case.patch("fastgrpo.trainer.GRPOTrainer.step", lambda self: pytest.fail("the first step began"))
    argv = case.argv() if command == "train" else [str(case.model), *RUN.format(**vars(case)).split()]
    check(importlib.import_module(f"fastgrpo.{command}").main, argv, ROWS[row], capfd)


FULL = OSError(errno.ENOSPC, "No space left on device", "run/checkpoint-1/model.safetensors")
RUNS = {
    # name: (changed settings, how the case is spoilt, what the message names)
    "no reward": ({"reward_funcs": None}, None, "--reward_funcs"),
    "a full disk": (
        {}, lambda c: c.fail("transformers.PreTrainedModel.save_pretrained", FULL),
        "checkpoint-1 .*No space left.*--resume_from_checkpoint auto",
    ),
    "a full disk inside of torch": (  # which tells of an unexpected position
        {}, lambda c: c.patch("transformers.PreTrainedModel.save_pretrained", lambda *_, **__: (
            c.run / ".tmp-checkpoint-1" / "optimizer.pt").symlink_to("/dev/full")), "checkpoint-1 .*No space left",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_rejects_a_wrong_run(name, case, capfd):
    changes, spoil, message = RUNS[name]
    if spoil is not None:
        spoil(case)
    check(train.main, case.argv(**changes), message, capfd)


@pytest.mark.slow
def test_a_run_whose_reader_leaves_saves_and_exits_by_sigpipe(tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    (case.folder / "test.jsonl").write_text(case.rows.read_text())
    argv = case.argv(dataset_name=case.folder, max_steps=100_000, save_steps=100_000, eval_steps=1)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{case.folder}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.train", *argv], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not process.stdout.readline().startswith("step 1: held-out"):
        assert process.poll() is None, process.stderr.read()
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(timeout=100) == 141
    assert "Traceback" not in told and "the output pipe was closed: finishing the step, then saving" in told
    verify(max(checkpoints(case.run).items())[1])


def test_a_terminal_of_ascii_gets_escapes(saved, monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main([str(saved), "--prompt", "a", "-n", "8", "--seed", "1", "--device", "cpu"]) == 0
    said = (tmp_path / "out").read_bytes()
    assert rb"\ufffd" in said and said.isascii()
