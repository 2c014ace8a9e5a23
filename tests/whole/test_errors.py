"""What a person can mend: exit code 2, and a line or two on stderr that name the thing and the remedy; a row a case."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import tiny
from paths import ROOT

from fastgrpo import chat, doctor, evaluate, train
from fastgrpo.config import command

pytestmark = pytest.mark.usefixtures("without_curves")

REWARDS = """
import math

NUMBER = 3

def share(completions, **columns):
    return [text.count("a") / (len(text) + 1) for text in completions]

def raises(completions, **columns):
    return [columns["answer"][0]]

async def raises_later(completions, **columns):
    raise RuntimeError("the judge is down")

def short(completions, **columns):
    return [0.0]

def opaque(completions, log_extra, **columns):
    log_extra("note", [object()] * len(completions))
    return [0.0] * len(completions)

def text(completions, **columns):
    return ["good"] * len(completions)

def nan(completions, **columns):
    return [math.nan] * len(completions)

def nothing(completions, **columns):
    pass

def none(completions, **columns):
    return [None] * len(completions)

def extra(completions, log_extra, **columns):
    log_extra("note", ["one"])
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole model folder, to be copied and spoilt."""
    return tiny.save(tmp_path_factory.mktemp("saved") / "model")


class Case:
    """The files of one case, and a command line that would work if they were not spoilt."""

    def __init__(self, folder, saved, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.model, self.rows, self.run = folder / "model", folder / "train.jsonl", folder / "run"
        shutil.copytree(saved, self.model)
        self.write('{"prompt": "ab"}', '{"prompt": "cd"}')
        (folder / "own_rewards.py").write_text(REWARDS)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "own_rewards", raising=False)

    def write(self, *lines):
        self.rows.write_text("\n".join(lines) + "\n")

    def edit(self, file, **changes):
        settings = json.loads((self.model / file).read_text())
        (self.model / file).write_text(json.dumps({**settings, **changes}))

    def argv(self, **changes):
        settings = {
            "task": "dataset", "dataset_name": self.rows, "model_name_or_path": self.model, "output_dir": self.run,
            "reward_funcs": "own_rewards:share", "max_steps": 1, "prompts_per_step": 2, "num_generations": 2,
            "max_completion_length": 4, "device": "cpu", **changes,
        }  # fmt: skip
        return [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]

    def patch(self, target, replacement):
        self.monkeypatch.setattr(target, replacement)

    def without(self, package):
        self.monkeypatch.setitem(sys.modules, package, None)


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def spoilt(make, **changes):
    """A case whose files `make` spoils before the command line is built."""

    def build(case):
        make(case)
        return case.argv(**changes)

    return build


def flags(**changes):
    return lambda case: case.argv(**changes)


def words(text):
    return lambda case: text.split()


def in_use(case):
    code = f"""
import sys
from pathlib import Path
from fastgrpo.run.folder import hold
lock = hold(__import__("pathlib").Path({str(case.run)!r}))
print("held", flush=True)
sys.stdin.read()
"""
    case.run.mkdir()
    # It ends when this process drops its end of the pipe.
    case.other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert case.other.stdout.readline() == b"held\n"


def truncated_weights(case):
    path = case.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def lacking_weights(case):
    from safetensors.torch import load_file, save_file

    path = case.model / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def endless(case):
    case.edit("tokenizer_config.json", eos_token=None)
    case.edit("config.json", eos_token_id=None)
    (case.model / "generation_config.json").unlink()


def one_gpu(case):
    case.patch("torch.cuda.is_available", lambda: True)
    case.patch("torch.cuda.device_count", lambda: 1)


def yaml(text):
    def build(case):
        (case.folder / "mine.yaml").write_text(text)
        return ["--config", str(case.folder / "mine.yaml")]

    return build


FULL = OSError(errno.ENOSPC, "No space left on device", "run/checkpoint-1/model.safetensors")
CASES = {
    # name: (command line, what its message must say[, command])
    "unknown flag": (words("--learning_rat 1"), "learning_rat.*did you mean --learning_rate"),
    "unknown flag with =": (words("--loss_typ=grpo"), "loss_typ.*did you mean --loss_type"),
    "stray word": (words("gsm8k"), "Unrecognized options: gsm8k.*--help"),
    "flag without value": (words("--beta"), "Missing value for argument '--beta'"),
    "not a number": (words("--beta much"), "--beta.*'much'"),
    "not a boolean": (words("--gradient_checkpointing maybe"), "gradient_checkpointing.*True.*False"),
    "out of range": (words("--num_generations 1"), "num_generations must be at least 2, got 1"),
    "no such choice": (words("--loss_type ppo"), "loss_type must be one of grpo"),
    "group beyond max_num_seqs": (words("--max_num_seqs 4"), "max_num_seqs=4 must hold a group"),
    "more updates than groups": (words("--task gsm8k --updates_per_rollout 9"), "updates_per_rollout=9.*raise prompts"),
    "task that makes its data": (words("--dataset_name x.jsonl"), "arithmetic makes its own data"),
    "config without value": (words("--config"), "--config needs a value"),
    "no config file": (words("--config no.yaml"), "no such file: no.yaml"),
    "config that is not YAML": (yaml("beta: ["), "mine.yaml is not YAML"),
    "unknown setting": (yaml("learning_rat: 1"), "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
    "setting that is no number": (yaml("beta: much"), "beta must be a number, got 'much'"),
    "setting that is not text": (yaml("output_dir: 7"), r"mine.yaml: output_dir must be text \(in quotes\), got 7"),
    "setting that is no boolean": (yaml("use_peft: 1"), "use_peft must be true or false, got 1"),
    "setting that lacks its value": (yaml("beta:"), "beta must be a number, got None"),
    "setting that is no list of names": (yaml("reward_funcs: 3"), "reward_funcs must be text"),
    "setting that is not whole": (yaml("max_steps: .nan"), "max_steps must be a whole number, got nan"),
    "config that is a folder": (words("--config ."), r"cannot be read: \.; --config takes a YAML file"),
    "config that is binary": (lambda c: ["--config", str(c.model / "model.safetensors")], "safetensors is not YAML"),
    "learning rate without end": (words("--learning_rate inf"), "^error: learning_rate must be positive and finite"),
    "temperature without end": (words("--temperature inf"), "temperature must be positive and finite, got inf"),
    "gradient norm below 0": (words("--max_grad_norm -1"), "max_grad_norm must be at least 0 and finite, got -1"),
    "weight decay below 0": (words("--weight_decay -0.1"), "weight_decay must be at least 0 and finite"),
    "adam's beta": (words("--adam_beta2 1"), r"adam_beta2 must be in \[0, 1\), got 1"),
    "seed beyond NumPy's": (words("--seed -1"), "seed must be from 0 to 2.*, got -1"),
    "weight that is no number": (words("--reward_weights nan"), "reward_weights must be finite, got nan"),
    "no such task": (words("--task gsm9k"), "task must be one of arithmetic, dataset, gsm8k, got 'gsm9k'"),
    "no model": (words("--task gsm8k"), "task gsm8k needs --model_name_or_path"),
    "no model folder": (flags(model_name_or_path="./no/such/model"), "no such model folder: ./no/such/model"),
    "empty model folder": (spoilt(lambda c: shutil.rmtree(c.model) or c.model.mkdir()), "model' cannot be loaded"),
    "damaged config.json": (
        spoilt(lambda c: (c.model / "config.json").write_text("{oops")), "model' cannot be loaded.*damaged",
    ),
    "damaged weights": (spoilt(truncated_weights), "the model of .*model' cannot be loaded.*damaged or incomplete"),
    "lacking weights": (spoilt(lacking_weights), "lacks 1 of its weights .model.norm.weight"),
    "vocabulary beyond the embedding": (
        spoilt(lambda c: (shutil.rmtree(c.model), tiny.save(c.model, vocab_size=100))),
        "the tokenizer has 258 tokens, the model's embedding only 100",
    ),
    "no end token": (spoilt(endless), "no end token.*set eos_token"),
    "no data set": (flags(dataset_name=None), "needs --dataset_name"),
    "no data file": (flags(dataset_name="./no.jsonl"), "no such file: no.jsonl"),
    "curriculum of another task": (flags(curriculum_iters=3), "curriculum_iters goes with --task gsm8k"),
    "warmup of a constant rate": (
        flags(lr_scheduler_type="constant", warmup_steps=5),
        "has no effect under lr_scheduler_type=constant; use constant_with_warmup",
    ),
    "draws that nobody makes": (flags(eval_top_k=5), "eval_top_k is of the draws of an evaluation, .*eval_num_gen"),
    "another loss's temperature": (flags(sapo_temperature_neg=2), "sapo_temperature_neg is of loss_type=sapo alone"),
    "a KL estimator without KL": (flags(kl="k2"), "kl is of the reference, and at beta=0 there is none; set beta"),
    "a reference that should move": (
        flags(beta=0.1, ref_model_sync_steps=5),
        "ref_model_sync_steps is of a reference that follows .*sync_ref_model=True",
    ),
    "a bound without refills": (flags(max_num_gen_batches=5), "max_num_gen_batches is of dynamic_sampling, which"),
    "attention of the other backend": (
        flags(rollout_backend="hf", rollout_attention="sdpa"),
        "rollout_attention is of the engine, and rollout_backend=hf does without it",
    ),
    "adapters that are off": (flags(lora_r=4), "lora_r is of adapters, and without use_peft=True there are none"),
    "data file of another kind": (
        spoilt(lambda c: (c.folder / "rows.csv").write_text("prompt"), dataset_name="rows.csv"),
        "rows.csv is not a .jsonl file",
    ),
    "folder without the split": (flags(dataset_name=".", dataset_train_split="dev"), "has no split 'dev'"),
    "hub data set that is not there": (
        spoilt(lambda c: c.patch("datasets.load_dataset", raising(FileNotFoundError("Dataset 'a/b' doesn't exist"))),
               dataset_name="a/b"),
        "data set 'a/b' cannot be loaded .*doesn't exist.*name a hub id",
    ),
    "empty data set": (spoilt(lambda c: c.write("")), "train.jsonl has no rows"),
    "row that is not JSON": (spoilt(lambda c: c.write('{"prompt": "a"}', "{oops")), "train.jsonl:2: not JSON"),
    "row that is no object": (spoilt(lambda c: c.write("[1]")), "train.jsonl:1: a row must be a JSON object, got list"),
    "row without prompt": (
        spoilt(lambda c: c.write('{"prompt": "a"}', "", '{"question": "b"}')),
        "train.jsonl:3: the row has no column 'prompt', only question",
    ),
    "GSM8K row without answer": (
        spoilt(lambda c: c.write('{"question": "b"}'), task="gsm8k", reward_funcs=None),
        "train.jsonl:1: the row has no column 'answer'",
    ),
    "prompt of another kind": (
        spoilt(lambda c: c.write('{"prompt": 7}')), "prompt must be a string or a list of messages, got 7",
    ),
    "prompt beyond the context": (
        spoilt(lambda c: c.write(json.dumps({"prompt": "abc" * 700}))),
        "prompt 'abcabc.*has 2100 tokens.*exceeds the model's context of 2048; shorten",
    ),
    "row that is not UTF-8": (
        spoilt(lambda c: c.rows.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')), "train.jsonl:2: not UTF-8",
    ),
    "message without a role": (
        spoilt(lambda c: c.write('{"prompt": [{"rol": "user", "content": "hi"}]}')), "each with a role and a content",
    ),
    "no messages": (spoilt(lambda c: c.write('{"prompt": []}')), "a prompt of messages must have some"),
    "overlong prompt, far behind": (
        spoilt(
            lambda c: c.write(*['{"prompt": "ab"}'] * 50, json.dumps({"prompt": "long " * 600})), shuffle_dataset=False
        ),
        r"the prompt 'long long .* has \d+ tokens; with max_completion_length 4 it exceeds the model's context of",
    ),
    "chat template without a system role": (
        spoilt(
            lambda c: (
                c.edit("tokenizer_config.json", chat_template="{{ raise_exception('System role not supported') }}"),
                c.write('{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}'),
            )
        ),
        "chat template refuses the prompt 'u': System role not supported; .*no system prompt",
    ),
    "empty prompt": (spoilt(lambda c: c.write('{"prompt": ""}')), "the prompt '' has no tokens"),
    "messages without a template": (
        spoilt(lambda c: c.write('{"prompt": [{"role": "user", "content": "hi"}]}')), "no chat template; use plain",
    ),
    "no reward": (flags(reward_funcs=None), "pass --reward_funcs module:function"),
    "unknown reward": (flags(reward_funcs="brevity"), "no reward function 'brevity'.*module:function"),
    "reward module that is not there": (flags(reward_funcs="no_such:f"), "'no_such:f' cannot be imported.*No module"),
    "reward module without it": (flags(reward_funcs="own_rewards:f"), "own_rewards:f' cannot be imported.*attribute"),
    "reward that is no function": (flags(reward_funcs="own_rewards:NUMBER"), "is a int, which cannot be called"),
    "reward that raises": (
        flags(reward_funcs="own_rewards:raises"),
        r"'raises' raised KeyError: 'answer' \(.*own_rewards.py:10\); the rows have the columns \(none\).*"
        "on the prompt '(ab|cd)', completion '",
    ),
    "reward that raises later": (flags(reward_funcs="own_rewards:raises_later"), "RuntimeError: the judge is down"),
    "reward of the wrong count": (flags(reward_funcs="own_rewards:short"), "'short' returned 1 rewards for 4 comple"),
    "reward that is text": (flags(reward_funcs="own_rewards:text"), "'text' returned 'good' for completion 0"),
    "reward that is NaN": (flags(reward_funcs="own_rewards:nan"), "'nan' returned nan for completion 0"),
    "reward that is no list": (flags(reward_funcs="own_rewards:nothing"), "'nothing' returned None, not a list"),
    "all rewards None": (flags(reward_funcs="own_rewards:none"), "all rewards are None: none gave none of 4"),
    "log_extra of the wrong length": (
        flags(reward_funcs="own_rewards:extra"), r"'extra' raised ValueError: log_extra\('note', ...\) .*: 4, got 1",
    ),
    "log_extra of what JSON cannot hold": (
        flags(reward_funcs="own_rewards:opaque"),
        r"'opaque' raised ValueError: log_extra\('note', ...\) takes what JSON can hold: Object of type object",
    ),
    "weights for other rewards": (lambda c: [*c.argv(), "--reward_weights", "1", "2"], "2 entries for 1 reward"),
    "unknown schedule": (flags(lr_scheduler_type="cosin"), "lr_scheduler_type 'cosin' cannot be used.*cosine"),
    "schedule of a metric": (flags(lr_scheduler_type="reduce_lr_on_plateau"), "choose another schedule, such as cosine"),
    "GPU that is not there": (
        spoilt(lambda c: c.patch("torch.cuda.is_available", lambda: False), device="cuda"),
        "device='cuda' was asked for, but torch sees no CUDA device; use --device cpu",
    ),
    "GPU beyond those there": (
        spoilt(one_gpu, device="cuda:7"),
        r"device='cuda:7' was asked for, but torch sees 1 CUDA device\(s\)",
    ),
    "device of no kind": (flags(device="gpu"), "device must be cuda, cuda:N, cpu or auto, got 'gpu'"),
    "no wandb": (spoilt(lambda c: c.without("wandb"), report_to="wandb"), "pip install wandb"),
    "no tensorboard": (
        spoilt(lambda c: c.without("torch.utils.tensorboard"), report_to="tensorboard"), "pip install tensorboard",
    ),
    "no transformers": (
        spoilt(lambda c: c.patch("fastgrpo.train.make_trainer",
                                 raising(ModuleNotFoundError("No module named 'transformers'", name="transformers")))),
        r"transformers is not installed: pip install 'fastgrpo\[train\]'",
    ),
    "output folder with something in it": (
        spoilt(lambda c: (c.run.mkdir(), (c.run / "notes").write_text("x"))), "not empty.*--overwrite_output_dir",
    ),
    "output folder that is a file": (spoilt(lambda c: c.run.write_text("x")), "run is a file; name a folder"),
    "output folder of a live run": (
        spoilt(in_use, overwrite_output_dir=True),
        r"run is in use by a run that still lives \(process \d+ on .*\); wait for its end",
    ),
    "no permission": (
        spoilt(lambda c: c.patch("pathlib.Path.mkdir", raising(PermissionError(errno.EACCES, "Not yours", "/x")))),
        "output_dir /x cannot be written: Not yours; choose another folder",
    ),
    "unwritable cache": (
        spoilt(lambda c: c.patch("datasets.load_dataset", raising(PermissionError(errno.EACCES, "no", "/root/.cache"))),
               dataset_name="a/b"),
        "no permission to read or write /root/.cache.*HF_HOME",
    ),
    "disk full": (
        spoilt(lambda c: c.patch("transformers.PreTrainedModel.save_pretrained", raising(FULL))),
        "checkpoint-1 could not be written to .*run: .*No space left on device: 'run/checkpoint-1/model.safetensors'; "
        r"there is no earlier one\. Fix the cause, then continue with .*--resume_from_checkpoint auto",
    ),
    "GPU memory": (
        spoilt(lambda c: c.patch("fastgrpo.trainer.GRPOTrainer.step", raising(
            __import__("torch").OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB")))),
        "CUDA out of memory.*lower max_tokens_per_microbatch.*fastgrpo.doctor",
    ),
    "evaluate: no model": (words(""), "name at least one model", evaluate),
    "evaluate: no model folder": (words("/no/such/model"), "no such model folder: /no/such/model", evaluate),
    "evaluate: no split": (
        lambda c: [str(c.model), "--task", "dataset", "--dataset_name", ".", "--reward_funcs", "own_rewards:share"],
        "has no split 'test'", evaluate,
    ),
    "evaluate: output that exists": (
        lambda c: [str(c.model), "--output", str(c.rows)], "train.jsonl exists already; choose another", evaluate,
    ),
    "evaluate: unknown flag": (words("m --eval_num_generation 2"), "did you mean --eval_num_generations", evaluate),
    "chat: no model": (words(""), "A folder or hub id of a causal LM", chat),
    "chat: no model folder": (words("/no/such/model"), "no such model folder: /no/such/model", chat),
    "chat: out of range": (lambda c: [str(c.model), "--top_p", "2"], r"top_p must be in \(0, 1\], got 2", chat),
    "chat: prompt beyond the context": (
        lambda c: [str(c.model), "--prompt", "abc" * 700], "has 2100 tokens.*exceeds the model's context", chat,
    ),
    "doctor: no model": (words("--model /no/such/model"), "no config of a causal LM at '/no/such/model'", doctor),
    "doctor: flags alone": (words("--beta 1"), "go with --model PATH", doctor),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message, *program = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    argv = build(case)
    capfd.readouterr()
    module = program[0] if program else train
    assert module.main(argv) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    lines = told[told.index("error: ") :].strip().splitlines()
    assert 1 <= len(lines) <= 2, told
    assert re.search(message, " ".join(lines)), told


def test_there_are_enough():
    assert len(CASES) >= 30


def test_debug_shows_the_traceback(capsys):
    assert train.main(["--task", "gsm8k", "--debug"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told and told.strip().splitlines()[-1].startswith("error: task gsm8k needs")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"):
        command.run_command(raising(RuntimeError("a bug")), [])


def test_an_error_of_a_library_says_where_it_was_raised(capsys):
    assert command.run_command(lambda argv: json.loads("{"), []) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("error: Expecting property name")
    assert re.search(r"decoder.py:\d+; --debug shows the traceback", second)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_without_utf8_reads_the_same(encoding, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    for argv, told in (
        (["--learning_rat", "1"], "Unrecognized options: --learning_rat, 1; did you mean --learning_rate?"),
        (["--lora_r", "0"], "lora_r must be at least 1, got 0; see python -m fastgrpo.train --help"),
    ):
        assert train.main(argv) == 2
        assert capfd.readouterr().err.strip() == f"error: {told}"


def test_what_works_exits_with_0(tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    assert train.main(case.argv()) == 0
    assert (case.run / "checkpoint-1" / "model.safetensors").exists()


def test_a_finished_run_is_not_in_use(tmp_path, saved, monkeypatch):
    case = Case(tmp_path, saved, monkeypatch)
    assert train.main(case.argv()) == 0
    assert train.main(case.argv(overwrite_output_dir=True)) == 0


def test_mistakes_do_not_wait_for_the_warm_start(tmp_path, monkeypatch):
    """The embedded example trains a model before GRPO begins: what is wrong with the rest must be told before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastgrpo.train._make_policy", lambda *args: pytest.fail("the warm start began"))
    for argv in (
        ["--reward_funcs", "no_such:f"],
        ["--reward_weights", "1", "2"],
        ["--dataset_name", "x.jsonl"],
        ["--lr_scheduler_type", "cosin"],
        ["--device", "gpu"],
    ):
        assert train.main(argv) == 2
        assert not os.path.exists("runs")
