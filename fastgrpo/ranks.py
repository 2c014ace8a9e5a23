"""The processes of a run, one for each GPU, as torchrun or `accelerate launch` starts them. Each of them is a rank.

All ranks take the same decisions: each takes the same rows, and each gets the completions that all of them drew. Only
what takes time is split: drawing, judging, forward and backward passes.

A rank that fails writes its error to a key of the store that all ranks share, to stderr and to torchrun's error file,
in this order, and ends. The others notice the broken connection (or torch's timeout), read the key, and end with one
line. torchrun kills after 30 s whatever still waits for NCCL. `monitored_barrier` names a rank that does not come.
"""

import atexit
import inspect
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

TIMEOUT = 1800  # seconds that a rank waits for the others, unless a setting says otherwise
EXPLANATION = 10.0  # seconds that a rank waits for the reason why another one is lost
BUCKET = 1 << 28  # bytes that are summed at once, as a copy
_CAUSE = "cause"  # the key that holds [rank, line] of what ends the run; the first rank to write it wins
_PAUSE = 0.02  # seconds between two looks at the store
# gloo raises RuntimeErrors that begin with the place in its source, torch's NCCL DistBackendErrors, and a store others.
# An "enforce fail" of gloo is no broken connection: the ranks exchange different things.
_BROKEN = re.compile(
    r"^\[(?!enforce)[^\]]*\bgloo/[^\]]*:\d+\] |Application timeout caused pair closure|Gloo connectFullMesh failed"
    "|monitoredBarrier"
)
Result = TypeVar("Result")
_joined = None  # the ranks that this process belongs to
_failed = False  # whether this process ends by an error


class RankLost(RuntimeError):
    """Another rank failed, died, or did not come to an exchange in time.

    Attributes:
        is_root: Whether no rank has reported an error, so that this one is what torchrun should show.
    """

    def __init__(self, text: str, is_root: bool = False) -> None:
        super().__init__(text)
        self.is_root = is_root


class Ranks:
    """The ranks of a run, as one of them sees it.

    Every method that exchanges something must be called by all ranks, in the same order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: "dist.ProcessGroup | None" = None,
        store: "dist.Store | None" = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.rank, self.size, self.group, self.store = rank, size, group, store
        self.timeout = timedelta(seconds=timeout)
        self._inside = []  # what the open contexts wait for

    @property
    def lead(self) -> bool:
        """True on rank 0, which writes the files of the run and prints."""
        return self.rank == 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what this rank waits for. Contexts may be nested. A broken connection becomes a `RankLost`."""
        if self.size == 1:
            yield
            return
        self._inside.append(what)
        try:
            yield
        except RankLost:  # of a context inside this one
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and _BROKEN.search(str(error)) is None:
                raise
            outlive_sigterm()
            where = " in ".join(reversed(self._inside))
            rank, cause = self._cause(error)
            told = cause if rank is None else f"rank {rank} failed: {cause}"
            raise RankLost(f"rank {self.rank} stops while it waits for {where}: {told}", rank is None) from error
        finally:
            self._inside.pop()

    def _cause(self, error):
        """Return the rank that failed, and its error in a line; or None, and what the ranks know of the lost one."""
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", str(error))
        mine = f"{f'rank {named[1]}' if named else 'another rank'} died or did not come in time"
        end = time.monotonic() + (0 if named else EXPLANATION)
        with suppress(RuntimeError):  # the store may be gone with the rank or the machine that kept it
            while not self.store.check([_CAUSE]) and time.monotonic() < end:
                time.sleep(_PAUSE)
            return json.loads(self.store.compare_set(_CAUSE, "", json.dumps([None, mine])))
        return None, mine

    def meet(self, what: str) -> None:
        """Wait on the host until all ranks are there. Raises `RankLost` that names a missing rank."""
        if self.size > 1:
            with self.waiting(what):
                dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Give every rank the values of all ranks."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        self.meet(what)
        with self.waiting(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, flag: bool, what: str) -> bool:
        """Tell all ranks whether any of them has a flag."""
        return any(self.gather(flag, what))

    def from_lead(self, value: Any, what: str) -> Any:
        """Give every rank the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        self.meet(what)
        with self.waiting(what):
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def share(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Give every rank the values of rank 0's tensors, in place."""
        if self.group is None:
            return
        self.meet(what)
        with self.waiting(what):
            for tensor in tensors:
                whole = tensor.detach().contiguous()  # NCCL sends nothing else
                dist.broadcast(whole, src=0, group=self._group_of(whole))
                if not tensor.is_contiguous():
                    tensor.detach().copy_(whole)

    def sum(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Add up tensors over the ranks, in place. The result is the same on every rank to the last bit."""
        if self.size == 1:
            return
        with self.waiting(what):
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():  # a large one, which is not copied
                    dist.all_reduce(bucket[0], group=self._group_of(bucket[0]))
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self._group_of(flat))
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def _group_of(self, tensor):
        """Return the group that sends a tensor. The default group may have no backend for tensors on the host."""
        return None if tensor.is_cuda else self.group


ALONE = Ranks()


def _buckets(tensors):
    """Split tensors into runs of at most `BUCKET` bytes."""
    bucket, size = [], 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def apart(ranks: Ranks, name: str, timeout: float) -> Ranks:
    """Return the same ranks with another group, so that a thread can exchange things beside the main thread.

    All ranks must call this, in the main thread.
    """
    if ranks.size == 1:
        return ranks
    with ranks.waiting(f"the group for the {name}"):
        group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    return Ranks(ranks.rank, ranks.size, group, ranks.store, timeout)


def together(ranks: Ranks, do: Callable[[], Result], what: str) -> list[Result]:
    """Let every rank do its part of something. What fails on one rank fails on all of them."""
    if ranks.size == 1:
        return [do()]
    result = failure = mine = None
    try:
        result = do()
    except (ValueError, OSError) as error:
        mine, failure = error, (f"{error}", False)
    except Exception as error:
        mine, failure = error, (f"{type(error).__name__}: {error}", True)
    told = ranks.gather((result, failure), what)
    failures = {rank: failure for rank, (_, failure) in enumerate(told) if failure is not None}
    if any(is_bug for _, is_bug in failures.values()):
        if mine is not None:
            raise mine
        named = "; ".join(f"rank {rank} failed: {text}" for rank, (text, _) in failures.items())
        raise RankLost(f"rank {ranks.rank} stops after {what}: {named}")
    if failures:
        alike = len(failures) == ranks.size and len(set(failures.values())) == 1
        texts = [f"rank {rank}: {text}" for rank, (text, _) in failures.items()]
        raise ValueError(failures[0][0] if alike else "; ".join(texts)) from mine
    return [result for result, _ in told]


def launched() -> bool:
    """Return whether a launcher started this process as one of several ranks, or as the only one."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def refuse_ranks(what: str) -> None:
    """Refuse, under a launcher, something that runs in one process."""
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
    keeps = rank == 0 and not _kept_by_launcher()
    try:
        store = _connect(timeout, keeps) if ours else dist.distributed_c10d._get_default_store()
        attempt = _attempt(dist.PrefixStore("fastgrpo", store), rank, size, timeout)
    except dist.DistNetworkError as error:
        if keeps:
            raise
        line = str(error).splitlines()[0]
        raise RankLost(f"rank {rank} stops while it waits for all {size} ranks to start: {line}") from error
    ranks = Ranks(rank, size, None, dist.PrefixStore(f"fastgrpo/{attempt}", store), timeout)
    if on_gpu:
        claim_gpu(ranks.store, str(torch.cuda.get_device_properties(gpu).uuid), rank)
    waits = timedelta(seconds=timeout)
    with ranks.waiting("all ranks to connect"):
        if ours:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=ranks.store,
                rank=rank,
                world_size=size,
                timeout=waits,
                device_id=torch.device("cuda", gpu) if on_gpu else None,
            )
        # Objects lie on the host, whatever the backend of the tensors is.
        ranks.group = dist.new_group(backend="gloo", timeout=waits)
    if ours:
        atexit.register(_leave)
    if not ranks.lead:
        logging.getLogger("fastgrpo").setLevel(logging.ERROR)  # rank 0 warns for all
    if size > 1:
        sys.excepthook = _end_by(sys.excepthook, ranks.lead)
    _joined = ranks
    return ranks


def _attempt(store, rank, size, timeout):
    """Wait until all ranks of this attempt are there, and return a name for it.

    The agent of torchrun keeps one store for all restarts, in which torch would find the addresses of dead ranks. So
    each rank shows a random name. Rank 0 answers with the names that it saw, and a rank that finds its own confirms.
    """
    mine, end = uuid.uuid4().hex, time.monotonic() + timeout
    others, shown = range(1, size), None
    if rank > 0:
        store.set(f"meet/{rank}", mine)
    while time.monotonic() < end:
        if rank > 0:
            names = json.loads(store.get("meet/0")) if store.check(["meet/0"]) else {}
            if names.get(str(rank)) == mine:
                store.set(f"met/{names['0']}/{rank}", "1")
                return names["0"]
        else:
            there = {str(r): store.get(f"meet/{r}").decode() for r in others if store.check([f"meet/{r}"])}
            if shown != there:
                store.set("meet/0", json.dumps({"0": mine, **there}))
                shown = there
            if all(store.check([f"met/{mine}/{r}"]) for r in others):
                return mine
        time.sleep(_PAUSE)
    late = [0] if rank > 0 else [r for r in others if not store.check([f"met/{mine}/{r}"])]
    names = ", ".join(map(str, late))
    raise RankLost(f"rank {rank} stops while it waits for all {size} ranks to start: rank {names} did not come")


def _connect(timeout, keeps=False):
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
    """Return whether the launcher keeps the store, as torchrun says."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _leave():
    """Destroy the process group at the end of the process. With NCCL, it would wait for ranks that do not come."""
    if dist.is_initialized() and not (_failed and torch.cuda.is_available()):
        dist.destroy_process_group()


def end(error: BaseException, text: str) -> None:
    """Report the error that ends this rank: to the other ranks, to stderr and to torchrun.

    A `RankLost` is one line. An error that another rank has reported already is not printed again.
    """
    global _failed
    _failed = True
    rank = int(os.environ["RANK"]) if _joined is None else _joined.rank
    if isinstance(error, RankLost):
        line = text = str(error)
        print(line, file=sys.stderr, flush=True)
    else:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        said = [rank, line]
        with suppress(RuntimeError):
            store = _early_store() if _joined is None else _joined.store
            if store is not None:
                said = json.loads(store.compare_set(_CAUSE, "", json.dumps(said)))
        if said[0] == rank or said[1] != line:
            space = "" if text.startswith("\n") else " "
            print(f"error on rank {rank}:{space}{text}", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and getattr(
        error, "is_root", True
    ):  # the format of torch/distributed/elastic/multiprocessing/errors/error_handler.py
        extra = {"py_callstack": text.strip(), "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": extra}}, file)


def _early_store():
    """Return a store for errors before the ranks meet, or None: only torchrun keeps one so early."""
    if not _kept_by_launcher():
        return None
    return dist.PrefixStore(f"fastgrpo/early/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", _connect(10))


def _end_by(before, lead):
    """Make the hook for exceptions that nobody catches: it reports them by `end`."""

    def hook(kind, error, trace):
        if isinstance(error, Exception):
            end(error, "\n" + "".join(traceback.format_exception(kind, error, trace)).rstrip())
            if _beneath_torch(before) is not sys.__excepthook__:  # a hook of the user's, which may report elsewhere
                before(kind, error, trace)
        elif lead:  # a KeyboardInterrupt, which all ranks have
            before(kind, error, trace)

    return hook


def _beneath_torch(hook):
    """Return the hook beneath the one that torch's process groups install, which would print the error once more."""
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return hook


def outlive_sigterm() -> None:
    """Let the next SIGTERM pass where it would end the process: a rank that has lost another reports it and ends.

    torchrun sends SIGTERM to all ranks once one has ended, and SIGKILL 30 s later.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def own_gpu(device: str, rank: int, size: int) -> int:
    """Find the GPU of a rank: the only one that it sees, or that of its number on the machine."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    _, colon, index = device.partition(":")
    if colon and size > 1:
        raise ValueError(
            f"device={device!r} names one GPU, and each of the {size} processes takes one of its own; use --device "
            "cuda, and CUDA_VISIBLE_DEVICES for the GPUs that they may take"
        )
    if colon:
        return int(index) if index.isdigit() and int(index) < count else 0
    if count == 1:  # also where the launcher shows each process another one
        return 0
    if local_rank is None and size > 1:
        raise ValueError(
            f"rank {rank} sees {count} GPUs, and LOCAL_RANK does not say which is its own; set it to the number of the "
            "process on its machine, as torchrun does (with srun it is SLURM_LOCALID)"
        )
    if int(local_rank or 0) >= count:
        raise ValueError(
            f"rank {rank} is number {local_rank} of its machine, which has {count} GPUs; start one process for each "
            "GPU (--nproc_per_node)"
        )
    return int(local_rank or 0)


def claim_gpu(store: "dist.Store", gpu: str, rank: int) -> None:
    """Take a GPU for a rank. NCCL cannot let two ranks share one."""
    owner = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if owner != str(rank):
        raise ValueError(f"rank {rank} has the same GPU as rank {owner}; start one process for each (--nproc_per_node)")


def check_group(kinds: list[str], needed: str) -> None:
    """Refuse a process group that a script has made, if it cannot send what lies where the ranks compute."""
    if needed not in kinds:
        raise ValueError(
            f"the process group of this script sends tensors on {' and '.join(kinds)}, and the ranks compute on "
            f"{needed}; make it by init_process_group('cpu:gloo,cuda:nccl'), or let the trainer make it"
        )
