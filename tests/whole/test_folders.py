"""What a run must not delete, overwrite or lose: other people's files, its own inputs, and work that was saved."""

import json
import os
import shutil

import pytest
import tiny
from mistakes import Case, check

from fastgrpo import train
from fastgrpo.run.checkpoint import MANIFEST, STATE, _entry
from fastgrpo.run.folder import LOCK, MADE

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
    state = json.loads((checkpoint / STATE).read_text()) | changes
    state = {name: value for name, value in state.items() if name not in without}
    write_state(checkpoint, json.dumps(state))


def write_state(checkpoint, text):
    """Write the state of a run, and list it in the manifest anew."""
    (checkpoint / STATE).write_text(text)
    listed = json.loads((checkpoint / MANIFEST).read_text())
    listed["files"][STATE] = _entry(checkpoint / STATE)
    (checkpoint / MANIFEST).write_text(json.dumps(listed))


def tree(folder):
    """All that a folder holds, except for what a refused run may leave: its lock and its notes."""
    files = (path for path in sorted(folder.rglob("*")) if path.name not in (LOCK, MADE))
    return {path: os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes() for path in files}


def refused(case, capfd, message, **changes):
    """The command is refused, and nothing in the folder of the case changes."""
    before = tree(case.folder)
    check(train.main, case.argv(**changes), message, capfd)
    assert tree(case.folder) == before


@pytest.mark.parametrize("what, changes", [
    ("the model", lambda c: {"output_dir": c.model, "resume_from_checkpoint": "auto"}),
    ("the model", lambda c: {"model_name_or_path": c.folder / "link" / "checkpoint-2"}),
    ("the data set", lambda c: {"dataset_name": c.folder / "link" / "samples.jsonl", "overwrite_output_dir": True}),
])  # fmt: skip
def test_a_run_reads_nothing_from_its_own_folder(after, capfd, what, changes):
    (after.folder / "link").symlink_to(after.run)
    shutil.copy(after.rows, after.run / "samples.jsonl")
    refused(after, capfd, f"{what} .* lies inside output_dir", **changes(after))


def test_a_resumed_run_warns_of_other_rows(after, capfd):
    after.write('{"prompt": "ab"}', '{"prompt": "ce"}')
    assert train.main(after.argv(**RESUMED)) == 0
    out = capfd.readouterr().out
    assert "warning" in out and "have changed" in out


def test_a_resumed_run_refuses_other_weights_below_its_reference(after, capfd):
    tiny.save(after.model, seed=1)  # at beta above 0 the reference is made from them anew
    refused(after, capfd, "the weights at model_name_or_path have changed", **RESUMED)


def test_resumes_a_copy_of_a_run(after):
    """Without the files whose names begin with a dot, as `cp -r run/*` copies it."""
    other = shutil.copytree(after.run, after.folder / "other", ignore=shutil.ignore_patterns(".*"))
    assert train.main(after.argv(**RESUMED, output_dir=other)) == 0
    assert (other / "checkpoint-3").is_dir()


def test_errors_name_an_unreadable_or_incomplete_state(after, capfd):
    change_state(after.run / "checkpoint-2", without=["source"])
    refused(after, capfd, "checkpoint-2 .*KeyError: 'source'", **RESUMED)
    write_state(after.run / "checkpoint-2", "[]")
    refused(after, capfd, "checkpoint-2/trainer_state.json does not hold", **RESUMED)
