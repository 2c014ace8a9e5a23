"""Any sequence of runs in one folder, with kills in the middle of a save, beside files of the user: nothing is lost."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run import checkpoint, folder
from fastgrpo.run.checkpoint import checkpoints, prune, step_of, verify, write_checkpoint
from fastgrpo.run.folder import LOCK, MADE, NAMES, contents, made_in
from fastgrpo.run.resume import newest_good, open_run, set_aside

STATE = json.dumps({"command": "train", "config": dataclasses.asdict(GRPOConfig())})
# What a user calls a file: N is the step of the next checkpoint, and L that of the last one.
USER_NAMES = ("notes.txt", "checkpoint-mine", "checkpoint-N", ".tmp-checkpoint-N", "stale-checkpoint-L", "merged")
MOMENTS = st.one_of(st.none(), st.none(), st.integers(1, 30))  # at which call of a save the process is killed


class Killed(BaseException):
    """The process ends here, without cleaning up."""


@contextlib.contextmanager
def killed_at(last):
    """End the process at one of the calls that reach the disk; `last` counts them from 1, and None ends it never."""
    calls = [0]

    def counted(function):
        def call(*arguments, **knobs):
            calls[0] += 1
            if last is not None and calls[0] >= last:
                raise Killed
            return function(*arguments, **knobs)

        return call

    remove = folder.RunFolder.remove
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        for owner, name in ((Path, "rename"), (Path, "write_text"), (Path, "mkdir"), (checkpoint, "_entry"),
                            (folder, "note"), (folder, "remove"), (os, "unlink")):  # fmt: skip
            patch.setattr(owner, name, counted(getattr(owner, name)))
        # What a live process removes after an error, a dead one leaves.
        patch.setattr(folder.RunFolder, "remove", lambda run, name: (last and calls[0] >= last) or remove(run, name))
        yield


class Runs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.top = Path(tempfile.mkdtemp())
        self.path = self.top / "run"
        self.path.mkdir()
        self.run, self.count = None, 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda descriptor: None)
        self.patch.setattr(checkpoint, "CHUNK", 1 << 10)
        self.mine = {}  # name -> what the user wrote there
        self.saved, self.aside = {}, set()  # step -> the weights of its checkpoint, and those that were set aside

    def teardown(self):
        if self.run is not None:
            self.run.close()
        self.patch.undo()
        shutil.rmtree(self.top)

    def die(self):
        self.run.close()
        self.run = None

    def tree(self):
        return {path: path.read_bytes() for path in self.path.rglob("*") if path.is_file() and path.name != LOCK}

    @rule(name=st.sampled_from(USER_NAMES), is_folder=st.booleans())
    def the_user_writes_a_file(self, name, is_folder):
        last = max([0, *self.saved])
        name = name.replace("N", str(last + 1)).replace("L", str(last))
        path = self.path / name
        if os.path.lexists(path) or name in made_in(self.path):
            return
        self.count += 1
        self.mine[name] = f"years of work {self.count}"
        if is_folder:
            path.mkdir()
            path /= "file"
        path.write_text(self.mine[name])

    def opened(self, **changes):
        """Open the folder for a run, which is refused where a run would overwrite something; nothing changes then."""
        if self.run is not None:
            self.die()
        before, said = self.tree(), []
        try:
            self.run, found = open_run(GRPOConfig(output_dir=str(self.path), **changes), said.append)
            return found
        except ValueError as error:
            assert self.tree() == before
            self.refused(str(error), changes)

    def refused(self, error, changes):
        """The user does what the error says: moves away what is in the way."""
        foreign = [name for name in self.mine if NAMES.fullmatch(name)]
        if "not empty" in error:
            assert not changes and contents(self.path)
        elif not foreign:
            assert not self.saved and (self.aside or self.mine), error
        for name in foreign:
            folder.remove(self.path / name)
            del self.mine[name]

    @rule(overwrite=st.sampled_from([False, False, False, True]))
    def a_new_run_begins(self, overwrite):
        there = contents(self.path)
        found = self.opened(**({"overwrite_output_dir": True} if overwrite else {}))
        if self.run is not None:
            assert found is None and (overwrite or not there)
            self.saved, self.aside = {}, set()
            assert {path.name for path in self.path.iterdir()} - {LOCK, MADE} == self.mine.keys()

    @rule(pick=st.none() | st.integers(0, 9))
    def a_run_goes_on(self, pick):
        """From the newest checkpoint, or from one that is named; later ones are set aside."""
        steps = sorted(self.saved)
        step = steps[pick % len(steps)] if pick is not None and steps else max(steps, default=None)
        named = "auto" if pick is None or not steps else str(self.path / f"checkpoint-{step}")
        found = self.opened(resume_from_checkpoint=named)
        if found is not None:
            assert step_of(found) == step
            set_aside(self.run, step, lambda line: None)
            self.aside |= {self.saved.pop(later) for later in steps if later > step}
        elif self.run is not None:  # a new run: there was nothing to go on from
            assert not self.saved and not self.aside

    def a_run_is_under_way(self):
        """Go on, or begin where there is nothing to go on from. Tell whether a run holds the folder."""
        if self.run is None:
            self.a_run_goes_on(None)
        if self.run is None and not self.saved and not self.aside:
            self.a_new_run_begins(True)
        return self.run is not None

    @rule(
        count=st.integers(1, 3), last=MOMENTS, limit=st.none() | st.integers(1, 3), pick=st.none() | st.integers(0, 9)
    )
    def it_saves(self, count, last, limit, pick):
        """Checkpoints one after another, the last of which may be killed in its midst; then too old ones go."""
        for number in range(count):
            if self.a_run_is_under_way():
                self.save(max([0, *self.saved]) + 1, last if number == count - 1 else None)
        if limit is not None and self.a_run_is_under_way():
            self.prune(limit, pick, last)

    def save(self, step, last):
        self.count += 1
        text, name = f"weights {self.count}", f"checkpoint-{step}"

        def write(path):
            for file in ("optimizer.pt", "rng.pt", "model.safetensors"):
                (path / file).write_text(text)
            (path / "trainer_state.json").write_text(STATE)

        with killed_at(last):
            try:
                write_checkpoint(self.run, step, write)
                self.saved[step] = text
            except ValueError:
                assert name in self.mine or f".tmp-{name}" in self.mine
            except Killed:
                self.die()
                if name not in self.mine and (self.path / name).exists():
                    self.saved[step] = text

    def prune(self, limit, pick, last):
        steps = sorted(self.saved)
        best = steps[pick % len(steps)] if pick is not None and steps else None
        with killed_at(last):
            try:
                prune(self.run, limit, best)
            except Killed:
                self.die()
        whole = {}
        for step in steps:
            with contextlib.suppress(ValueError):  # half deleted
                verify(self.path / f"checkpoint-{step}", of_run=True)
                whole[step] = self.saved[step]
        assert not steps or {steps[-1], best or steps[-1]} <= whole.keys()
        assert len(whole) >= min(len(steps), limit)
        assert self.run is None or len(whole) <= max(limit, 2)
        self.saved = whole

    @invariant()
    def nothing_of_the_user_is_touched(self):
        for name, text in self.mine.items():
            path = self.path / name
            assert (path / "file" if path.is_dir() else path).read_text() == text
        assert [*self.top.iterdir()] == [self.path]

    @invariant()
    def nothing_saved_is_lost(self):
        for step, text in self.saved.items():
            assert (self.path / f"checkpoint-{step}" / "model.safetensors").read_text() == text
        if self.saved or not checkpoints(self.path):
            newest = newest_good(self.path, lambda line: None)
            assert (newest and step_of(newest)) == max(self.saved, default=None)
        assert self.aside <= {path.read_text() for path in self.path.glob("stale-*/model.safetensors")}

    @invariant()
    def all_that_runs_made_is_noted(self):
        there = {path.name for path in self.path.iterdir()} - {LOCK, MADE}
        assert there - made_in(self.path) <= self.mine.keys() and not made_in(self.path) & self.mine.keys()


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=30, stateful_step_count=20)
