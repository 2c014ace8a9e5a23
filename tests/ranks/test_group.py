"""Ranks exchange objects, flags and sums, and name what they waited for when another rank is lost."""

import json
import os
import signal

import lost_ranks
import pytest
import torch
import torch.distributed as dist
from ranks import forked

from fastgrpo.ranks import ALONE, RankLost, Ranks, outlive_sigterm

CLOSED = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8395"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked("lost_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", lost_ranks.EXCHANGES)
@pytest.mark.parametrize(
    "end, code, why",
    [
        ("hang", None, "{} died or did not come in time"),
        ("die", -9, "{} died or did not come in time"),
        ("fail", 1, "rank 1 failed: KeyError: 'a bug\\nof rank 1'"),
    ],
)
def test_ranks_that_lose_another_end_with_a_line_that_says_why(ended, end, code, why, name):
    """An exchange on the host names the missing rank; a sum, which may be NCCL's, cannot."""
    codes, told = ended(f"{end}-{name}")
    assert codes == [1, code, 1], told
    why = why.format("another rank" if name == "sum" else "rank 1")
    for rank in (0, 2):
        line = told[rank].splitlines()[-1]
        assert line == f"rank {rank} stops while it waits for the second in step 3: {why}"
        assert "Traceback" not in told[rank]
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
def test_a_broken_connection_names_all_that_is_waited_for(text, monkeypatch):
    monkeypatch.setattr("fastgrpo.ranks.EXPLANATION", 0.0)
    ranks, told = two_ranks(), r"^rank 0 stops while it waits for the gradients in step 3: another rank died or"
    with pytest.raises(RankLost, match=told) as lost, ranks.waiting("step 3"), ranks.waiting("the gradients"):
        raise RuntimeError(text)
    assert lost.value.is_root
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
    monkeypatch.setattr(dist, "monitored_barrier", lambda *_, **__: None)
    return given


@pytest.mark.parametrize("kind, group", [(OnGPU, None), (torch.Tensor, "of the host")])
def test_tensors_on_the_host_go_by_a_group_that_can_send_them(kind, group, sent):
    """The default group may have been made by a script, for GPUs alone."""
    ranks = Ranks(0, 2, group="of the host", store=dist.HashStore())
    ranks.sum([torch.ones(3).as_subclass(kind), torch.ones(2).as_subclass(kind)], "the gradients")
    ranks.share([torch.ones(3).as_subclass(kind)], "the weights")
    assert [of for _, of in sent] == [group, group]
    ranks.sum([], "nothing")
    assert len(sent) == 2


def test_small_tensors_are_added_up_as_one_and_a_large_one_without_a_copy(sent, monkeypatch):
    monkeypatch.setattr("fastgrpo.ranks.BUCKET", 16)
    small, large, strided = [torch.ones(2), torch.ones(1)], torch.ones(9), torch.ones(3, 2).T
    two_ranks().sum([*small, large, strided], "the gradients")
    assert [tensor.numel() for tensor, _ in sent] == [3, 9, 6]
    assert sent[1][0] is large and sent[2][0] is not strided
    assert all((tensor == 2).all() for tensor in (*small, large, strided))


def test_what_is_shared_is_sent_contiguous(sent):
    weight = torch.arange(6.0).view(2, 3).T
    Ranks(0, 2, group="of the host", store=dist.HashStore()).share([weight], "the weights")
    assert sent[-1][0].is_contiguous() and weight.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_the_error_that_a_rank_reported_is_the_reason():
    ranks = two_ranks()
    ranks.store.set("cause", json.dumps([1, "KeyError: 'a bug'"]))
    with pytest.raises(RankLost, match=r"rank 1 failed: KeyError: 'a bug'$") as lost, ranks.waiting("step 3"):
        raise RuntimeError(CLOSED)
    assert not lost.value.is_root


def test_one_sigterm_does_not_end_a_rank_that_has_lost_another():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        outlive_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
