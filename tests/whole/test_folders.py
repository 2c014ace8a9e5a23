"""What a run must not delete, overwrite or lose: other people's files, its own inputs, and work that was saved."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import tiny
from mistakes import Case, check
from paths import ROOT
from resumed import write_manifest

from fastgrpo import report, train
from fastgrpo.run.curves import draw_curves
from fastgrpo.run.folder import LOCK, MADE, claim_output_dir, remove

pytestmark = pytest.mark.usefixtures("without_curves")
RESUMED = {"max_steps": 3, "save_steps": 1, "beta": 0.1, "resume_from_checkpoint": "auto"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, saved):
    """The folder of a case whose run of two steps has ended, with a checkpoint after each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.run.curves.draw_curves", lambda *_: None)
        case = Case(tmp_path_factory.mktemp("finished"), saved, patch)
        assert train.main(case.argv(max_steps=2, save_steps=1, beta=0.1)) == 0
        return case.folder


@pytest.fixture
def case(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Case(tmp_path / "case", saved, monkeypatch)


@pytest.fixture
def after(case, finished):
    """A case whose run has ended."""
    shutil.rmtree(case.folder)
    shutil.copytree(finished, case.folder)
    settings = json.loads((case.run / "config.json").read_text())
    settings |= {"model_name_or_path": str(case.model), "dataset_name": str(case.rows)}
    for checkpoint in case.run.glob("checkpoint-*"):  # a test has its own copy of what the settings name
        change_state(checkpoint, config=settings)
    return case


def change_state(checkpoint, without=(), **changes):
    state = json.loads((checkpoint / "trainer_state.json").read_text()) | changes
    state = {name: value for name, value in state.items() if name not in without}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)


def tree(folder):
    """All that a folder holds, except for what a refused run may leave: its lock and its notes."""
    files = (path for path in sorted(folder.rglob("*")) if path.name not in (LOCK, MADE))
    return {path: os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes() for path in files}


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")


def refused(case, capfd, message, **changes):
    """The command is refused, and nothing in the folder of the case changes."""
    before = tree(case.folder)
    check(train.main, case.argv(**changes), message, capfd)
    assert tree(case.folder) == before


@pytest.mark.parametrize("name", ["run", "link"])
def test_overwriting_is_refused_where_a_file_of_someone_else_is_in_the_way(case, capfd, name):
    fill(case.run, "config.json", "checkpoint-of-my-thesis/text", "checkpoint-7/text", "merged/model")
    (case.folder / "link").symlink_to(case.run)
    refused(case, capfd, "holds checkpoint-7, which no run", output_dir=case.folder / name, overwrite_output_dir=True)


def test_overwriting_deletes_what_runs_made_and_leaves_the_rest(after):
    fill(after.run, "checkpoint-of-my-thesis/text", "notes.txt", "models/model")
    kept = {path: content for path, content in tree(after.run).items() if content == b"years of work"}
    assert train.main(after.argv(overwrite_output_dir=True)) == 0
    assert kept.items() <= tree(after.run).items() and len(kept) == 3
    assert not (after.run / "checkpoint-2").exists() and (after.run / "checkpoint-1").exists()


@pytest.mark.parametrize(
    "what, changes",
    [
        ("the model", lambda c: {"output_dir": c.model}),
        ("the model", lambda c: {"output_dir": c.model, "resume_from_checkpoint": "auto"}),
        ("the model", lambda c: {"model_name_or_path": c.folder / "link" / "checkpoint-2"}),
        ("the data set", lambda c: {"dataset_name": shutil.copy(c.rows, c.run / "samples.jsonl")}),
        ("the data set", lambda c: {"dataset_name": c.folder / "link" / "samples.jsonl", "overwrite_output_dir": True}),
    ],
)
def test_a_run_reads_nothing_from_its_own_folder(after, capfd, what, changes):
    (after.folder / "link").symlink_to(after.run)
    shutil.copy(after.rows, after.run / "samples.jsonl")
    refused(after, capfd, f"{what} .* lies inside output_dir", **changes(after))


def test_a_lock_that_is_a_link_is_not_followed(case, capfd):
    fill(case.folder, "thesis.txt")
    case.run.mkdir()
    (case.run / LOCK).symlink_to(case.folder / "thesis.txt")
    for changes in ({}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "auto"}):
        refused(case, capfd, "run/.lock is not the lock of a run", **changes)


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
            with pytest.raises(ValueError, match=rf"in use by a run that is still alive \(process {other.pid} on "):
                claim_output_dir(str(tmp_path), "t", **settings)
        assert (tmp_path / "metrics.jsonl").read_text() == "rows"
    finally:
        other.kill()
        other.wait()
    claim_output_dir(str(tmp_path), "t", resume=True).close()  # the lock died with its process


@pytest.mark.parametrize("row, told", [('{"prompt": "ce"}', "have changed"), ("", "then 2, now 1")])
def test_a_resumed_run_warns_of_other_rows(after, capfd, row, told):
    after.write('{"prompt": "ab"}', row)
    assert train.main(after.argv(**RESUMED)) == 0
    out = capfd.readouterr().out
    assert "warning" in out and told in out


def test_a_resumed_run_refuses_other_weights_below_its_reference(after, capfd):
    tiny.save(after.model, seed=1)  # at beta above 0 the reference is made from them anew
    refused(after, capfd, "the weights at model_name_or_path have changed", **RESUMED)


def copied(run, folder, *names):
    """Copy some of what a run left, or all without the names that begin with a dot, as `cp -r run/*` does."""
    for path in run.iterdir():
        if path.name in names or (not names and not path.name.startswith(".")):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)


def test_a_copy_of_a_run_goes_on(after):
    other = after.folder / "other"
    other.mkdir()
    copied(after.run, other)
    assert report.main([str(other)]) == 0
    assert train.main(after.argv(**RESUMED, output_dir=other)) == 0
    assert (other / "checkpoint-3").is_dir()


def test_what_stands_beside_a_copied_checkpoint_is_not_the_runs(after, capfd):
    other = after.folder / "other"
    fill(other, "checkpoint-9/thesis", "merged/model")
    copied(after.run, other, "checkpoint-2")
    refused(after, capfd, "holds checkpoint-9, which no run", **RESUMED, output_dir=other)


def test_checkpoints_that_were_set_aside_are_not_deleted_for_a_new_run(after, capfd):
    roundabout = after.run / "checkpoint-2" / ".." / "checkpoint-1"
    assert train.main(after.argv(**{**RESUMED, "resume_from_checkpoint": roundabout})) == 0
    assert {"checkpoint-1", "stale-checkpoint-2", "checkpoint-3"} <= {path.name for path in after.run.iterdir()}
    for path in (*after.run.glob("checkpoint-*"), after.run / "summary.json"):
        remove(path)
    refused(after, capfd, "run holds stale-checkpoint-2 and no checkpoint", **RESUMED)


def test_a_run_whose_metrics_and_curves_are_spoilt_keeps_its_weights(case, capfd):
    def spoil(completions, **columns):
        (case.run / "metrics.jsonl").unlink(missing_ok=True)
        (case.run / "curves.png").mkdir(exist_ok=True)
        return [0.0] * len(completions)

    importlib.import_module("own_rewards")
    case.patch("own_rewards.share", spoil)
    case.patch("fastgrpo.run.curves.draw_curves", draw_curves)  # the real one
    assert train.main(case.argv()) == 0
    assert "warning: curves.png is not written: " in capfd.readouterr().out
    assert (case.run / "checkpoint-1").is_dir() and (case.run / "summary.json").is_file()


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_report_does_not_overwrite_a_picture_that_no_run_made(after, capfd, through_a_link):
    fill(after.folder, "thesis.png")
    picture = after.run / "curves.png"
    picture.unlink(missing_ok=True)
    picture.symlink_to(after.folder / "thesis.png") if through_a_link else fill(after.run, "curves.png")
    (after.run / MADE).write_text("metrics.jsonl\n")
    check(report.main, [str(after.run)], "curves.png was not made by a run", capfd)
    assert picture.read_text() == "years of work"


def rewritten(name, text):
    return lambda checkpoint: (checkpoint / name).write_text(text)


def lacking(name):
    def harm(checkpoint):
        (checkpoint / name).unlink()
        write_manifest(checkpoint)

    return harm


@pytest.mark.parametrize(
    "harm, named",
    [
        (rewritten("manifest.json", "[" * 100_000), "manifest.json is missing or cannot be read"),
        (rewritten("manifest.json", '{"files": {}}'), "manifest.json does not list trainer_state.json"),
        (rewritten("optimizer.pt", "x"), "optimizer.pt is damaged"),
        (lacking("model.safetensors"), "manifest.json lists no weights"),
        (lacking("optimizer.pt"), "manifest.json does not list optimizer.pt"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(after, capfd, harm, named):
    harm(after.run / "checkpoint-2")
    assert train.main(after.argv(**RESUMED)) == 0
    told = capfd.readouterr().out
    assert named in told and "checkpoint-2 is passed over" in told and "going on from " in told
    assert (after.run / "checkpoint-3").is_dir() and (after.run / "stale-checkpoint-2").is_dir()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "\x80"], ids=lambda text: text[:2])
def test_a_state_that_cannot_be_read_is_named(after, capfd, text):
    (after.run / "checkpoint-2" / "trainer_state.json").write_text(text)
    write_manifest(after.run / "checkpoint-2")
    refused(after, capfd, "checkpoint-2/trainer_state.json (cannot be|does not hold)", **RESUMED)


@pytest.mark.parametrize("name", ["source", "rows", "global_step"])
def test_a_state_that_lacks_something_is_named(after, capfd, name):
    change_state(after.run / "checkpoint-2", without=[name])
    refused(after, capfd, rf"checkpoint-2 .*KeyError: '{name}'", **RESUMED)


def test_rubbish_in_metrics_is_named_and_passed_over(after, capfd):
    metrics = after.run / "metrics.jsonl"
    metrics.write_bytes(b"\x80rubbish" + metrics.read_bytes()[8:])
    assert train.main(after.argv(**RESUMED)) == 0 and report.main([str(after.run)]) == 0
    assert "metrics.jsonl:1 holds no metrics" in capfd.readouterr().out
    metrics.unlink()
    metrics.mkdir()
    refused(after, capfd, "metrics.jsonl is a folder", **{**RESUMED, "max_steps": 4})
