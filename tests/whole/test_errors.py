"""What a person can mend in training: exit code 2, and a line or two on stderr that name the thing and the remedy."""

import errno
import json
import os
import shutil

import pytest
import tiny
from mistakes import (
    Case,
    check,
    endless,
    flags,
    in_use,
    lacking_weights,
    one_gpu,
    raising,
    spoilt,
    truncated_weights,
    words,
    yaml,
)

from fastgrpo import train

pytestmark = pytest.mark.usefixtures("without_curves")


FULL = OSError(errno.ENOSPC, "No space left on device", "run/checkpoint-1/model.safetensors")
CASES = {
    # name: (command line, what its message must say)
    "unknown flag": (words("--learning_rat 1"), "learning_rat.*did you mean --learning_rate"),
    "unknown flag with =": (words("--loss_typ=grpo"), "loss_typ.*did you mean --loss_type"),
    "stray word": (words("gsm8k"), "Unrecognized options: gsm8k.*--help"),
    "flag without value": (words("--beta"), "Missing value for argument '--beta'"),
    "not a number": (words("--beta much"), "--beta.*'much'"),
    "not a boolean": (words("--gradient_checkpointing maybe"), "gradient_checkpointing.*True.*False"),
    "out of range": (words("--num_generations 1"), "num_generations must be at least 2, got 1"),
    "no such choice": (words("--loss_type ppo"), "invalid choice 'ppo' for argument '--loss_type'. Expected one of"),
    "group beyond max_num_seqs": (words("--max_num_seqs 4"), "max_num_seqs=4 must be at least num_generations=8"),
    "more updates than groups": (words("--task gsm8k --updates_per_rollout 9"), "updates_per_rollout=9.*raise prompts"),
    "task that makes its data": (words("--dataset_name x.jsonl"), "arithmetic makes its own data"),
    "config without value": (words("--config"), "--config needs a value"),
    "no config file": (words("--config no.yaml"), "no such file: no.yaml"),
    "config that is not YAML": (yaml("beta: ["), "mine.yaml is not YAML"),
    "unknown setting": (yaml("learning_rat: 1"), "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
    "setting that is no number": (yaml("beta: much"), "beta must be a number, got 'much'"),
    "setting that is not text": (yaml("output_dir: 7"), r"mine.yaml: output_dir must be text \(in quotes\), got 7"),
    "setting that is no boolean": (yaml("use_peft: 7"), "use_peft must be true or false, got 7"),
    "setting that lacks its value": (yaml("beta:"), "beta must be a number, got None"),
    "setting that is no list of names": (yaml("reward_funcs: 3"), "reward_funcs must be text"),
    "setting that is not whole": (yaml("max_steps: .nan"), "max_steps must be finite, got nan"),
    "config that is a folder": (words("--config ."), r"cannot be read: \.; --config takes a YAML file"),
    "config that is binary": (lambda c: ["--config", str(c.model / "model.safetensors")], "safetensors is not YAML"),
    "learning rate without end": (words("--learning_rate inf"), "^error: learning_rate must be finite"),
    "temperature without end": (words("--temperature inf"), "temperature must be finite, got inf"),
    "gradient norm below 0": (words("--max_grad_norm -1"), "max_grad_norm must be at least 0, got -1"),
    "weight decay below 0": (words("--weight_decay -0.1"), "weight_decay must be at least 0, got -0.1"),
    "adam's beta": (words("--adam_beta2 1"), r"adam_beta2 must be in \[0, 1\), got 1"),
    "seed beyond NumPy's": (words("--seed -1"), r"seed must be in \[0, 4294967295\], got -1"),
    "weight that is no number": (words("--reward_weights nan"), "reward_weights must be finite, got nan"),
    "no such task": (words("--task gsm9k"), "task must be one of arithmetic, bandit, .*, sums, got 'gsm9k'"),
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
    "warmup of a constant rate": (
        flags(lr_scheduler_type="constant", warmup_steps=5),
        "warmup_steps has an effect only where lr_scheduler_type is not constant .constant_with_warmup is",
    ),
    "another loss's temperature": (flags(sapo_temperature_neg=2), "_neg has an effect only where loss_type is sapo"),
    "a KL estimator without KL": (flags(kl="k2"), "kl has an effect only where beta is above 0; leave it out"),
    "a reference that should move": (
        flags(beta=0.1, ref_model_sync_steps=5),
        "ref_model_sync_steps has an effect only where sync_ref_model is True; leave it out",
    ),
    "memory of the other backend": (
        flags(rollout_backend="hf", rollout_memory_utilization=0.5),
        "rollout_memory_utilization has an effect only where rollout_backend is fast or eager; leave it out",
    ),
    "adapters that are off": (flags(lora_r=4), "lora_r has an effect only where use_peft is True; leave it out"),
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
    "no messages": (spoilt(lambda c: c.write('{"prompt": []}')), "a list of messages must have at least one"),
    "overlong prompt, far behind": (
        spoilt(
            lambda c: c.write(*['{"prompt": "ab"}'] * 50, json.dumps({"prompt": "long " * 600})), shuffle_dataset=False
        ),
        r"the prompt 'long long .* has \d+ tokens; with max_completion_length=4 it exceeds the model's context of",
    ),
    "chat template without a system role": (
        spoilt(
            lambda c: (
                c.edit("tokenizer_config.json", chat_template="{{ raise_exception('System role not supported') }}"),
                c.write('{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}'),
            )
        ),
        "chat template refuses the prompt 'u': TemplateError: System role not supported; .*leave the system prompt out",
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
        r"'raises' raised KeyError: 'answer' \(.*own_rewards.py:10\); the row has the columns \(none\).*"
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
    "schedule of a metric": (flags(lr_scheduler_type="reduce_lr_on_plateau"), "choose another schedule, such as"),
    "GPU that is not there": (
        spoilt(lambda c: c.patch("torch.cuda.is_available", lambda: False), device="cuda"),
        "device='cuda' was asked for, but torch sees no CUDA device; use cpu",
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
        r"run is in use by a run that is still alive \(process \d+ on .*\); wait until it ends",
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
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(train.main, build(case), message, capfd)


def test_there_are_enough():
    assert len(CASES) >= 30


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
