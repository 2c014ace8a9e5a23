"""Ranks exchange objects, flags and sums, and those who wait in vain say for what, for whom, and why."""

import os
import signal

import lost_ranks
import pytest
import torch
import torch.distributed as dist
from ranks import forked

from fastgrpo.ranks import ALONE, RankLost, Ranks
from fastgrpo.ranks.group import outlive_sigterm

CLOSED = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8395"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked("lost_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", lost_ranks.EXCHANGES)
@pytest.mark.parametrize(
    "end, code, why",
    [
        ("hang", None, "rank 1 did not come in time; it was last at the first in step 3"),
        ("die", -9, "rank 1 died; it was last at the first in step 3"),
        ("fail", 1, "rank 1 failed: KeyError: 'a bug\\nof rank 1'"),
    ],
)
def test_who_waits_in_vain_ends_with_a_line_that_names_the_missing_rank(ended, end, code, why, name):
    codes, told = ended(f"{end}-{name}")
    assert codes == [1, code, 1], told
    for rank in (0, 2):
        assert told[rank] == f"rank {rank} stops while it waits for the second in step 3: {why}\n"
    assert end != "fail" or told[1].startswith("error on rank 1:\nTraceback")
    assert told[1].count("Traceback") == (end == "fail")


def test_one_process_alone_exchanges_nothing():
    tensor = torch.ones(3)
    with ALONE.waiting("a step"):
        assert ALONE.gather(3, "it") == [3] and ALONE.from_lead(4, "it") == 4 and ALONE.any(True, "it") is True
        ALONE.sum([tensor], "it")
    assert ALONE.lead and tensor.tolist() == [1, 1, 1]


def two_ranks():
    return Ranks(0, 2, store=dist.HashStore())


@pytest.mark.parametrize(
    "text",
    [
        CLOSED,
        "[/build/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Gloo connectFullMesh failed with [/build/gloo/transport/tcp/pair.cc:152] timed out connecting",
    ],
)
def test_an_error_of_a_connection_names_all_that_is_waited_for(text):
    ranks, told = two_ranks(), r"^rank 0 stops while it waits for the gradients in step 3: rank 1 "
    with pytest.raises(RankLost, match=told) as lost, ranks.waiting("step 3"), ranks.waiting("the gradients"):
        raise RuntimeError(text)
    assert lost.value.hung == (text != CLOSED)
    with pytest.raises(RankLost, match="waits for step 4: "), ranks.waiting("step 4"):
        raise RuntimeError(text)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("[enforce fail at /build/gloo/allreduce.cc:12] op.preamble.length <= op.nbytes. 8 vs 4"),
        ValueError("a mistake"),
    ],
)
def test_another_error_stays_what_it_is(error):
    with pytest.raises(type(error)) as raised, two_ranks().waiting("step 3"):
        raise error
    assert raised.value is error


class OnGPU(torch.Tensor):
    """A tensor that says of itself that it lies on a GPU."""

    is_cuda = True


@pytest.fixture
def sent(monkeypatch):
    """The tensors that collectives are given, with their groups. What is sent is doubled, as by two equal ranks."""
    given = []

    def collective(tensor, *_, group, **__):
        given.append((tensor, group))
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", collective)
    monkeypatch.setattr(dist, "broadcast", collective)
    return given


@pytest.mark.parametrize("kind, group", [(OnGPU, None), (torch.Tensor, "of the host")])
def test_tensors_on_the_host_go_by_a_group_that_can_send_them(kind, group, sent):
    """The default group may have been made by a script, for GPUs alone."""
    ranks = Ranks(0, 2, group="of the host", store=dist.HashStore())
    ranks.sum([torch.ones(3).as_subclass(kind), torch.ones(2).as_subclass(kind)], "the gradients")
    ranks.share([torch.ones(3).as_subclass(kind)], "the weights")
    assert [of for _, of in sent] == [group, "of the host", group]  # before the weights the ranks meet
    ranks.sum([], "nothing")
    assert len(sent) == 3


def test_small_tensors_are_added_up_as_one_and_a_large_one_without_a_copy(sent, monkeypatch):
    monkeypatch.setattr("fastgrpo.ranks.group.BUCKET", 16)
    small, large, strided = [torch.ones(2), torch.ones(1)], torch.ones(9), torch.ones(3, 2).T
    two_ranks().sum([*small, large, strided], "the gradients")
    assert [tensor.numel() for tensor, _ in sent] == [3, 9, 6]
    assert sent[1][0] is large and sent[2][0] is not strided
    assert all((tensor == 2).all() for tensor in (*small, large, strided))


def test_what_is_shared_is_sent_contiguous(sent):
    weight = torch.arange(6.0).view(2, 3).T
    Ranks(0, 2, group="of the host", store=dist.HashStore()).share([weight], "the weights")
    assert sent[-1][0].is_contiguous() and weight.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_a_failure_is_noted_at_once_and_a_lost_rank_is_none():
    ranks = two_ranks()
    with pytest.raises(RankLost), ranks.failing():
        raise RankLost("rank 0 stops")
    assert not ranks.store.check(["failed/0"])
    with pytest.raises(KeyError), ranks.failing():
        raise KeyError("a bug")
    assert ranks.store.get("failed/0") == b"KeyError: 'a bug'" and not ranks.store.check(["end"])
    with pytest.raises(KeyError), ALONE.failing():
        raise KeyError("a bug")


def test_the_first_sigterm_after_a_loss_passes():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        outlive_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
