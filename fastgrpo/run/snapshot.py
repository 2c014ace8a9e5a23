"""The state of a run between two steps: copies, writes and restores the content of a checkpoint.

    model, tokenizer     in Hugging Face format, at the top: `from_pretrained(checkpoint)` loads them
    README.md            the model card (see `card.py`)
    optimizer.pt         fp32 masters, AdamW's moments, the schedule
    rng.pt               the generators of Python, NumPy, torch and every CUDA device
    reference.pt         the reference's own state: its weights if it follows the policy
    rollouts.pt          completions of asynchronous rollouts that no step has trained on
    trainer_state.json   step, epoch, tokens, accuracies, the source's cursor, the best checkpoint, the settings, and
                         the place in metrics.jsonl and samples.jsonl with what is not yet logged

Several ranks write shards/ in place of optimizer.pt, rng.pt and reference.pt, and rank 0 the rest:

    .metadata, __R_N.distcp   tensors by name, as torch.distributed.checkpoint writes them; R is the rank
    values.pt                 values that are not tensors: the schedule, the settings of AdamW (rank 0)
    rng-R.pt                  the random generators of rank R

Names do not depend on how a tensor was divided, so any number of ranks reads what any other number has written. A run
is a dictionary of named parts, each with `state_dict` and `load_state_dict`; `FILES` lists the file of each part.

The state is copied to host memory while the GPUs go on computing:

    the GPU's own stream    update of step n  ->  rollout, forward, backward of step n + 1  ->  update of step n + 1
    the stream of copies                      +-> copies of step n's weights -----------------/

The next update waits for the copies, on the GPU; the thread that writes a checkpoint waits before it reads them.
"""

import copy
import json
import logging
import os
import pickle
import random
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging as transformers_logging

from fastgrpo.data.records import Stateful
from fastgrpo.policy.load import read_weights
from fastgrpo.policy.model import Policy
from fastgrpo.policy.shard import local
from fastgrpo.ranks import ALONE, Ranks, together
from fastgrpo.run.checkpoint import SHARDS, STATE, read_state, save_model

logger = logging.getLogger(__name__)
# The classes that a list of tensors may contain. The list is a pickle, which could call any function.
_LISTED = re.compile(
    r"torch\.distributed\.checkpoint\.metadata (?:Metadata|MetadataIndex|TensorStorageMetadata|ChunkStorageMetadata"
    r"|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem _StorageInfo"
    r"|torch\.serialization _get_layout|torch (?:Size|b?float\d+|u?int\d+|bool)|pathlib(?:\._local)? PosixPath"
)


def share_of(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Choose the tensors that this rank writes: its parts of sharded tensors, and a share of the replicated ones."""
    loads, mine = [0] * ranks.size, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mine[name] = tensor
            continue
        writer = loads.index(min(loads))
        loads[writer] += tensor.nbytes
        if writer == ranks.rank:
            mine[name] = tensor
    return mine


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write the shards of all ranks, each its own."""
    # No copies ahead: they would make this thread wait for the GPU.
    writer = _Writer(path, sync_files=False, per_thread_copy_ahead=0)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    try:
        with ranks.waiting(f"the shards of {path.parent.name.removeprefix('.tmp-')}"):
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=ranks.group)
    except dcp.api.CheckpointException as error:
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items())]
        raise ValueError("; ".join(failures)) from error


def tensors_in(path: Path) -> set[str]:
    """List the tensors in the shards of a checkpoint."""
    return set(_Reader(path).read_metadata().state_dict_metadata)


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place from the shards of a checkpoint. No rank waits for another one."""
    planner = _Planner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no rank exchanges anything, which is intended
        try:
            dcp.load(dict(tensors), storage_reader=_Reader(path), planner=planner, no_dist=True)
        except dcp.api.CheckpointException as error:
            ((failure, _),) = error.failures.values()
            raise ValueError(f"{path} cannot be read: {type(failure).__name__}: {failure!s:.300}") from failure


def full_disk(error: BaseException) -> BaseException:
    """Return the OSError behind an error of torch.save, such as that of a full disk."""
    causes = [error]
    while causes[-1].__context__ is not None:
        causes.append(causes[-1].__context__)
    return next((cause for cause in causes if isinstance(cause, OSError)), error)


class _Writer(dcp.FileSystemWriter):
    """Writes the files of this rank. Drops the causes of errors, which cannot be pickled for other ranks."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = full_disk(error)
            kept = cause if isinstance(cause, OSError) else RuntimeError(str(error))
            raise kept from None


class _Planner(dcp.DefaultLoadPlanner):
    """Reads only tensors. torch would unpickle other values, and a forged file could then call any function."""

    def load_bytes(self, read_item, value):
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


class _Reader(dcp.FileSystemReader):
    """Reads the list of tensors, but calls no function that a forged list names."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        file = self.path / ".metadata"
        try:
            with open(file, "rb") as stream:
                metadata = _Unpickler(stream).load()
            for name, listed in metadata.state_dict_metadata.items():
                if type(listed) is not TensorStorageMetadata:
                    raise ValueError(f"{name} is not a tensor")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            return metadata
        except Exception as error:  # a damaged file may raise anything
            raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error!s:.100}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if not _LISTED.fullmatch(f"{module} {name}"):
            raise ValueError(f"it names {module}.{name}, which a list of tensors never contains")
        return super().find_class(module, name)


def _pinned_bytes(tree):
    """Return the host memory of pinned copies. torch rounds each one up to a power of two."""
    sizes = []
    _map(lambda tensor: sizes.append(local(tensor).nbytes * on_gpu(tensor)), tree)
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


class HostCopies:
    """Copies one set of tensors at a time, and orders the copies before the next update.

    Copies of tensors on a GPU go into pinned memory, which the next set reuses: pinning is slow, and torch unpins free
    memory whenever it records a CUDA graph. Other tensors are copied at once.
    """

    def __init__(self) -> None:
        self._streams = {}  # GPU -> the stream of its copies
        self._copied = {}  # GPU -> the event after the last copy of this set
        self._sources = []  # sources of running copies: their memory must not be reused
        self._free = defaultdict(list)  # dtype, shape and strides -> unused host memory
        self._used = []  # (key, memory) pairs of this set
        self._pageable = 0  # bytes of this set's new memory that are not pinned
        self._obstacle = None  # the error of the last attempt to pin memory

    def take(self, tree: Any) -> Any:
        """Copy every tensor of nested dicts and lists once; of a sharded tensor, this rank's part with its sharding.

        The copies of tensors on a GPU are complete after `wait`. The previous set must be complete, and stays unchanged
        unless it has been released.
        """
        copies, started, could_pin = {}, set(), self._obstacle is None
        share = psutil.virtual_memory().available / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this process
        if could_pin and not self._free and _pinned_bytes(tree) > share:
            self._obstacle = "pinned copies would take more than half of the free memory"
        self._used, self._pageable = [], 0  # memory of an unreleased set is still read

        def copied(tensor):
            if isinstance(tensor, DTensor):
                return _like(tensor, copied(tensor.to_local()))
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = self._copy(tensor.detach(), started)
            return copies[key]

        tree = _map(copied, tree)
        self._copied = {device: self._streams[device].record_event() for device in started}
        if could_pin and self._obstacle is not None:
            size = self._pageable >> 20
            logger.warning("%d MiB cannot be pinned, so checkpoints make the GPU wait (%s)", size, self._obstacle)
        return tree

    def _copy(self, tensor, started):
        """Copy a tensor. `started` holds the GPUs whose copy stream already waits for earlier work."""
        device = tensor.device
        if not on_gpu(tensor):
            return tensor.to("cpu", copy=True)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        if device not in started:
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
            started.add(device)
        self._sources.append(tensor)
        memory = self._memory(tensor)
        with torch.cuda.stream(self._streams[device]):
            return memory.copy_(tensor, non_blocking=True)

    def _memory(self, tensor):
        """Return host memory for a copy: reused, or new and pinned while pinning works."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        memory = self._free[key].pop() if self._free[key] else None
        if memory is None and self._obstacle is None:
            try:
                memory = pinned_like(tensor)
            except RuntimeError as error:
                self._obstacle = str(error).partition("\n")[0]
        if memory is None:
            memory = torch.empty_like(tensor, device="cpu")
            self._pageable += tensor.nbytes
        self._used.append((key, memory))
        return memory

    def before_update(self, *_: Any) -> None:
        """Make later work on each GPU wait for the copies. The host does not wait."""
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait, on the host, until the copies are complete. Any thread may call it."""
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()

    def release(self) -> None:
        """Reuse the memory of this complete set for the next one; free other memory."""
        self._free.clear()
        for key, memory in self._used:
            self._free[key].append(memory)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate pinned host memory of a tensor's shape, dtype and strides."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _like(sharded, local):
    """Make a sharded tensor of a part on the host. DTensor.from_local would move it to the GPUs of the mesh."""
    names, context = sharded.__tensor_flatten__()
    inner = {name: getattr(sharded, name) for name in names} | {"_local_tensor": local}
    return DTensor.__tensor_unflatten__(inner, context, sharded.size(), sharded.stride()).detach()


def _map(function, tree):
    """Apply a function to every tensor of nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, value) for value in tree)
    return tree


# rng.pt comes last, because nothing may draw from the generators after they are restored.
FILES = {
    "optimizer.pt": ("optimizer", "schedule"), "reference.pt": ("reference",), "rollouts.pt": ("ahead",),
    "rng.pt": ("rng",),
}  # fmt: skip
VALUES = f"{SHARDS}/values.pt"
LOG = "log"  # the part that truncates files when it is restored
PROGRESS = "progress"  # the part at the top level of trainer_state.json, as in transformers


class Snapshot:
    """A copy of a run's state on the host, unaffected by later training."""

    def __init__(
        self,
        parts: Mapping[str, Stateful],
        tokenizer: PreTrainedTokenizerBase,
        about: Mapping[str, Any],
        copies: HostCopies,
        ranks: Ranks = ALONE,
        card: str | None = None,
    ):
        policy: Policy = parts["policy"]
        self.tokenizer, self.copies, self.ranks = tokenizer, copies, ranks
        # Copies, because `generate` and packed attention replace parts of them within a later step.
        self.model, config = copy.copy(policy.module), (policy.module.config, policy.module.generation_config)
        self.model.config, self.model.generation_config = copy.deepcopy(config)
        self.card = card
        self.sharded = ranks.size > 1 or policy.lockstep
        gathered = policy.full_state_dict() if policy.lockstep else None  # of shards: in host memory, on rank 0
        weights = policy.state_dict() if gathered is None and ranks.lead else {}
        if self.sharded:
            tensors, values = _named(parts)
            tensors = share_of(tensors, ranks)
            files = {f"{SHARDS}/rng-{ranks.rank}.pt": parts["rng"].state_dict()}
            if ranks.lead:
                files[VALUES] = values
        else:
            tensors, files = {}, _files(parts)
        weights, self.tensors, self.files = copies.take((weights, tensors, files))
        self.weights = weights if gathered is None else gathered
        # The state is made into text at once, so that later steps cannot change it.
        self.state = _state(parts, {**about, **_division(policy, ranks)}) if ranks.lead else ""

    def write(self, path: Path) -> None:
        """Write the state into an empty folder, in the checkpoint thread, and free the copies."""
        together(self.ranks, lambda: self._write_files(path), f"the files of {path.name.removeprefix('.tmp-')}")
        if self.sharded:
            write_tensors(path / SHARDS, self.tensors, self.ranks)
        self.weights = self.tensors = self.files = None
        self.copies.release()

    def _write_files(self, path):
        """Write all files except shards of tensors: rank 0 those of the run, each rank its own."""
        self.copies.wait()
        if self.ranks.lead:
            transformers_logging.disable_progress_bar()  # transformers' bar would interrupt that of the run
            save_model(path, self.model, self.tokenizer, self.weights, self.card)
            (path / STATE).write_text(self.state + "\n")
        for file, state in self.files.items():
            (path / file).parent.mkdir(exist_ok=True)
            try:
                with open(path / file, "wb") as stream:
                    torch.save(state, stream)
            except RuntimeError as error:
                raise full_disk(error) from None


def _state(parts, about):
    """Return the content of trainer_state.json."""
    apart = {"policy", PROGRESS}.union(*FILES.values())
    state = {name: part.state_dict() for name, part in parts.items() if name not in apart}
    return json.dumps({**parts[PROGRESS].state_dict(), **state, **about}, indent=2)


def _files(parts):
    """Return the states that one process writes, by file."""
    files = {}
    for file, names in FILES.items():
        states = {name: parts[name].state_dict() for name in names if name in parts}
        if any(states.values()):
            files[file] = states if len(names) > 1 else states[names[0]]
    return files


def _named(parts):
    """Return the state that several ranks write: tensors by name, and other values."""
    states = {"optimizer": parts["optimizer"].named_state(), "schedule": parts["schedule"].state_dict()}
    if "reference" in parts:
        states["reference"] = parts["reference"].state_dict()
    tensors, values = {}, {}
    for part, state in states.items():
        held = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{part}.{name}": tensor for name, tensor in held.items()}
        values[part] = {name: value for name, value in state.items() if name not in held}
    return tensors, values


def _division(policy, ranks):
    """Return the number of ranks and the parallel mode; empty for one process."""
    parallel = "fsdp2" if policy.lockstep else "ddp"
    return {} if ranks.size == 1 and not policy.lockstep else {"ranks": ranks.size, "parallel": parallel}


def restore(
    parts: Mapping[str, Stateful],
    path: Path,
    about: Mapping[str, Any],
    say: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> None:
    """Restore the parts of a run from a checkpoint: the random generators after the parts that may use them.

    The log comes after all ranks have restored the rest: it truncates later lines, which must remain after a failure.
    """

    def compare(state):
        _compare(state, path, about, say)
        _compare_division(state, _division(parts["policy"], ranks), path, say)
        max_steps = parts[PROGRESS].state_dict()["max_steps"]
        if state["global_step"] > max_steps:
            raise ValueError(f"{path} is past max_steps={max_steps}; raise max_steps")

    def go_back(state):
        if LOG in parts:
            parts[LOG].load_state_dict(state[LOG])

    load = partial(_load, parts, path, ranks)
    for do, what in ((compare, "the comparison with"), (load, "loading"), (go_back, "restoring the log of")):
        together(ranks, partial(_with_state, path, do), f"{what} {path}")


def _with_state(path, do):
    """Call `do` with the state in trainer_state.json."""
    try:
        do(read_state(path))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} does not hold the state that this run needs ({type(error).__name__}: {error!s:.100}); resume "
            "an older checkpoint, or continue with the version of fastgrpo that wrote it"
        ) from error


def _compare(state, path, about, say):
    """Compare the inputs of a run with those of the checkpoint."""
    if state["dtype"] != about["dtype"]:
        before, now = (name.removeprefix("torch.") for name in (state["dtype"], about["dtype"]))
        raise ValueError(f"{path} was trained in {before}, but the policy is {now} now; continue with --dtype {before}")
    for name in ("gradient_checkpointing", "max_tokens_per_microbatch"):
        settings = {of["config"].get(name, "unknown") for of in (state, about)}
        before, now = state.get(name, about.get(name)), about.get(name)
        if {"auto", None} & settings and before != now:  # `check_settings` reports a changed setting
            say(
                f"warning: {name} was {before} and is {now} now, because auto chose it: the run continues, but not bit "
                "for bit as it would have without the change"
            )
    changed = {
        name: None not in (values := (state[f"{name}_digest"], about[f"{name}_digest"])) and values[0] != values[1]
        for name in ("data", "model")
    }
    if changed["model"]:
        raise ValueError(f"the weights at model_name_or_path have changed since {path} was written; restore them")
    if state["rows"] != about["rows"] or changed["data"]:
        rows = f" (then {state['rows']}, now {about['rows']})" if state["rows"] != about["rows"] else ""
        say(
            f"warning: the rows of the training data have changed since {path} was written{rows}: the run continues, "
            "but not bit for bit as it would have without the change"
        )


def _compare_division(before, now, path, say):
    """Warn about another number of ranks or parallel mode, which changes the order of sums."""
    before, now = (
        f"{state['ranks']} processes with {state['parallel']}" if state.get("ranks", 1) > 1 else "one process"
        for state in (before, now)
    )
    if before != now:
        say(
            f"warning: {path.name} was written by {before}, and continues with {now}: the run continues, but not bit "
            "for bit as it would have without the change"
        )


def _load(parts, path, ranks, state):
    """Restore each part except the log."""
    parts[PROGRESS].load_state_dict(state)
    apart = {"policy", PROGRESS, LOG}.union(*FILES.values())
    for name, part in parts.items():
        if name not in apart:
            part.load_state_dict(state[name])
    (_load_shards if "ranks" in state else _load_files)(parts, path)
    if ranks.rank >= state.get("ranks", 1):  # a new rank
        set_seed((state["config"]["seed"] + ranks.rank) % 2**32)
    else:
        file = f"{SHARDS}/rng-{ranks.rank}.pt" if "ranks" in state else "rng.pt"
        parts["rng"].load_state_dict(_read(path / file))


def _load_files(parts, path):
    """Load the weights and the files of one process."""
    policy: Policy = parts["policy"]
    try:
        policy.load_state_dict(read_weights(policy, path))
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {error}") from error
    for file, names in FILES.items():
        needed = [name for name in names if name != "rng" and name in parts and parts[name].state_dict()]
        if needed:
            saved = _read(path / file)
            for name in needed:
                parts[name].load_state_dict(saved[name] if len(names) > 1 else saved)


def _load_shards(parts, path):
    """Load the state of several ranks in place. Trained weights are in the optimizer."""
    names = tensors_in(path / SHARDS)
    parts["optimizer"].make_room({name.removeprefix("optimizer.") for name in names if name.startswith("optimizer.")})
    tensors, _ = _named(parts)
    read_tensors(path / SHARDS, tensors)
    values = _read(path / VALUES)
    parts["optimizer"].load_named_state(values["optimizer"])
    for name in ("schedule", "reference"):
        if name in parts:
            parts[name].load_state_dict(values[name])


def _read(file):
    """Read a file of a checkpoint. Raises ValueError if it is missing or not a torch file."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing from the checkpoint") from None
    except OSError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error!s:.100}") from error


class GlobalRNG:
    """The global random generators. Reward functions may use them; rollouts have their own seeds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of Python, NumPy, torch and every CUDA device."""
        state = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random.get_state(legacy=False)
            state["numpy"] = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states. GPUs that only one of the two machines has are ignored."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
