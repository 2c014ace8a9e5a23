"""Runs of several ranks that end early, by an error or by SIGKILL, and go on: on the same ranks to the last bit."""

import pytest
import tiny
import torch
from ranks import forked
from resumed import Crash, assert_same_run, make_trainer, untimed
from safetensors.torch import load_file
from trained_ranks import CASE, CHANGES, KILLS, STEPS, cases, crashing, share_of_a

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_curves")]


def started(folder, size):
    """Let ranks run all cases of a size: the folder of their runs, and a function of the end of a case."""
    top = folder / "runs"
    if not top.exists():
        tiny.save(top / "model")
    (folder / size).mkdir()
    return top, forked("trained_ranks.py", folder / size, top, size, limit=CASE * (1 + len(cases(top, size))))


def test_kills_inside_of_saves_cost_nothing_that_was_saved(tmp_path):
    """Rank 1 while both write checkpoint-4; then rank 0 as it gets its name; then the run goes on to its end."""
    top, ended = started(tmp_path, "killed")
    assert [ended(f"kill-{kill}")[0] for kill in range(3)] == [[1, -9], [-9, 1], [0, 0]]
    for kill in (1, 2):
        assert ended(f"kill-{kill}")[1][0].startswith("begins with ['.tmp-checkpoint-4', 'checkpoint-2']\n")
    assert not list((top / "killed").glob(".tmp-*"))
    assert_same_run(top / "killed", top / "fsdp2-whole")


def assert_close(run, whole):
    """The last steps of two runs, and where they came to, are the same within rounding."""
    rows = [[row for row in untimed(folder) if row["step"] > 4] for folder in (run, whole)]
    assert len(rows[0]) >= 2
    for mine, theirs in zip(*rows, strict=True):
        for name, value in theirs.items():
            if not name.startswith("rollout/live"):  # how many sequences a rank draws at once, of those dealt to it
                assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    weights = [load_file(folder / "checkpoint-6" / "model.safetensors") for folder in (run, whole)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=3e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_runs_go_on_in_the_same_mode_to_the_last_bit_and_in_another_within_rounding(tmp_path):
    top, ended = started(tmp_path, "small")
    for case in ("ddp", "fsdp2", "from-ddp", "from-fsdp2"):
        codes, said = ended(case)
        assert codes == [0, 0], "\n".join(said)
    for mode, other in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        assert_same_run(top / mode, top / f"{mode}-whole")
        told = f"checkpoint-4 was written by 2 processes with {mode}, and goes on with 2 processes with {other}: "
        assert [text.count(told) for text in ended(f"from-{mode}")[1]] == [1, 0]
        assert_close(top / f"from-{mode}", top / f"{mode}-whole")


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_kills_at_random_moments_change_nothing(many, mode):
    """Kills of one rank or of both, as they begin some exchange, or as they write, hash, rename or delete a file.

    A kill may hit no rank, where the run ends before; the first one hits, since the whole run is ahead of it.
    """
    top, ended = many
    codes = [ended(f"{mode}-kill-{kill}")[0] for kill in range(KILLS)]
    assert -9 in codes[0] and all(-9 in of_kill or of_kill == [0, 0] for of_kill in codes), codes
    assert not any(None in of_kill for of_kill in codes), codes
    assert ended(f"{mode}-end")[0] == [0, 0], ended(f"{mode}-end")[1]
    assert_same_run(top / f"killed-{mode}", top / f"{mode}-whole")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return started(tmp_path_factory.mktemp("killed"), "kills")


def test_other_numbers_of_ranks_come_to_where_one_process_would(tmp_path):
    top, said = tmp_path / "runs", {}
    make_trainer(top, "one-whole", share_of_a, **STEPS).train()
    for after, mode in ((after, mode) for before, after in CHANGES if before == 1 for mode in ("ddp", "fsdp2")):
        with pytest.raises(Crash):
            make_trainer(top, f"1-{after}-{mode}", crashing, **STEPS).train()
    for size in ("crashed-2", "crashed-4", "on-2", "on-4"):
        _, ended = started(tmp_path, size)
        for case in cases(top, size):
            codes, said[case] = ended(case)
            assert set(codes) == {0}, "\n".join(said[case])
    for mode in ("ddp", "fsdp2"):
        for before, after in CHANGES:
            run = top / f"{before}-{after}-{mode}"
            if after == 1:
                make_trainer(top, run.name, share_of_a, seed=1, resume_from_checkpoint="auto", **STEPS).train()
            else:
                written = "one process" if before == 1 else f"{before} processes with {mode}"
                told = f"checkpoint-4 was written by {written}, and goes on with {after} processes with {mode}: "
                assert told in said[run.name][0]
            assert_close(run, top / "one-whole")
