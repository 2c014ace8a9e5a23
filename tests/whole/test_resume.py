"""A run that was stopped, killed or damaged goes on and is, to the last bit, the run that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy
import pytest
import tiny
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows
from fastgrpo.run import checkpoint
from fastgrpo.run.checkpoint import checkpoints, verify, write_checkpoint
from fastgrpo.run.folder import claim_output_dir
from fastgrpo.run.log import RunLog
from fastgrpo.run.resume import newest_good
from fastgrpo.run.snapshot import restore
from fastgrpo.train import main, parse

pytestmark = pytest.mark.usefixtures("without_curves")


def noisy(completions, log_metric, **columns):
    """A learnable reward that draws from every global generator."""
    log_metric("drawn", random.gauss(0, 1) + numpy.random.rand() + torch.rand(()).item())
    return [text.count("a") / max(len(text), 1) + 0.1 * random.random() for text in completions]


def curriculum():
    rows = [{"prompt": text} for text in ("ab", "c", "hello ", "1+1=", "?")]
    levels = [Level("short", ShuffledRows(rows[:2], seed=1), until_steps=3), Level("all", ShuffledRows(rows, seed=1))]
    return Curriculum(levels)


def make_trainer(tmp_path, name, reward=noisy, seed=0, **settings):
    """A run of 8 steps; `seed` stands for whatever else the process did with the global generators."""
    defaults = {
        "output_dir": str(tmp_path / str(name)),
        "max_steps": 8,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "beta": 0.05,
        "num_iterations": 2,
        "logging_steps": 3,
        "eval_steps": 4,
        "save_steps": 2,
        "device": "cpu",
        "dtype": "float32",
        "gradient_checkpointing": False,
    }
    model = tmp_path / "model"
    if not model.exists():
        tiny.save(model)
    random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
    rows = [{"prompt": text} for text in ("x", "yz")]
    return GRPOTrainer(str(model), reward, GRPOConfig(**{**defaults, **settings}), curriculum(), rows)


def signalled(step, number, reward=noisy):
    """The reward, which sends a signal to its own process during one step; 0 is the evaluation before the first."""

    def noisy(trainer_state, completions, **arguments):
        evaluation = len(completions) == 2
        if (step, evaluation) in ((0, trainer_state.global_step == 0), (trainer_state.global_step + 1, False)):
            os.kill(os.getpid(), number)
        return reward(completions=completions, **arguments)

    return noisy


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


CLOCK = ("tokens/s", "rollout/tokens/s", "rollout/share", "mfu")  # with time/..., eval/time and step_time


def untimed(run):
    """metrics.jsonl without what a clock says."""
    return [{k: v for k, v in row.items() if "time" not in k and k not in CLOCK} for row in lines(run)]


WEIGHTS = {"model.safetensors", "adapter_model.safetensors"}


def assert_same_run(run, whole):
    """All that two runs left behind, times aside, is the same."""
    assert untimed(run) == untimed(whole)
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    (_, mine), (_, theirs) = checkpoints(run).popitem(), checkpoints(whole).popitem()
    assert mine.name == theirs.name
    for name in ("model.safetensors", "adapter_model.safetensors", "reference.pt", "../merged/model.safetensors"):
        assert (mine / name).exists() == (theirs / name).exists(), name
        assert not (mine / name).exists() or (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    files = {path.name for path in mine.iterdir()}
    assert files == {path.name for path in theirs.iterdir()} and len(files & WEIGHTS) == 1
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, whole)]
    assert all(summary.pop("wall_seconds") > 0 for summary in summaries)
    assert summaries[0] == summaries[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """tmp_path of a run that nothing stopped, by dtype."""
    made = {}

    def make(dtype="float32"):
        if dtype not in made:
            made[dtype] = tmp_path_factory.mktemp(dtype)
            make_trainer(made[dtype], "whole", dtype=dtype).train()
        return made[dtype]

    return make


@pytest.mark.parametrize("stopped_at, dtype", [(n, "float32") for n in (0, 1, 4, 5, 8)] + [(5, "bfloat16")])
def test_a_stopped_run_goes_on_to_the_last_bit(whole, dtype, stopped_at, capsys):
    """0: in the first evaluation. 1, 5: between two lines of metrics.jsonl. 4: an evaluation and a save are due. 8: the
    end."""
    folder = whole(dtype)
    name = f"stopped-{stopped_at}"
    with pytest.raises(SystemExit) as stop:
        make_trainer(folder, name, signalled(stopped_at, signal.SIGTERM), dtype=dtype).train()
    assert stop.value.code == 143
    assert list(checkpoints(folder / name))[-1] == stopped_at
    assert f"stopped after step {stopped_at}; --resume_from_checkpoint auto" in capsys.readouterr().out
    trainer = make_trainer(folder, name, seed=1, dtype=dtype, resume_from_checkpoint="auto")
    trainer.train()
    assert (trainer.source.level, trainer.log.checkpoint.name) == (1, f"checkpoint-{stopped_at}")
    assert_same_run(folder / name, folder / "whole")


ADAPTERS = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2}


@pytest.mark.parametrize(
    "settings, package",
    [
        (ADAPTERS, "peft"),
        (ADAPTERS | {"beta": 0.0, "dtype": "bfloat16"}, "peft"),
        (MOVING, None),
        ({"ref_device": "cpu"}, None),
        (MOVING | {"ref_device": "cpu"}, None),
        ({"ref_quantization": "int8"}, "torchao"),
        ({"beta": 0.0, "rollout_backend": "hf"}, None),
        ({"reward_errors": "skip", "multi_objective_aggregation": "normalize_then_sum"}, None),
    ],
)
def test_whatever_the_policy_and_the_reference_are(tmp_path, settings, package):
    """Adapters, references that moved, that rest on the host, or that are quantized; stopped between two lines."""
    if package is not None:
        pytest.importorskip(package)
    make_trainer(tmp_path, "whole", **settings).train()
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(5, signal.SIGTERM), **settings).train()
    checkpoint = tmp_path / "run" / "checkpoint-5"
    assert (checkpoint / "adapter_model.safetensors").exists() == ("use_peft" in settings)
    assert (checkpoint / "reference.pt").exists() == ("sync_ref_model" in settings)
    assert not (tmp_path / "run" / "merged").exists()
    make_trainer(tmp_path, "run", seed=1, resume_from_checkpoint="auto", **settings).train()
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "merged").exists() == ("use_peft" in settings)
    measured = [row["step"] for row in lines(tmp_path / "run") if "ref/kl_error" in row]
    assert measured == ([3] if "ref_quantization" in settings else [])


def test_a_reference_that_moved_is_not_the_one_that_the_run_began_with(tmp_path):
    """So the test above would see it if it were not restored."""
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(5, signal.SIGTERM), **MOVING).train()
    trainer = make_trainer(tmp_path, "run", resume_from_checkpoint="auto", **MOVING)
    fresh = [parameter.clone() for parameter in trainer.update.reference.policy.module.parameters()]
    restore(trainer.parts(), trainer.log.checkpoint, trainer.about())
    moved = trainer.update.reference.policy.module.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(fresh, moved, strict=True) if a.ndim == 2)


def test_a_quantized_reference_that_was_never_compared_still_is(tmp_path):
    """Stopped before the first step; and what was said once is not said again."""
    pytest.importorskip("torchao")
    settings = {"ref_quantization": "int8"}
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(0, signal.SIGTERM), **settings).train()
    make_trainer(tmp_path, "run", resume_from_checkpoint="auto", **settings).train()
    assert [row["step"] for row in lines(tmp_path / "run") if "ref/kl_error" in row] == [3]


def test_what_was_said_once_is_not_said_again(tmp_path, capsys):
    settings = {"beta": 0.0, "loss_type": "grpo", "num_iterations": 1}
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(5, signal.SIGTERM), **settings).train()
    make_trainer(tmp_path, "run", resume_from_checkpoint="auto", **settings).train()
    said = capsys.readouterr().out
    assert said.count("a loss near 0 is right") == 1 and said.count("warning: more than half") == 1


def test_a_finished_run_stays_as_it_is(whole):
    folder = whole()
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    summary = make_trainer(folder, "whole", resume_from_checkpoint="auto").train()
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before and summary["steps"] == 8


class Crash(BaseException):
    """The end of a run for no reason that anybody expects."""


def crash(step):
    """The reward, which fails in one step: everything since the last save is lost."""

    def noisy_or_not(trainer_state, completions, **arguments):
        if trainer_state.global_step == step - 1 and len(completions) > 2:
            raise Crash
        return noisy(completions=completions, **arguments)

    noisy_or_not.__name__ = "noisy"
    return noisy_or_not


def test_an_error_costs_no_line_of_metrics(whole):
    """What was measured since the last line is written; a run that goes on cuts it, and comes to the same lines."""
    folder = whole()
    run = folder / "error"
    with pytest.raises(Crash):
        make_trainer(folder, "error", crash(6)).train()
    assert [row["step"] for row in lines(run)] == [0, 3, 4, 5]
    two = [row["num_tokens"] for row in lines(run) if "num_tokens" in row]
    assert two[1] > two[0]
    make_trainer(folder, "error", seed=1, resume_from_checkpoint="auto").train()
    assert_same_run(run, folder / "whole")


def test_damage_is_passed_over_and_set_aside(whole, capsys):
    folder = whole()
    run = folder / "damaged"
    with pytest.raises(Crash):
        make_trainer(folder, "damaged", crash(8)).train()
    assert list(checkpoints(run)) == [2, 4, 6]
    assert {row["step"] for row in lines(run)} == {0, 3, 4, 6, 7}
    weights = run / "checkpoint-6" / "optimizer.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    (run / ".tmp-checkpoint-8").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint-6/optimizer\.pt is damaged"):
        make_trainer(folder, "damaged", resume_from_checkpoint=str(run / "checkpoint-6"))
    capsys.readouterr()
    make_trainer(folder, "damaged", resume_from_checkpoint="auto", seed=1).train()
    said = capsys.readouterr().out
    assert "optimizer.pt is damaged" in said and "checkpoint-6 is passed over" in said
    assert "going on from" in said and "checkpoint-4" in said
    assert (run / "stale-checkpoint-6" / "optimizer.pt").exists() and not list(run.glob(".tmp*"))
    assert_same_run(run, folder / "whole")


def test_a_full_disk_ends_the_run_and_costs_nothing_that_was_saved(whole, monkeypatch):
    folder = whole()
    run = folder / "full"

    def save_model(path, *arguments):
        if path.name.endswith("-6"):
            (path / "model.safetensors").write_bytes(b"half of it")
            raise OSError(28, "No space left on device", str(path / "model.safetensors"))
        checkpoint.save_model(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fastgrpo.run.snapshot.save_model", save_model)
        with pytest.raises(
            ValueError, match=r"checkpoint-6 could .*No space left.*checkpoint-4 is the newest good one"
        ):
            make_trainer(folder, "full").train()
    assert list(checkpoints(run)) == [2, 4] and not list(run.glob(".tmp*"))
    make_trainer(folder, "full", resume_from_checkpoint="auto", seed=1).train()
    assert_same_run(run, folder / "whole")


def test_a_named_checkpoint_goes_on_in_its_own_folder(whole):
    """From an older one: what came after it is cut, and kept where it cannot be taken for the new course."""
    folder = whole()
    run = folder / "named"
    make_trainer(folder, "named").train()
    trainer = make_trainer(folder, None, output_dir=None, resume_from_checkpoint=str(run / "checkpoint-2"), seed=1)
    assert trainer.log.dir == run and list(checkpoints(run)) == [2, 4, 6, 8]  # nothing moves before it has gone on
    trainer.train()
    assert list(checkpoints(run)) == [2, 4, 6, 8]
    assert {path.name for path in run.glob("stale-*")} == {f"stale-checkpoint-{step}" for step in (4, 6, 8)}
    assert_same_run(run, folder / "whole")


def test_a_model_object_goes_on_too(tmp_path):
    def train(name, **settings):
        model = tiny.model("llama", vocab_size=258, tie_word_embeddings=True)
        args = GRPOConfig(
            output_dir=str(tmp_path / name), max_steps=4, prompts_per_step=2, max_completion_length=4, save_steps=1,
            learning_rate=1e-2, device="cpu", logging_steps=1, dtype="bfloat16", **settings,
        )  # fmt: skip
        rows = [{"prompt": "ab"}, {"prompt": "c"}]

        def reward(completions, **columns):
            return [float(len(text)) for text in completions]

        reward = signalled(2, signal.SIGINT, reward) if settings.get("save_total_limit") else reward
        reward.__name__ = "noisy"
        GRPOTrainer(model, reward, args, rows, processing_class=tiny.tokenizer()).train()

    train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("run", save_total_limit=1)
    assert list(checkpoints(tmp_path / "run")) == [2]
    train("run", resume_from_checkpoint="auto")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_rows_that_were_lost_are_said(whole, capsys):
    folder = whole()
    with pytest.raises(Crash):
        make_trainer(folder, "lost", crash(6)).train()
    (folder / "lost" / "metrics.jsonl").write_text("")
    make_trainer(folder, "lost", resume_from_checkpoint="auto").train()
    assert "metrics.jsonl has lost lines" in capsys.readouterr().out
    assert [row["step"] for row in lines(folder / "lost")] == [6, 8, 8]


def test_auto_starts_where_nothing_is(tmp_path, capsys):
    def log():
        return RunLog(GRPOConfig(output_dir=str(tmp_path / "run"), resume_from_checkpoint="auto"))

    for _ in range(2):  # the second time after a run that died before its first checkpoint
        started = log()
        started.write(1, {"reward": 1.0})
        started.close()
        assert "no checkpoint in" in capsys.readouterr().out
        assert len(lines(tmp_path / "run")) == 1
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="finished run without its checkpoints"):
        log()


def test_auto_leaves_a_folder_alone_that_is_not_a_run(tmp_path):
    tiny.save(tmp_path / "model")
    (tmp_path / "model" / "curves.png").write_text("mine")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    with pytest.raises(ValueError, match="model holds files that are not of a run"):
        RunLog(GRPOConfig(output_dir=str(tmp_path / "model"), resume_from_checkpoint="auto"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted([*before, ".lock"])
    json.loads((tmp_path / "model" / "config.json").read_text())["model_type"]


def test_where_all_are_damaged_nothing_is_started(tmp_path):
    for step in (1, 2):
        (write_checkpoint(tmp_path, step, lambda path: (path / "a").write_text("a")) / "a").write_text("b")
    said = []
    with pytest.raises(ValueError, match="no good checkpoint is left"):
        newest_good(tmp_path, said.append)
    assert ["checkpoint-2/a is damaged" in said[0], "checkpoint-1/a is damaged" in said[1]] == [True, True]


def test_paths_that_are_no_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    for path, output_dir, match in (
        (tmp_path / "nowhere", None, "no such folder"),
        (tmp_path / "run", None, "its name must be checkpoint-STEP"),
        (tmp_path / "run" / "checkpoint-2" / "..", None, "its name must be checkpoint-STEP"),
        (tmp_path / "run" / "checkpoint-2", tmp_path / "other", "goes on in its own run folder"),
        (tmp_path / "run" / "checkpoint-2", None, "manifest.json is missing"),
    ):
        output_dir = None if output_dir is None else str(output_dir)
        with pytest.raises(ValueError, match=match):
            RunLog(GRPOConfig(output_dir=output_dir, resume_from_checkpoint=str(path)))


def test_settings_that_change_the_run_are_refused_and_others_warned_of(whole, capsys):
    folder = whole()
    with pytest.raises(Crash):
        make_trainer(folder, "changed", crash(5)).train()
    with pytest.raises(ValueError, match=r"trained with learning_rate=0.003, now it is 0.1; .*--model_name_or_path"):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", learning_rate=0.1)
    with pytest.raises(ValueError, match="checkpoint-4 is past max_steps=3"):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=3).train()
    capsys.readouterr()
    trainer = make_trainer(
        folder, "changed", resume_from_checkpoint="auto", max_steps=10, save_steps=5, max_tokens_per_microbatch=64,
        report_to="tensorboard",
    )  # fmt: skip
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2 and "max_steps was 8 and is 10 now" in warnings[0] and "microbatch" in warnings[1]
    assert trainer.train()["steps"] == 10
    assert untimed(folder / "changed")[0] == untimed(folder / "whole")[0]
    with pytest.raises(
        ValueError, match="was trained in float32, the policy is bfloat16 now; go on with --dtype float32"
    ):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=10, dtype="bfloat16").train()
    assert json.loads((folder / "changed" / "config.json").read_text())["dtype"] == "float32"
    trainer = make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=10, reward_errors="skip")
    trainer.source.levels[-1].source.rows.pop()
    with pytest.raises(ValueError, match="was trained on 5 rows, the data now has 4"):
        trainer.train()


def test_the_command_line():
    assert parse(["--output_dir", "x", "--resume_from_checkpoint", "auto"]).resume_from_checkpoint == "auto"


def test_a_folder_belongs_to_one_process(tmp_path):
    code = f"""
import sys, time
from fastgrpo.run.folder import claim_output_dir
held = claim_output_dir({str(tmp_path)!r}, "t", resume=True)
print("held", flush=True)
time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert other.stdout.readline() == "held\n"
        (tmp_path / "metrics.jsonl").write_text("rows")
        for settings in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match=rf"in use by a run that still lives \(process {other.pid} on "):
                claim_output_dir(str(tmp_path), "t", **settings)
        assert (tmp_path / "metrics.jsonl").read_text() == "rows"
    finally:
        other.kill()
        other.wait()
    claim_output_dir(str(tmp_path), "t", resume=True)[1].close()  # the lock died with its process


# Kills. A run of its own process, whose reward is `toy_reward.py` beside its data.

TOY_REWARD = """
import random

def share_of_a(completions, **columns):
    return [text.count("a") / max(len(text), 1) + 0.1 * random.random() for text in completions]
"""


def write_toy(folder):
    tiny.save(folder / "model")
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "c", "hello ", "1+1=", "?"))
    (folder / "train.jsonl").write_text(rows)
    (folder / "test.jsonl").write_text(rows)
    (folder / "toy_reward.py").write_text(TOY_REWARD)


def toy_flags(folder, name, steps, *more):
    """The command line of a toy run."""
    settings = {
        "task": "dataset", "dataset_name": folder, "model_name_or_path": folder / "model",
        "reward_funcs": "toy_reward:share_of_a", "output_dir": folder / name, "max_steps": steps,
        "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-3, "beta": 0.05,
        "logging_steps": 3, "eval_steps": 7, "save_steps": 1, "save_total_limit": 3, "device": "cpu",
        "gradient_checkpointing": False, "resume_from_checkpoint": "auto",
    }  # fmt: skip
    return [*(str(part) for name, value in settings.items() for part in (f"--{name}", value)), *more]


def start(folder, *run):
    """The process of a toy run; `run` as in `toy_flags`."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.train", *toy_flags(folder, *run)], env=environment, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_a_save(process, run, at_start):
    """Until the process has written a checkpoint that was not there when it started, or has ended."""
    while process.poll() is None and set(checkpoints(run) if run.exists() else ()) <= set(at_start):
        time.sleep(0.01)


def test_a_process_that_is_told_to_stop_says_how_to_go_on(tmp_path):
    write_toy(tmp_path)
    process = start(tmp_path, "run", 100_000)
    wait_for_a_save(process, tmp_path / "run", ())
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    step = list(checkpoints(tmp_path / "run"))[-1]
    verify(tmp_path / "run" / f"checkpoint-{step}")
    assert "SIGTERM: finishing the step, then saving; a second signal ends the process at once" in said
    last = said.strip().splitlines()[-1]
    assert last == f"stopped after step {step}; --resume_from_checkpoint auto --output_dir {tmp_path / 'run'} goes on"


def test_a_killed_run_of_adapters_goes_on_and_leaves_a_plain_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    write_toy(tmp_path)
    run, adapters = tmp_path / "run", ("--use_peft", "True", "--lora_target_modules", "all-linear")
    process = start(tmp_path, "run", 100_000, *adapters)
    wait_for_a_save(process, run, ())
    process.kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said
    killed, last = list(checkpoints(run))[-1], list(checkpoints(run))[-1] + 2
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(toy_flags(tmp_path, "run", last, *adapters)) == 0
    assert f"going on from {run / f'checkpoint-{killed}'}" in capsys.readouterr().out
    assert not (run / f"checkpoint-{last}" / "model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(run / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    moved = [name for name, value in merged.items() if not torch.equal(value, base.pop(name))]
    assert not base and moved and all("_proj" in name for name in moved)


@pytest.mark.slow
@pytest.mark.parametrize("kills, steps, seed", [(20, 600, 0)])
def test_kills_at_random_moments_change_nothing(tmp_path, kills, steps, seed):
    """SIGKILL, at every second one within a few steps of the first new checkpoint, saves always under way; at every
    tenth one while the process still starts."""
    write_toy(tmp_path)
    process = start(tmp_path, "whole", steps)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    rng, run, report = random.Random(seed), tmp_path / "run", []
    for kill in range(kills):
        before = list(checkpoints(run)) if run.exists() else []
        process = start(tmp_path, "run", steps)
        if kill % 10 == 9:
            time.sleep(rng.uniform(0.1, 8))
        else:
            wait_for_a_save(process, run, before)
            time.sleep(rng.uniform(0, 0.15 if kill % 2 else 1.5))
        assert process.poll() is None, process.communicate()[0]  # it was alive
        process.kill()
        process.communicate()
        report.append((list(checkpoints(run))[-1], len(list(run.glob(".tmp-checkpoint-*")))))
    process = start(tmp_path, "run", steps)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    print(f"\n{kills} kills after steps {[step for step, _ in report]}, {sum(n for _, n in report)} inside of a save")
    assert "damaged" not in said
    assert_same_run(run, tmp_path / "whole")
