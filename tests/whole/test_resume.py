"""A run that was stopped or damaged goes on and is, to the last bit, the run that was not; or it is refused by name."""

import signal
from functools import partial

import pytest
import tiny
from resumed import Crash, acting, assert_same_run, crash, make_trainer
from runs import lines

from fastgrpo import GRPOConfig
from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.run.folder import note
from fastgrpo.run.log import RunLog

pytestmark = pytest.mark.usefixtures("without_curves")
ENTROPY = {"use_adaptive_entropy": True, "entropy_target": 20.0, "entropy_coef_delta": 0.01}
ADAPTERS = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}


def stopped(folder, step, name="run", **settings):
    """The folder of a run that SIGTERM stopped after a step."""
    with pytest.raises(SystemExit) as stop:
        make_trainer(folder, name, acting(step, partial(signal.raise_signal, signal.SIGTERM)), **settings).train()
    assert stop.value.code == 143
    return folder / name


def go_on(folder, name="run", **settings):
    """Go on from the newest checkpoint, with global generators in another state."""
    trainer = make_trainer(folder, name, **{"resume_from_checkpoint": "auto", "seed": 1, **settings})
    trainer.train()
    return trainer


# 0: in the first evaluation. 4: an evaluation and a save are due. 5: between two lines of metrics.jsonl.
@pytest.mark.parametrize("step, dtype", [(0, "float32"), (4, "float32"), (5, "bfloat16")])
def test_a_stopped_run_resumes_bit_for_bit(whole, dtype, step, capsys):
    folder, name = whole(dtype), f"stopped-{step}"
    run = stopped(folder, step, name, dtype=dtype)
    assert list(checkpoints(run))[-1] == step
    assert f"stopped after step {step}; continue with --resume_from_checkpoint auto" in capsys.readouterr().out
    trainer = go_on(folder, name, dtype=dtype)
    assert (trainer.source.level, trainer.log.checkpoint.name) == (1, f"checkpoint-{step}")
    assert_same_run(run, folder / "whole")


@pytest.mark.parametrize("settings", [
    ADAPTERS | {"dtype": "bfloat16"},
    ADAPTERS | {"dtype": "bfloat16", "load_in_4bit": True},
    {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_storage": "cpu"},
    {"ref_storage": "int8"},
    {"beta": 0.0, "rollout_backend": "hf", "multi_objective_aggregation": "normalize_then_sum"} | ENTROPY,
], ids=["adapters", "nf4", "moving", "int8", "entropy"])  # fmt: skip
def test_resumes_every_kind_of_policy_and_reference_bit_for_bit(tmp_path, settings):
    settings = settings | {"max_steps": 6}
    quantized = settings.get("ref_storage") == "int8"
    if quantized or "load_in_4bit" in settings:
        pytest.importorskip("torchao" if quantized else "bitsandbytes")
    tiny.save(tmp_path / "model", hidden_size=64)
    make_trainer(tmp_path, "whole", **settings).train()
    run = stopped(tmp_path, 5, **settings)
    assert (run / "checkpoint-5" / "adapter_model.safetensors").exists() == ("use_peft" in settings)
    assert (run / "checkpoint-5" / "reference.pt").exists() == (quantized or "sync_ref_model" in settings)
    assert not (run / "merged").exists()
    go_on(tmp_path, **settings)
    assert_same_run(run, tmp_path / "whole")
    assert (run / "merged").exists() == ("use_peft" in settings)
    assert [row["step"] for row in lines(run) if "ref/kl_error" in row] == ([3] if quantized else [])


def test_resuming_a_finished_run_changes_nothing(whole):
    folder = whole()
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    assert make_trainer(folder, "whole", resume_from_checkpoint="auto").train()["steps"] == 8
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before


def crashed(folder, name, step):
    with pytest.raises(Crash):
        make_trainer(folder, name, crash(step)).train()
    return folder / name


def test_skips_and_renames_damaged_checkpoints(whole, capsys):
    folder = whole()
    run = crashed(folder, "damaged", 8)
    assert list(checkpoints(run)) == [2, 4, 6] and {row["step"] for row in lines(run)} == {0, 3, 4, 6, 7}
    weights = run / "checkpoint-6" / "optimizer.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    note(run, ".tmp-checkpoint-8")  # as a kill in the middle of a save leaves it
    (run / ".tmp-checkpoint-8").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint-6/optimizer\.pt is damaged"):
        make_trainer(folder, "damaged", resume_from_checkpoint=str(run / "checkpoint-6"))
    capsys.readouterr()
    go_on(folder, "damaged")
    said = capsys.readouterr().out
    assert "checkpoint-6 is skipped" in said and "resuming from" in said and "checkpoint-4" in said
    assert (run / "stale-checkpoint-6" / "optimizer.pt").exists() and not list(run.glob(".tmp*"))
    assert_same_run(run, folder / "whole")


def test_a_named_checkpoint_resumes_in_its_own_folder(whole):
    folder = whole()
    run = folder / "named"
    make_trainer(folder, "named").train()
    trainer = make_trainer(folder, None, output_dir=None, resume_from_checkpoint=str(run / "checkpoint-2"), seed=1)
    assert trainer.log.dir == run and list(checkpoints(run)) == [2, 4, 6, 8]  # nothing moves before it has gone on
    trainer.train()
    assert list(checkpoints(run)) == [2, 4, 6, 8]
    assert {path.name for path in run.glob("stale-*")} == {f"stale-checkpoint-{step}" for step in (4, 6, 8)}
    assert_same_run(run, folder / "whole")


def log_of(folder, **settings):
    return RunLog(GRPOConfig(**{"output_dir": str(folder), "resume_from_checkpoint": "auto", **settings}))


def test_auto_starts_a_run_without_a_checkpoint(tmp_path, capsys):
    for _ in range(2):  # the second time after a run that died before its first checkpoint
        started = log_of(tmp_path / "run")
        started.write(1, {"reward": 1.0})
        started.close()
        assert "no checkpoint in" in capsys.readouterr().out
        assert len(lines(tmp_path / "run")) == 1
    (tmp_path / "run" / ".made-by-runs").open("a").write("checkpoint-40\n")
    with pytest.raises(ValueError, match="held checkpoint-40, which is not there now"):
        log_of(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="finished run without its checkpoints"):
        log_of(tmp_path / "run")


@pytest.mark.parametrize("path, output_dir, match", [
    ("nowhere", None, "no such folder"), ("run", None, "checkpoint-STEP"),
    ("run/checkpoint-2", "other", "its own run folder"),
])  # fmt: skip
def test_rejects_paths_that_are_not_checkpoints(tmp_path, path, output_dir, match):
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    output_dir = None if output_dir is None else str(tmp_path / output_dir)
    with pytest.raises(ValueError, match=match):
        log_of(tmp_path, output_dir=output_dir, resume_from_checkpoint=str(tmp_path / path))


def test_a_checkpoint_past_max_steps_is_refused(whole):
    folder = whole()
    crashed(folder, "changed", 5)
    with pytest.raises(ValueError, match="checkpoint-4 is past max_steps=3"):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=3).train()
