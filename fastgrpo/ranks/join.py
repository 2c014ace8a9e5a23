"""Joins the ranks that a launcher started: torchrun, `accelerate launch`, or whatever sets the same variables.

The ranks meet in a store before they connect to each other. A store may outlive an attempt: the agent of torchrun keeps
one for all restarts, in which torch itself would find the addresses of the dead. So rank 0 names each attempt anew, and
the ranks of the attempt use keys of their own.
"""

import atexit
import functools
import json
import logging
import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from fastgrpo.ranks.devices import check_group, claim_gpu, own_gpu
from fastgrpo.ranks.failure import install, left
from fastgrpo.ranks.group import ALONE, RankLost, Ranks
from fastgrpo.ranks.notes import PATIENCE, Notes
from fastgrpo.ranks.watch import watch

TIMEOUT = 1800  # seconds that a rank waits for the others, unless a setting says otherwise
_PAUSE = 0.02  # seconds between two looks at the store
_joined = None  # the ranks that this process belongs to


def launched() -> bool:
    """Tell whether a launcher started this process as one of several ranks, or as the only one."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def refuse_ranks(what: str) -> None:
    """Refuse something that one process alone does."""
    if launched():
        raise ValueError(f"{what} runs in one process: start it without torchrun (or accelerate launch)")


def join(device: str = "auto", timeout: float = TIMEOUT) -> Ranks:
    """Join the ranks of this run. Further calls return the same ranks."""
    global _joined
    if _joined is not None:
        return _joined
    if not (dist.is_available() and (dist.is_initialized() or launched())):
        return ALONE
    on_gpu = device.partition(":")[0] != "cpu" and torch.cuda.is_available()
    ours = not dist.is_initialized()
    rank = int(os.environ["RANK"]) if ours else dist.get_rank()
    size = int(os.environ["WORLD_SIZE"]) if ours else dist.get_world_size()
    if not ours:
        check_group([kind.type for kind in dist.group.WORLD._device_types], "cuda" if on_gpu else "cpu")
    gpu = own_gpu(device, rank, size) if on_gpu else None
    if on_gpu:
        torch.cuda.set_device(gpu)
    early_notes().enter("the start")
    keeps = rank == 0 and not _kept_by_launcher()
    try:
        store = connect(timeout, keeps) if ours else dist.distributed_c10d._get_default_store()
    except dist.DistNetworkError as error:
        if keeps:
            raise
        told = str(error).splitlines()[0]
        raise RankLost(f"rank {rank} stops while it waits for all {size} ranks to start: {told}", True) from error
    attempt = f"fastgrpo/{meet(dist.PrefixStore('fastgrpo', store), rank, size, timeout)}"
    ranks = Ranks(rank, size, store=dist.PrefixStore(attempt, connect(timeout) if ours else store))
    waits = timedelta(seconds=timeout)
    if on_gpu:
        claim_gpu(ranks.store, str(torch.cuda.get_device_properties(gpu).uuid), rank)
    with ranks.waiting("all ranks to connect"):
        if ours:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.PrefixStore(attempt, store),
                rank=rank,
                world_size=size,
                timeout=waits,
                device_id=torch.device("cuda", gpu) if on_gpu else None,
            )
        # What the ranks tell each other lies on the host, whatever the backend of the tensors is.
        ranks.group = dist.new_group(backend="gloo", timeout=waits)
    atexit.register(_leave, ranks, ours)
    if size > 1 and on_gpu:
        watch(ranks)
    if not ranks.lead:
        logging.getLogger("fastgrpo").setLevel(logging.ERROR)  # rank 0 warns for all
    install(ranks)
    _joined = ranks
    return ranks


def notes_of_process() -> Notes:
    """Return the notes of this process: those of the ranks that it has joined, or else those of the time before."""
    return early_notes() if _joined is None else _joined.notes


@functools.cache
def early_notes() -> Notes:
    """Return notes for the time before the ranks meet, in which each may find a mistake in its settings.

    They lie in the store of torchrun. Without torchrun nobody keeps a store so early, and notes are not kept.
    """
    rank, size = (
        int(os.environ[name]) if launched() else default for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    if size == 1 or not _kept_by_launcher():
        return Notes(None, rank, size)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    try:
        store = connect(PATIENCE)
    except RuntimeError:  # without notes, each rank says its own error
        return Notes(None, rank, size)
    return Notes(dist.PrefixStore(f"fastgrpo/early/{attempt}", store), rank, size)


def meet(store: "dist.Store", rank: int, size: int, timeout: float) -> str:
    """Wait until all ranks of this attempt are there.

    Each rank shows a name that it made up. Rank 0 names the attempt, and says which names it saw. A rank that finds its
    name there takes part, and confirms it: what an earlier attempt left behind says nothing of it.
    """
    mine, end = uuid.uuid4().hex, time.monotonic() + timeout
    if rank > 0:
        store.set(f"meet/{rank}", mine)
        while time.monotonic() < end:
            told = json.loads(store.get("meet/0")) if store.check(["meet/0"]) else {}
            if told.get(str(rank)) == mine:
                store.set(f"met/{told['0']}/{rank}", "1")
                return told["0"]
            time.sleep(_PAUSE)
        raise RankLost(f"rank {rank} stops while it waits for all {size} ranks to start: rank 0 did not come", True)
    others, shown = range(1, size), None
    while time.monotonic() < end:
        told = {"0": mine} | {str(r): store.get(f"meet/{r}").decode() for r in others if store.check([f"meet/{r}"])}
        if told != shown:
            store.set("meet/0", json.dumps(told))
            shown = told
        late = [r for r in others if not store.check([f"met/{mine}/{r}"])]
        if not late:
            return mine
        time.sleep(_PAUSE)
    names = ", ".join(map(str, late))
    raise RankLost(f"rank 0 stops while it waits for all {size} ranks to start: {names} did not come", True)


def connect(timeout: float, keeps: bool = False) -> "dist.TCPStore":
    """Connect to the store that the launcher or rank 0 keeps."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        multi_tenant=True,
    )


def _kept_by_launcher():
    """Tell whether the launcher keeps the store, as torchrun says."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _leave(ranks, ours):
    """Leave the others at the end of the process, and the process group, if it is ours, as torch asks for."""
    if not left():
        ranks.notes.leave()
    # With NCCL, an end after an error would wait for ranks that do not come.
    if ours and dist.is_initialized() and not (left() and torch.cuda.is_available()):
        dist.destroy_process_group()
