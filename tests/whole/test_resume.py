"""A run that was stopped, killed or damaged goes on and is, to the last bit, the run that was not."""

import signal

import pytest
import tiny
import torch
from resumed import ADAPTERS, MOVING, Crash, assert_same_run, crash, lines, make_trainer, signalled, write_manifest

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.run import checkpoint
from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.run.folder import note
from fastgrpo.run.snapshot import restore

pytestmark = pytest.mark.usefixtures("without_curves")


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
    assert f"stopped after step {stopped_at}; continue with --resume_from_checkpoint auto" in capsys.readouterr().out
    trainer = make_trainer(folder, name, seed=1, dtype=dtype, resume_from_checkpoint="auto")
    trainer.train()
    assert (trainer.source.level, trainer.log.checkpoint.name) == (1, f"checkpoint-{stopped_at}")
    assert_same_run(folder / name, folder / "whole")


@pytest.mark.parametrize(
    "settings, package",
    [
        (ADAPTERS, "peft"),
        (ADAPTERS | {"beta": 0.0, "dtype": "bfloat16"}, "peft"),
        (MOVING, None),
        ({"ref_storage": "cpu"}, None),
        (MOVING | {"ref_storage": "cpu"}, None),
        ({"ref_storage": "int8"}, "torchao"),
        ({"ref_storage": "int8", "scale_rewards": "none"}, None),  # a stand-in for torchao: see `rounded`
        ({"beta": 0.0, "rollout_backend": "hf"}, None),
        ({"reward_errors": "skip", "multi_objective_aggregation": "normalize_then_sum"}, None),
    ],
)
def test_whatever_the_policy_and_the_reference_are(tmp_path, settings, package, monkeypatch):
    """Adapters, references that moved, that rest on the host, or that are quantized; stopped between two lines."""
    if package is not None:
        pytest.importorskip(package)
    elif settings.get("ref_storage") == "int8":
        monkeypatch.setattr("fastgrpo.policy.ref_model.quantize", rounded)
    make_trainer(tmp_path, "whole", **settings).train()
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(5, signal.SIGTERM), **settings).train()
    checkpoint = tmp_path / "run" / "checkpoint-5"
    assert (checkpoint / "adapter_model.safetensors").exists() == ("use_peft" in settings)
    quantized = settings.get("ref_storage") == "int8"
    assert (checkpoint / "reference.pt").exists() == (quantized or "sync_ref_model" in settings)
    assert not (tmp_path / "run" / "merged").exists()
    make_trainer(tmp_path, "run", seed=1, resume_from_checkpoint="auto", **settings).train()
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "merged").exists() == ("use_peft" in settings)
    measured = [row["step"] for row in lines(tmp_path / "run") if "ref/kl_error" in row]
    assert measured == ([3] if quantized else [])


def test_a_backward_pass_that_leaves_columns_out_goes_on_to_the_last_bit(tmp_path):
    """Nearly all of the probability lies on the bytes of a large vocabulary, so that most columns are left out."""
    model = tiny.model(vocab_size=4000)
    with torch.no_grad():
        model.lm_head.weight[:258] *= 12
        model.lm_head.weight[258:] = 0
    for part in (model, tiny.tokenizer()):
        part.save_pretrained(tmp_path / "model")
    settings = {"head_backward_tolerance": 0.1, "max_steps": 5, "logging_steps": 1}
    make_trainer(tmp_path, "whole", **settings).train()
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(3, signal.SIGTERM), **settings).train()
    make_trainer(tmp_path, "run", seed=1, resume_from_checkpoint="auto", **settings).train()
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    kept = [row["head/kept_columns"] for row in lines(tmp_path / "run") if "head/kept_columns" in row]
    assert len(kept) == 5 and max(kept) < 0.9  # from 0.9 on, the exact pass would be taken


@torch.no_grad()
def rounded(model, name, device):
    """Quantized as int8 would be, in floats: torchao need not be installed."""
    for parameter in model.parameters():
        scale = parameter.abs().amax().clamp(min=1e-9) / 127
        parameter.copy_((parameter / scale).round() * scale)
    return model.to(device)


def test_a_part_that_is_missing_is_named(tmp_path):
    """A checkpoint whose manifest was made anew without a file: the run must not go on without that state."""
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(5, signal.SIGTERM), **MOVING).train()
    path = tmp_path / "run" / "checkpoint-5"
    (path / "reference.pt").unlink()
    write_manifest(path)
    with pytest.raises(ValueError, match=r"checkpoint-5/reference\.pt is missing from the checkpoint"):
        make_trainer(tmp_path, "run", resume_from_checkpoint="auto", **MOVING).train()
    (path / "optimizer.pt").unlink()
    write_manifest(path)
    with pytest.raises(ValueError, match=r"checkpoint-5/manifest\.json does not list optimizer\.pt"):
        make_trainer(tmp_path, "run", resume_from_checkpoint=str(path), **MOVING)


def test_a_reference_that_moved_is_not_the_one_that_the_run_began_with(tmp_path):
    """So the test above would see it if it were not restored."""
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, "run", signalled(5, signal.SIGTERM), **MOVING).train()
    trainer = make_trainer(tmp_path, "run", resume_from_checkpoint="auto", **MOVING)
    fresh = [parameter.clone() for parameter in trainer.updates.reference.policy.module.parameters()]
    restore(trainer.parts(), trainer.log.checkpoint, trainer.about(), pytest.fail)
    moved = trainer.updates.reference.policy.module.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(fresh, moved, strict=True) if a.ndim == 2)


def test_a_quantized_reference_that_was_never_compared_still_is(tmp_path):
    """Stopped before the first step; and what was said once is not said again."""
    pytest.importorskip("torchao")
    settings = {"ref_storage": "int8"}
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
    note(run, ".tmp-checkpoint-8")  # as a kill in the middle of a save leaves it
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
