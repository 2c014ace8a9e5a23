"""Ranks find each other and their GPUs, exchange and sum values, and name the exchange in which one was lost."""

import functools
import json
import re
import sys
import threading

import lost_ranks
import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from ranks import HANGING, fork, forked, start

from fastgrpo import chat, train
from fastgrpo import ranks as module
from fastgrpo.ranks import ALONE, RankLost, Ranks, _attempt, claim_gpu, end, join, launched, own_gpu, refuse_ranks

CLOSED = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8395"
LAUNCHER = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
CASES = ("hang-gather", "die-sum", "fail-sum")


def two_ranks():
    return Ranks(0, 2, store=dist.HashStore())


# A rank that is lost.
@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_lose_another_end_with_a_line_that_says_why(ended, case):
    """An exchange on the host names the missing rank; a sum, which may be NCCL's, cannot."""
    ending, name = case.split("-")
    codes, told = ended(case)
    assert codes == [1, {"hang": None, "die": -9, "fail": 1}[ending], 1], told
    who = "another rank" if name == "sum" else "rank 1"
    why = r"rank 1 failed: KeyError: 'a bug\nof rank 1'" if ending == "fail" else f"{who} died or did not join in time"
    for rank in (0, 2):
        assert told[rank].splitlines()[-1] == f"rank {rank} stops while it waits for the second in step 3: {why}"
        assert "Traceback" not in told[rank]
    assert told[1].count("Traceback") == (ending == "fail")


@pytest.mark.parametrize("text", [
    CLOSED,
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed with [/build/gloo/transport/tcp/pair.cc:152] timed out connecting",
])  # fmt: skip
def test_broken_connections_name_the_exchange(text, monkeypatch):
    monkeypatch.setattr(module, "EXPLANATION", 0.0)
    monkeypatch.setattr(module, "outlive_sigterm", lambda: None)  # its handler would stay in this process
    ranks, told = two_ranks(), r"^rank 0 stops while it waits for the gradients in step 3: another rank died or"
    with pytest.raises(RankLost, match=told) as lost, ranks.waiting("step 3"), ranks.waiting("the gradients"):
        raise RuntimeError(text)
    assert lost.value.is_root
    ranks.store.set("cause", json.dumps([1, "KeyError: 'a bug'"]))  # the error that a rank reported is the reason
    with pytest.raises(RankLost, match=r"step 4: rank 1 failed: KeyError: 'a bug'$") as lost, ranks.waiting("step 4"):
        raise RuntimeError(text)
    assert not lost.value.is_root


def test_other_errors_pass_unchanged():
    gloos = RuntimeError("[enforce fail at /build/gloo/allreduce.cc:12] op.preamble.length <= op.nbytes. 8 vs 4")
    for error in (gloos, ValueError("a mistake")):
        with pytest.raises(type(error)) as raised, two_ranks().waiting("step 3"):
            raise error
        assert raised.value is error


# What is sent.
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
def test_host_tensors_use_a_group_with_a_cpu_backend(kind, group, sent):
    """The default group may have been made by a script, for GPUs only."""
    ranks = Ranks(0, 2, group="of the host", store=dist.HashStore())
    ranks.sum([torch.ones(3).as_subclass(kind), torch.ones(2).as_subclass(kind)], "the gradients")
    ranks.share([torch.ones(3).as_subclass(kind)], "the weights")
    assert [of for _, of in sent] == [group, group]
    ranks.sum([], "nothing")
    assert len(sent) == 2


def test_sums_small_tensors_in_one_bucket_and_large_ones_without_a_copy(sent, monkeypatch):
    monkeypatch.setattr("fastgrpo.ranks.BUCKET", 16)
    small, large, strided = [torch.ones(2), torch.ones(1)], torch.ones(9), torch.ones(3, 2).T
    two_ranks().sum([*small, large, strided], "the gradients")
    assert [tensor.numel() for tensor, _ in sent] == [3, 9, 6]
    assert sent[1][0] is large and sent[2][0] is not strided
    assert all((tensor == 2).all() for tensor in (*small, large, strided))
    weight = torch.arange(6.0).view(2, 3).T
    Ranks(0, 2, group="of the host", store=dist.HashStore()).share([weight], "the weights")
    assert sent[-1][0].is_contiguous() and weight.tolist() == [[0, 6], [2, 8], [4, 10]]


# How they start.
def attempts(store, size):
    """Let ranks meet, each in a thread, and return what each of them got."""
    names = {}
    threads = [
        threading.Thread(target=lambda rank=rank: names.update({rank: _attempt(store, rank, size, 30)}))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [names.get(rank) for rank in range(size)]


def test_all_ranks_agree_on_the_name_of_an_attempt():
    store = dist.HashStore()
    first, second = attempts(store, 3), attempts(store, 3)
    assert len(set(first)) == len(set(second)) == 1 and None not in first + second and first != second
    for rank, missing in ((0, "rank 1, 2"), (2, "rank 0")):
        with pytest.raises(RankLost, match=rf"^rank {rank} stops .* all 3 ranks to start: {missing} did not join$"):
            _attempt(store, rank, 3, 0.1)


@pytest.fixture
def seen(monkeypatch):
    """Let torch see some GPUs, and the launcher give a number on the machine, or none."""

    def see(count, local_rank=None, launcher=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK", *LAUNCHER):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**(launcher or {}), "LOCAL_RANK": local_rank}.items():
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return see


def test_one_process_needs_no_launcher_and_some_commands_refuse_one(seen):
    seen(0)
    assert not launched() and join("cpu") is ALONE
    refuse_ranks("chat")
    seen(0, launcher=LAUNCHER)
    for main, argv in ((chat.chat, ["model"]), (train.train, ["--sweep", "learning_rate=1e-3,1e-4"]),
                       (train.train, ["--sweep_seeds", "2"])):  # fmt: skip
        with pytest.raises(ValueError, match="runs in one process: start it without torchrun"):
            main(argv)
    with pytest.raises(RankLost, match=r"^rank 1 stops .* all 8 ranks to start: .*127\.0\.0\.1, 1\)"):
        join("cpu", 0.2)
    seen(8, 1, LAUNCHER)
    with pytest.raises(ValueError, match="device='cuda:1' names one GPU"):  # before it joins
        join("cuda:1", 0.2)


@pytest.mark.parametrize("count, local_rank, device, size, gpu", [
    (8, 3, "auto", 8, 3),
    (8, 3, "cuda", 16, 3),
    (1, 3, "cuda", 8, 0),  # as Slurm's --gpus-per-task=1 shows them
    (8, 0, "cuda:5", 1, 5),
    (8, 0, "cuda:9", 1, 0),  # loading the model refuses it
    (8, 1, "cuda:1", 8, "device='cuda:1' names one GPU"),
    (8, None, "cuda", 8, "rank 3 sees 8 GPUs, but LOCAL_RANK"),
    (2, 3, "auto", 8, "rank 3 has local rank 3, but its machine has 2 GPUs"),
])  # fmt: skip
def test_each_rank_gets_its_own_gpu_or_an_error(seen, count, local_rank, device, size, gpu):
    seen(count, local_rank)
    if isinstance(gpu, int):
        assert own_gpu(device, 3 % size, size) == gpu
    else:
        with pytest.raises(ValueError, match=gpu):
            own_gpu(device, 3, size)


def test_two_ranks_cannot_have_one_gpu():
    store = dist.HashStore()
    for rank, gpu in ((0, "a"), (1, "b"), (1, "b")):
        claim_gpu(store, gpu, rank)
    with pytest.raises(ValueError, match=r"^rank 2 has the same GPU as rank 0"):
        claim_gpu(store, "a", 2)


# How an error that ends a rank reaches the user, the other ranks and torchrun.
@pytest.fixture
def be(monkeypatch, tmp_path):
    """Become a rank whose launcher is torchrun. Returns the store and a function that reads the error file."""
    monkeypatch.setattr(module, "_failed", False)
    store = dist.HashStore()

    def become(rank):
        monkeypatch.setattr(module, "_joined", Ranks(rank, 2, store=store))
        path = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        return store, lambda: json.loads(path.read_text())["message"] if path.exists() else None

    return become


def test_an_error_is_reported_to_the_user_the_ranks_and_torchrun(be, capsys):
    store, error_file = be(0)
    end(ValueError("no such model: x\nsecond line"), "no such model: x\nsecond line")
    assert capsys.readouterr().err == "error on rank 0: no such model: x\nsecond line\n"
    message = error_file()
    assert message["message"] == "ValueError: no such model: x"
    assert message["extraInfo"]["py_callstack"] == "no such model: x\nsecond line"
    assert json.loads(store.get("cause")) == [0, "ValueError: no such model: x"]


@pytest.mark.parametrize("is_root", [False, True])
def test_a_lost_rank_is_one_line_and_the_root_cause_only_where_no_rank_has_an_error(be, capsys, is_root):
    store, error_file = be(0)
    end(RankLost("rank 0 stops while it waits for x: rank 1 died", is_root), "a traceback")
    assert capsys.readouterr().err == "rank 0 stops while it waits for x: rank 1 died\n"
    assert (error_file() is not None) == is_root and not store.check(["cause"])


def test_an_error_that_several_ranks_have_is_printed_once(be, capsys):
    for rank, text, told in ((1, "no", "error on rank 1: no\n"), (0, "no", ""), (0, "new", "error on rank 0: new\n")):
        be(rank)
        end(ValueError(text), text)
        assert capsys.readouterr().err == told


@pytest.mark.slow
@pytest.mark.parametrize("ending, rank, why", [
    ("fail", "1", "KeyError: 'a bug"), ("die", "1", "Signal 9 (SIGKILL)"),
    ("hang", "[02]", "rank 1 died or did not join in time"),
])  # fmt: skip
def test_torchrun_reports_the_failed_rank_as_the_root_cause(ending, rank, why):
    with start([ROOT / "tests" / "support" / "lost_ranks.py", ending, "gather"], count=3) as job:
        assert job.wait() == 1
        root = job.launcher().partition("Root Cause")[2]
        assert re.search(rf"rank +: {rank} ", root) and why in root, job.told()


if __name__ == "__main__":
    HANGING["hang-gather"] = (1,)
    cases = {case: functools.partial(lost_ranks.exchange, *case.split("-")) for case in CASES}
    fork(cases, sys.argv[1])
