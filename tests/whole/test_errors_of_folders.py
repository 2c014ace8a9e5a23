"""What a run must not delete, overwrite or lose: other people's files, its own inputs, and work that was saved."""

import importlib
import json
import os
import shutil
from pathlib import Path

import pytest
import tiny
from mistakes import Case, check
from resumed import write_manifest

from fastgrpo import report, train
from fastgrpo.run.curves import draw_curves
from fastgrpo.run.folder import LOCK, MADE, RunFolder, remove
from fastgrpo.trainer import grpo

pytestmark = pytest.mark.usefixtures("without_curves")


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
def after(tmp_path, finished, saved, monkeypatch):
    """A case whose run has ended."""
    case = Case(tmp_path / "case", saved, monkeypatch)
    shutil.rmtree(case.folder)
    shutil.copytree(finished, case.folder)
    settings = json.loads((case.run / "config.json").read_text())
    case.resumed = {"max_steps": 3, "save_steps": 1, "beta": 0.1, "resume_from_checkpoint": "auto"}
    moved = {"model_name_or_path": str(case.model), "dataset_name": str(case.rows)}
    for checkpoint in case.run.glob("checkpoint-*"):  # a test has its own copy of what the settings name
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "config": {**settings, **moved}}))
        write_manifest(checkpoint)
    return case


def tree(folder):
    """All that a folder holds, except for what a refused run may leave: its lock and its notes."""
    files = (path for path in sorted(folder.rglob("*")) if path.name not in (LOCK, MADE))
    return {path: os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes() for path in files}


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")


FOREIGN = ("config.json", "checkpoint-of-my-thesis/text", "checkpoint-7/text", "merged/model", "tensorboard/events")


@pytest.mark.parametrize("through_a_link", [False, True])
def test_overwriting_deletes_nothing_that_no_run_made(case, capfd, through_a_link):
    fill(case.run, *FOREIGN)
    (case.folder / "link").symlink_to(case.run)
    folder, before = case.folder / "link" if through_a_link else case.run, tree(case.run)
    argv = case.argv(output_dir=folder, overwrite_output_dir=True)
    check(train.main, argv, "holds checkpoint-7, which no run made there and a run would overwrite; move it", capfd)
    assert tree(case.run) == before


def test_overwriting_deletes_what_runs_made_and_leaves_the_rest(after):
    """Names that a run does not use stay untouched beside it."""
    fill(after.run, "checkpoint-of-my-thesis/text", "notes.txt", "models/model")
    kept = {path: content for path, content in tree(after.run).items() if content == b"years of work"}
    assert train.main(after.argv(overwrite_output_dir=True)) == 0
    assert kept.items() <= tree(after.run).items() and len(kept) == 3
    assert not (after.run / "checkpoint-2").exists() and (after.run / "checkpoint-1").exists()


@pytest.mark.parametrize(
    "what, settings",
    [
        ("the model", lambda case: {"output_dir": case.model}),
        ("the model", lambda case: {"output_dir": case.model, "resume_from_checkpoint": "auto"}),
        ("the model", lambda case: {"model_name_or_path": case.run / "checkpoint-2"}),
        ("the model", lambda case: {"model_name_or_path": case.link / "checkpoint-2"}),
        ("the data set", lambda case: {"dataset_name": shutil.copy(case.rows, case.run / "samples.jsonl")}),
        ("the data set", lambda case: {"dataset_name": case.link / "samples.jsonl"}),
        ("the file of reward function", lambda case: {"output_dir": case.folder}),
    ],
)
@pytest.mark.parametrize("overwrite", [None, True])
def test_a_run_reads_nothing_from_its_own_folder(after, capfd, what, settings, overwrite):
    after.link = after.folder / "link"
    after.link.symlink_to(after.run)
    shutil.copy(after.rows, after.run / "samples.jsonl")
    changes = settings(after)
    if what == "the file of reward function":  # everything else must lie elsewhere
        outside = after.folder.parent / "outside"
        shutil.copytree(after.model, outside)
        shutil.copy(after.rows, outside / "train.jsonl")
        changes |= {"model_name_or_path": outside, "dataset_name": outside / "train.jsonl"}
    if "resume_from_checkpoint" not in changes:
        changes |= {"overwrite_output_dir": overwrite}
    before = tree(after.folder)
    check(train.main, after.argv(**changes), f"{what} .* lies inside output_dir .*choose another output_dir", capfd)
    assert tree(after.folder) == before


def test_a_lock_that_is_a_link_is_not_followed(case, capfd):
    fill(case.folder, "thesis.txt")
    case.run.mkdir()
    (case.run / LOCK).symlink_to(case.folder / "thesis.txt")
    for changes in ({}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "auto"}):
        check(train.main, case.argv(**changes), "run/.lock is not the lock of a run; move it away", capfd)
    assert (case.folder / "thesis.txt").read_text() == "years of work"


def test_a_resumed_run_warns_of_other_rows(after, capfd):
    after.write('{"prompt": "ab"}', '{"prompt": "ce"}')
    assert train.main(after.argv(**after.resumed)) == 0
    told = capfd.readouterr().out
    assert "warning: the rows of the training data have changed since" in told and "not bit for bit" in told


def test_a_resumed_run_warns_of_more_rows(after, capfd):
    after.write('{"prompt": "ab"}', '{"prompt": "cd"}', '{"prompt": "ef"}')
    assert train.main(after.argv(**after.resumed)) == 0
    assert "checkpoint-2 was written (then 2, now 3): the run continues" in capfd.readouterr().out


def test_a_resumed_run_refuses_other_weights_below_its_reference(after, capfd):
    """At beta above 0 the reference is made from them anew."""
    tiny.save(after.model, seed=1)
    message = "the weights at model_name_or_path have changed since .*checkpoint-2 .*bring back those that were there"
    check(train.main, after.argv(**after.resumed), message, capfd)


def copied(run, folder, *names):
    """A copy of some of what a run left, as `cp -r run/*` makes it, without the names that begin with a dot."""
    for path in run.iterdir():
        if path.name in names or (not names and not path.name.startswith(".")):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)


@pytest.mark.parametrize("reported", [False, True])
def test_a_copy_without_the_notes_goes_on(after, reported):
    """A report in between changes nothing."""
    other = after.folder / "other"
    other.mkdir()
    copied(after.run, other)
    after.patch(
        "fastgrpo.report.draw_curves", lambda run, **_: Path(shutil.copy(run / "metrics.jsonl", run / "curves.png"))
    )
    assert not reported or report.main([str(other)]) == 0
    assert train.main(after.argv(**after.resumed, output_dir=other)) == 0
    assert (other / "checkpoint-3").is_dir()


def test_what_stands_beside_a_copied_checkpoint_is_no_runs(after, capfd):
    other = after.folder / "other"
    fill(other, "checkpoint-9/thesis", "merged/model")
    copied(after.run, other, "checkpoint-2")
    before = tree(other)
    message = "holds checkpoint-9, which no run made there and a run would overwrite; move it away"
    check(train.main, after.argv(**after.resumed, output_dir=other), message, capfd)
    assert tree(other) == before


def test_checkpoints_that_were_set_aside_are_not_deleted_for_a_new_run(after, capfd):
    assert train.main(after.argv(**{**after.resumed, "resume_from_checkpoint": after.run / "checkpoint-1"})) == 0
    for path in (*after.run.glob("checkpoint-*"), after.run / "summary.json"):
        remove(path)
    message = "run holds stale-checkpoint-2 and no checkpoint to go on from; rename it to go on from it, or choose"
    check(train.main, after.argv(**after.resumed), message, capfd)
    assert (after.run / "stale-checkpoint-2" / "model.safetensors").is_file()


def test_a_checkpoint_may_be_named_by_a_roundabout_path(after):
    """The folder on the way is one of those that are set aside."""
    path = after.run / "checkpoint-2" / ".." / "checkpoint-1"
    assert train.main(after.argv(**{**after.resumed, "resume_from_checkpoint": path})) == 0
    assert {"checkpoint-1", "stale-checkpoint-2", "checkpoint-3"} <= {entry.name for entry in after.run.iterdir()}


def test_whoever_deletes_the_metrics_of_a_run_does_not_lose_its_weights(case, capfd):
    def delete(completions, trainer_state, **columns):
        (case.run / "metrics.jsonl").unlink(missing_ok=True)
        return [0.0] * len(completions)

    importlib.import_module("own_rewards")
    case.monkeypatch.setattr("own_rewards.share", delete)
    case.patch("fastgrpo.run.curves.draw_curves", draw_curves)  # the real one
    assert train.main(case.argv()) == 0
    assert "warning: curves.png is not written: " in capfd.readouterr().out
    assert (case.run / "checkpoint-1").is_dir() and (case.run / "summary.json").is_file()


def test_a_resume_that_is_refused_notes_nothing(after, capfd):
    (after.run / MADE).unlink()
    fill(after.run, "merged/model")
    check(train.main, after.argv(**after.resumed, seed=7), "was trained with seed=", capfd)
    assert not (after.run / MADE).exists()


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_report_does_not_overwrite_a_picture_that_no_run_made(after, capfd, through_a_link):
    fill(after.folder, "thesis.png")
    picture = after.run / "curves.png"
    picture.unlink(missing_ok=True)
    picture.symlink_to(after.folder / "thesis.png") if through_a_link else shutil.copy(
        after.folder / "thesis.png", picture
    )
    (after.run / MADE).write_text("metrics.jsonl\n")
    check(report.main, [str(after.run)], "curves.png was not made by a run and is not overwritten; move it away", capfd)
    assert picture.read_text() == "years of work"


def test_a_run_writes_its_last_files_while_it_holds_its_folder(case, monkeypatch):
    held, finish = [], grpo.finish
    monkeypatch.setattr(grpo, "finish", lambda trainer: held.append(trainer.log.folder.held) or finish(trainer))
    assert train.main(case.argv()) == 0 and held == [True]


def test_a_folder_in_use_is_told_before_what_is_in_it(after, capfd):
    lock = RunFolder(after.run)
    check(train.main, after.argv(), "is in use by another trainer of this process", capfd)
    lock.close()
    check(train.main, after.argv(), "is not empty; choose another folder", capfd)


def without_weights(run):
    (run / "checkpoint-2" / "model.safetensors").unlink()
    write_manifest(run / "checkpoint-2")


def rewritten(manifest):
    return lambda run: (run / "checkpoint-2" / "manifest.json").write_text(manifest)


def without_optimizer(run):
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    write_manifest(run / "checkpoint-2")


@pytest.mark.parametrize(
    "harm, named",
    [
        (rewritten("[" * 100_000), r"manifest.json is missing or cannot be read: the checkpoint is not complete"),
        (rewritten('{"files": {}}'), r"manifest.json does not list trainer_state.json: the checkpoint is not complete"),
        (without_weights, r"manifest.json lists no weights: the checkpoint is not complete"),
        (without_optimizer, r"manifest.json does not list optimizer.pt: the checkpoint is not complete"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(after, capfd, harm, named):
    harm(after.run)
    assert train.main(after.argv(**after.resumed)) == 0
    told = capfd.readouterr().out
    assert f"{named}; checkpoint-2 is passed over" in told and "going on from " in told
    assert (after.run / "checkpoint-3").is_dir() and (after.run / "stale-checkpoint-2").is_dir()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "\x80"])
def test_a_state_that_cannot_be_read_is_named(after, capfd, text):
    (after.run / "checkpoint-2" / "trainer_state.json").write_text(text)
    write_manifest(after.run / "checkpoint-2")
    check(train.main, after.argv(**after.resumed), "checkpoint-2/trainer_state.json (cannot be|does not hold)", capfd)


@pytest.mark.parametrize("name", ["source", "rows", "global_step"])
def test_a_state_that_lacks_something_is_named(after, capfd, name):
    file = after.run / "checkpoint-2" / "trainer_state.json"
    file.write_text(json.dumps({key: v for key, v in json.loads(file.read_text()).items() if key != name}))
    write_manifest(file.parent)
    message = r"checkpoint-2 does not hold the state that this run needs \(KeyError: '" + name + r"'\); resume an older"
    check(train.main, after.argv(**after.resumed), message, capfd)


def test_rubbish_in_metrics_is_named_and_the_run_ends_well(after, capfd):
    metrics = after.run / "metrics.jsonl"
    metrics.write_bytes(b"\x80rubbish" + metrics.read_bytes()[8:])
    after.patch("fastgrpo.run.curves.draw_curves", draw_curves)  # the real one
    assert train.main(after.argv(**after.resumed)) == 0
    assert "metrics.jsonl:1 holds no metrics; 1 such lines are passed over" in capfd.readouterr().out
    assert (after.run / "curves.png").is_file() and (after.run / "summary.json").is_file()
    assert report.main([str(after.run)]) == 0  # every time
    assert "metrics.jsonl:1 holds no metrics" in capfd.readouterr().out


def test_a_folder_in_place_of_metrics_is_named(after, capfd):
    (after.run / "metrics.jsonl").unlink()
    (after.run / "metrics.jsonl").mkdir()
    check(train.main, after.argv(**after.resumed), "metrics.jsonl is a folder, where a file is needed", capfd)
    assert (after.run / "checkpoint-2").is_dir()


def test_a_folder_in_place_of_the_curves_costs_only_the_curves(after, capfd):
    """It appears while the run goes on: before the start it would be refused."""

    def finish(completions, **columns):
        (after.run / "curves.png").mkdir(exist_ok=True)
        return [0.0] * len(completions)

    (after.run / "curves.png").unlink(missing_ok=True)
    importlib.import_module("own_rewards")
    after.patch("fastgrpo.run.curves.draw_curves", draw_curves)  # the real one
    after.monkeypatch.setattr("own_rewards.share", finish)
    assert train.main(after.argv(**after.resumed)) == 0
    told = capfd.readouterr().out
    assert "warning: curves.png is not written: " in told and (after.run / "summary.json").is_file()
    assert (after.run / "checkpoint-3").is_dir()


def test_a_disk_that_fills_up_inside_torch_is_told_as_that(case, capfd):
    """The optimizer's state goes to a device that is always full; torch tells of an unexpected position."""
    path = case.run / ".tmp-checkpoint-1" / "optimizer.pt"

    def save_pretrained(*args, **kwargs):
        path.symlink_to("/dev/full")

    case.patch("transformers.PreTrainedModel.save_pretrained", save_pretrained)
    message = r"checkpoint-1 could not be written to .*No space left on device.*Fix the cause, then continue with"
    check(train.main, case.argv(), message, capfd)
