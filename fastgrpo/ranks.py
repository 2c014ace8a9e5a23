"""The ranks of a run: one process per GPU, started by torchrun or `accelerate launch`.

All ranks take the same steps: they read the same rows, and get the completions of all ranks. Only rollouts, rewards,
forward and backward passes are split.

A rank that fails writes its error to a key of the shared store, to stderr and to torchrun's error file, in this order,
and exits. The others detect the broken connection (or torch's timeout), read the key, and exit with one line. torchrun
kills ranks that hang in NCCL after 30 s. `monitored_barrier` names a missing rank.
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

TIMEOUT = 1800  # default seconds to wait for the other ranks
EXPLANATION = 10.0  # seconds to wait for the error of a lost rank
BUCKET = 1 << 28  # bytes summed in one all-reduce
_CAUSE = "cause"  # key of [rank, line] of the error that ends the run; the first rank to write it wins
_PAUSE = 0.02  # seconds between two reads of the store
# gloo raises RuntimeErrors that begin with a source location, NCCL raises DistBackendErrors, and stores raise others.
# An "enforce fail" of gloo is not a broken connection: the ranks exchange different shapes or dtypes.
_BROKEN = re.compile(
    r"^\[(?!enforce)[^\]]*\bgloo/[^\]]*:\d+\] |Application timeout caused pair closure|Gloo connectFullMesh failed"
    "|monitoredBarrier"
)
Result = TypeVar("Result")
_joined = None  # the ranks that this process belongs to
_failed = False  # whether this process ends with an error


class RankLost(RuntimeError):
    """Another rank failed, died, or did not join an exchange in time."""

    def __init__(self, text: str, is_root: bool = False) -> None:
        super().__init__(text)
        self.is_root = is_root  # True if no rank has reported an error, so torchrun should show this one


class Ranks:
    """The ranks of a run. All of them must call each method that exchanges data, in the same order."""

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
        self._inside = []  # names of the open `waiting` contexts

    @property
    def lead(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name an exchange, for errors. A broken connection raises `RankLost`. Contexts can be nested."""
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
            if rank is None and isinstance(error, dist.DistBackendError):  # NCCL may have failed on this rank itself
                told += f" ({' '.join(str(error).split())})"
            raise RankLost(f"rank {self.rank} stops while it waits for {where}: {told}", rank is None) from error
        finally:
            self._inside.pop()

    def _cause(self, error):
        """Return the failed rank and the first line of its error, or None and a message about the lost rank."""
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", str(error))
        mine = f"{f'rank {named[1]}' if named else 'another rank'} died or did not join in time"
        end = time.monotonic() + (0 if named else EXPLANATION)
        with suppress(RuntimeError):  # the host of the store may be down
            while not self.store.check([_CAUSE]) and time.monotonic() < end:
                time.sleep(_PAUSE)
            return json.loads(self.store.compare_set(_CAUSE, "", json.dumps([None, mine])))
        return None, mine

    def meet(self, what: str) -> None:
        """Wait on the host for all ranks. On timeout, raise a `RankLost` that names the missing ranks."""
        if self.size > 1:
            with self.waiting(what):
                dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, in order."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        self.meet(what)
        with self.waiting(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, flag: bool, what: str) -> bool:
        """Return whether the flag is set on any rank."""
        return any(self.gather(flag, what))

    def from_lead(self, value: Any, what: str) -> Any:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        self.meet(what)
        with self.waiting(what):
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def share(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Broadcast the tensors of rank 0, in place."""
        if self.group is None:
            return
        self.meet(what)
        with self.waiting(what):
            for tensor in tensors:
                whole = tensor.detach().contiguous()  # NCCL needs contiguous tensors
                dist.broadcast(whole, src=0, group=self._group_of(whole))
                if not tensor.is_contiguous():
                    tensor.detach().copy_(whole)

    def sum(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Sum tensors over the ranks, in place. The result is bit-equal on all ranks."""
        if self.size == 1:
            return
        with self.waiting(what):
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():  # a large tensor is not copied
                    dist.all_reduce(bucket[0], group=self._group_of(bucket[0]))
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self._group_of(flat))
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def _group_of(self, tensor):
        """Return the group for a tensor. The default group may have no backend for CPU tensors."""
        return None if tensor.is_cuda else self.group


ALONE = Ranks()


def _buckets(tensors):
    """Split tensors into buckets of at most `BUCKET` bytes."""
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
    """Return the ranks with another group for a second thread. All ranks must call this in the main thread."""
    if ranks.size == 1:
        return ranks
    with ranks.waiting(f"the group for the {name}"):
        group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    return Ranks(ranks.rank, ranks.size, group, ranks.store, timeout)


def together(ranks: Ranks, do: Callable[[], Result], what: str) -> list[Result]:
    """Call `do` on every rank, and return all results. A failure on one rank raises on all."""
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
    """Return whether a launcher started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def refuse_ranks(what: str) -> None:
    """Raise under a launcher, for a command of one process."""
    if launched():
        raise ValueError(f"{what} runs in one process: start it without torchrun (or accelerate launch)")


def join(device: str = "auto", timeout: float = TIMEOUT) -> Ranks:
    """Join the ranks of this run. Later calls return the same ranks."""
    global _joined
    if _joined is not None:
        return _joined
    if not (dist.is_available() and (dist.is_initialized() or launched())):
        return ALONE
    # accelerate's FSDP configs set it: transformers would load zeros on ranks other than 0.
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
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
        # Objects are exchanged in host memory, so this group uses gloo, whatever backend exchanges tensors.
        ranks.group = dist.new_group(backend="gloo", timeout=waits)
    if ours:
        atexit.register(_leave)
    if not ranks.lead:
        logging.getLogger("fastgrpo").setLevel(logging.ERROR)  # rank 0 warns for all ranks
    if size > 1:
        sys.excepthook = _end_by(sys.excepthook, ranks.lead)
    _joined = ranks
    return ranks


def form_group(device: torch.device) -> None:
    """Create a process group of one process if none exists, for fsdp2_offload without torchrun."""
    if not dist.is_initialized():
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the device mesh takes the current device
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)


def _attempt(store, rank, size, timeout):
    """Wait for all ranks of this attempt, and return a name for it.

    The agent of torchrun keeps one store for all restarts, with the addresses of dead ranks. So each rank publishes a
    random name. Rank 0 publishes the names it has read, and each rank confirms that its own is among them.
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
    raise RankLost(f"rank {rank} stops while it waits for all {size} ranks to start: rank {names} did not join")


def _connect(timeout, keeps=False):
    """Connect to the store of the launcher or of rank 0."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        multi_tenant=True,
    )


def _kept_by_launcher():
    """Return whether the launcher hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _leave():
    """Destroy the process group at exit. After a failure with NCCL, skip this: it would hang on missing ranks."""
    if dist.is_initialized() and not (_failed and torch.cuda.is_available()):
        dist.destroy_process_group()


def end(error: BaseException, text: str) -> None:
    """Report the error of this rank: to the other ranks, to stderr and to torchrun.

    A `RankLost` prints one line. An error that another rank has reported is not printed again.
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
    """Return torchrun's store for errors before the ranks meet, or None."""
    if not _kept_by_launcher():
        return None
    return dist.PrefixStore(f"fastgrpo/early/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", _connect(10))


def _end_by(before, lead):
    """Make the hook for uncaught exceptions, which reports them with `end`."""

    def hook(kind, error, trace):
        if isinstance(error, Exception):
            end(error, "\n" + "".join(traceback.format_exception(kind, error, trace)).rstrip())
            if _beneath_torch(before) is not sys.__excepthook__:  # a hook of the user's script
                before(kind, error, trace)
        elif lead:  # all ranks get a KeyboardInterrupt
            before(kind, error, trace)

    return hook


def _beneath_torch(hook):
    """Return the hook below that of torch's process groups, which would print the error again."""
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return hook


def outlive_sigterm() -> None:
    """Ignore the next SIGTERM, so that this rank can report the loss of another one.

    torchrun sends SIGTERM to all ranks once one has ended, and SIGKILL 30 s later.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def own_gpu(device: str, rank: int, size: int) -> int:
    """Return the GPU index of a rank: 0 if only one GPU is visible, else its local rank."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    _, colon, index = device.partition(":")
    if colon and size > 1:
        raise ValueError(
            f"device={device!r} names one GPU, but {size} processes need one each; use --device cuda, and set "
            "CUDA_VISIBLE_DEVICES to the GPUs to use"
        )
    if colon:
        return int(index) if index.isdigit() and int(index) < count else 0
    if count == 1:  # the launcher may set CUDA_VISIBLE_DEVICES per process
        return 0
    if local_rank is None and size > 1:
        raise ValueError(
            f"rank {rank} sees {count} GPUs, but LOCAL_RANK is not set; set it to the index of the process on its "
            "machine, as torchrun does (with srun: SLURM_LOCALID)"
        )
    if int(local_rank or 0) >= count:
        raise ValueError(
            f"rank {rank} has local rank {local_rank}, but its machine has {count} GPUs; start one process per GPU "
            "(--nproc_per_node)"
        )
    return int(local_rank or 0)


def claim_gpu(store: "dist.Store", gpu: str, rank: int) -> None:
    """Reserve a GPU for a rank. With NCCL, two ranks cannot share one."""
    owner = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if owner != str(rank):
        raise ValueError(f"rank {rank} has the same GPU as rank {owner}; start one process per GPU (--nproc_per_node)")


def check_group(kinds: list[str], needed: str) -> None:
    """Raise if a process group of the script has no backend for the device of the ranks."""
    if needed not in kinds:
        raise ValueError(
            f"the process group of this script supports tensors on {' and '.join(kinds)}, but the ranks compute on "
            f"{needed}; create it with init_process_group('cpu:gloo,cuda:nccl'), or let the trainer create it"
        )
