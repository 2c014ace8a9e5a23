"""Checkpoints are whole or not there; damage is named; the best and the newest stay."""

import json
import os
import threading

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastgrpo.run import checkpoint, folder
from fastgrpo.run.checkpoint import checkpoints, prune, save_model, step_of, verify, write_checkpoint
from fastgrpo.run.folder import RunFolder, contents, made_in
from fastgrpo.run.snapshot import HostCopies


def two_files(path):
    (path / "weights").write_bytes(bytes(range(256)) * 100)
    (path / "sub").mkdir()
    (path / "sub" / "state").write_text("{}")


def test_a_checkpoint_is_what_was_written(tmp_path):
    path = write_checkpoint(RunFolder(tmp_path), 3, two_files)
    assert path == tmp_path / "checkpoint-3" and step_of(path) == 3
    verify(path)
    assert set(json.loads((path / "manifest.json").read_text())["files"]) == {"weights", "sub/state"}
    (path / "notes.txt").write_text("a file of one's own is no damage")


def test_files_are_verified_side_by_side(tmp_path, monkeypatch):
    """Each of the two waits until the other one is begun."""
    path, together, entry = write_checkpoint(RunFolder(tmp_path), 3, two_files), threading.Barrier(2), checkpoint._entry

    def begun(file):
        together.wait(60)
        return entry(file)

    monkeypatch.setattr(checkpoint, "_entry", begun)
    verify(path)


def of_names(*names):
    """Write files of these names, of one process or of several ranks."""

    def write(path):
        for name in names:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(name)

    return write


SHARDED = [f"shards/{name}" for name in (".metadata", "values.pt", "rng-0.pt")]


@pytest.mark.parametrize(
    "names, lacking",
    [
        (("trainer_state.json", "rng.pt", "model.safetensors"), "does not list optimizer.pt"),
        (("trainer_state.json", "rng.pt", "optimizer.pt"), "lists no weights"),
        (("trainer_state.json", *SHARDED[:2], "model.safetensors"), "does not list shards/rng-0.pt"),
        (("trainer_state.json", *SHARDED), "lists no weights"),
        (("trainer_state.json", "rng.pt", "optimizer.pt", "model.safetensors"), None),
        (("trainer_state.json", *SHARDED, "model-1-of-2.safetensors"), None),
    ],
)
def test_what_a_run_needs_must_be_listed(tmp_path, names, lacking):
    path = write_checkpoint(RunFolder(tmp_path), 3, of_names(*names))
    verify(path)
    if lacking is None:
        verify(path, of_run=True)
    else:
        with pytest.raises(ValueError, match=rf"manifest.json {lacking}: the checkpoint is not complete"):
            verify(path, of_run=True)


def truncate(path):
    (path / "weights").write_bytes(bytes(range(256)) * 99)


def flip_a_bit(path):
    data = bytearray((path / "weights").read_bytes())
    data[777] ^= 1
    (path / "weights").write_bytes(data)


def name_a_file_outside(path):
    entry = {"bytes": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps({"files": {"../../etc/passwd": entry}}))


@pytest.mark.parametrize(
    "harm, named",
    [
        (truncate, "weights is damaged"),
        (flip_a_bit, "weights is damaged"),
        (lambda path: (path / "sub" / "state").unlink(), "sub/state is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"files": {"wei'), "manifest.json .* cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json .* cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json .* cannot be read"),
        (name_a_file_outside, "lies outside the checkpoint"),
    ],
)
def test_damage_is_named(tmp_path, harm, named):
    path = write_checkpoint(RunFolder(tmp_path), 3, two_files)
    harm(path)
    with pytest.raises(ValueError, match=named):
        verify(path)


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_moment_leaves_the_last_good_one(tmp_path, monkeypatch):
    """Every call that reaches the disk is the last one in turn, without the clean-up that a live process would do."""
    run = RunFolder(tmp_path)
    write_checkpoint(run, 1, two_files)
    clock = {"calls": 0, "last": None}

    def counted(function):
        def call(*arguments, **knobs):
            clock["calls"] += 1
            if clock["calls"] == clock["last"]:
                raise Killed
            return function(*arguments, **knobs)

        return call

    monkeypatch.setattr(checkpoint.os, "fsync", counted(os.fsync))
    monkeypatch.setattr(checkpoint.Path, "rename", counted(checkpoint.Path.rename))
    monkeypatch.setattr(checkpoint.Path, "write_text", counted(checkpoint.Path.write_text))
    monkeypatch.setattr(checkpoint.Path, "mkdir", counted(checkpoint.Path.mkdir))
    monkeypatch.setattr(checkpoint, "_entry", counted(checkpoint._entry))
    monkeypatch.setattr(folder, "note", counted(folder.note))
    remove, outcomes = RunFolder.remove, []
    # Leftovers are removed at the start of the next save; the dead do not clean up.
    monkeypatch.setattr(RunFolder, "remove", lambda run, name: None if clock["calls"] else remove(run, name))
    for last in range(1, 50):
        clock.update(calls=0, last=last)
        try:
            write_checkpoint(run, 2, two_files)
        except Killed:
            outcomes.append("checkpoint-2" if 2 in checkpoints(tmp_path) else "checkpoint-1")
        else:
            break
        verify(tmp_path / "checkpoint-1")
        if 2 in checkpoints(tmp_path):
            verify(tmp_path / "checkpoint-2")
            clock.update(last=None)
            remove(run, "checkpoint-2")
    assert len(outcomes) >= 10 and outcomes == sorted(outcomes) and outcomes[-1] == "checkpoint-2"  # killed at the end
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []  # leftovers went at the end


def test_a_failed_save_leaves_nothing(tmp_path):
    def full(path):
        two_files(path)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(RunFolder(tmp_path), 3, full)
    assert contents(tmp_path) == [] and made_in(tmp_path) == set()


def test_names_of_checkpoints(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "stale-checkpoint-11", "checkpoint-best"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert list(checkpoints(tmp_path)) == [9, 10]
    for name in ("../checkpoint-best", "checkpoint-1/..", "/etc", "checkpoint-1x"):
        with pytest.raises(ValueError, match="not a checkpoint: the name of a checkpoint is checkpoint-STEP"):
            step_of(name)


@pytest.mark.parametrize(
    "limit, best, kept",
    [
        (2, None, [3, 4]),
        (2, 1, [1, 4]),
        (1, 2, [2, 4]),
        (1, 4, [4]),
        (1, None, [4]),
        (3, 1, [1, 3, 4]),
        (9, 1, [1, 2, 3, 4]),
        (2, 7, [3, 4]),
    ],
)
def test_what_is_kept(tmp_path, limit, best, kept):
    run = RunFolder(tmp_path)
    for step in (1, 2, 3, 4):
        run.claim(f"checkpoint-{step}").mkdir()
    prune(run, limit, best)
    assert list(checkpoints(tmp_path)) == kept


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    run.claim("checkpoint-1").symlink_to(tmp_path / "elsewhere")
    run.claim("checkpoint-2").mkdir()
    prune(run, 1)
    assert (tmp_path / "elsewhere").is_dir() and list(checkpoints(tmp_path / "run")) == [2]


def test_a_checkpoint_that_no_run_made_is_neither_counted_nor_deleted_nor_overwritten(tmp_path):
    run = RunFolder(tmp_path)
    for step in (2, 3):
        run.claim(f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-9").mkdir()
    prune(run, 1)
    assert list(checkpoints(tmp_path)) == [1, 3, 9]
    with pytest.raises(ValueError, match="checkpoint-9 was not made by a run and is not overwritten; move it away"):
        write_checkpoint(run, 9, two_files)
    assert list((tmp_path / "checkpoint-9").iterdir()) == [] and not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_written_from_a_copy_loads_as_it_was(tmp_path, tied, dtype):
    model = tiny.model("llama", tie_word_embeddings=tied).to(dtype)
    copies = HostCopies().take(model.state_dict())
    head, embedding = copies["lm_head.weight"], copies["model.embed_tokens.weight"]
    assert (head is embedding) == tied
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # training goes on
    save_model(tmp_path, model, tiny.tokenizer(), copies)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.dtype == dtype, name


def test_a_saved_config_has_the_rotary_parameters_where_transformers_4_reads_them(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    save_model(tmp_path, tiny.model(rope_parameters=rope), tiny.tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.rope_parameters == rope
