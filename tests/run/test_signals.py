"""The first signal is noted; a second one has its default action, which ends the process at once."""

import os
import signal
import threading

import pytest

from fastgrpo.ranks import RankLost, Ranks
from fastgrpo.run.signals import StopSignals


@pytest.mark.parametrize("number, ending", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_records_the_first_signal_and_restores_the_handlers(number, ending, capfd):
    before = [signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as stop:
        if (child := os.fork()) == 0:  # as a reward function that stops slow code does
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-number, 130) and not stop
        os.kill(os.getpid(), number)
        assert stop and stop.received == number
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)] == before
    assert f"{number.name}: finishing the step" in capfd.readouterr().err
    with pytest.raises(ending) as raised:
        stop.leave()
    assert number == signal.SIGINT or raised.value.code == 143


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_sets_no_handlers_in_other_threads():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def listen():
        with StopSignals() as stop:
            seen.append((signal.getsignal(signal.SIGTERM) is before, bool(stop)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


def two_ranks(rank, others):
    """One of two ranks, of which the other one has received a signal, or none."""
    ranks = Ranks(rank, 2)
    ranks.gather = lambda value, what: [others, value] if rank else [value, others]
    return ranks


@pytest.mark.parametrize("rank, told", [(0, 1), (1, 0)])
def test_a_signal_on_one_rank_stops_all_ranks_and_is_reported_once(rank, told, capfd):
    with StopSignals(two_ranks(rank, None)) as stop:
        assert not stop.agree("whether to stop")
        os.kill(os.getpid(), signal.SIGTERM)
        assert not capfd.readouterr().err  # it may be torchrun's, after the death of another rank
        assert stop.agree("whether to stop") and stop.agree("whether to stop")
    with StopSignals(two_ranks(rank, signal.SIGINT)) as other:
        assert other.agree("whether to stop")
    with pytest.raises(KeyboardInterrupt):
        other.leave()
    lines = capfd.readouterr().err.split("\n")
    for name in ("SIGTERM", "SIGINT"):
        assert sum(line.startswith(f"{name}: the step is finished") for line in lines) == told


def test_sigterm_of_torchrun_does_not_stop_a_rank_from_reporting():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(RankLost), StopSignals(two_ranks(0, None)):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RankLost("rank 0 stops")
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
