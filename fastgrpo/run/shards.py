"""The shards of a checkpoint, the folder in which every rank of a run writes its own part of the tensors.

    .metadata, __R_N.distcp   tensors by name, as torch.distributed.checkpoint writes them; R is the rank
    values.pt                 what goes with them and is no tensor: the schedule, the settings of AdamW (rank 0)
    rng-R.pt                  the random generators of rank R

The names do not depend on how a tensor was divided. So any number of ranks reads what any other number has written:
each finds the parts that it needs, and copies their bits.
"""

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fastgrpo.ranks import Ranks

# All that the list of tensors is made of: it is a pickle, which could name any function to call. Of torch's module of
# these classes none but they may be named, since it imports others that run what they are given.
_LISTED = re.compile(
    r"torch\.distributed\.checkpoint\.metadata (?:Metadata|MetadataIndex|TensorStorageMetadata|ChunkStorageMetadata"
    r"|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem _StorageInfo"
    r"|torch\.serialization _get_layout|torch (?:Size|b?float\d+|u?int\d+|bool)|pathlib(?:\._local)? PosixPath"
)


def share_of(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Choose what this rank writes: its parts of sharded tensors, and a share of those that every rank has whole."""
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
    # Without copying ahead, which would make this thread wait for the GPU.
    writer = _Writer(path, sync_files=False, per_thread_copy_ahead=0)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    try:
        with ranks.waiting(f"the shards of {path.parent.name.removeprefix('.tmp-')}"):
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=ranks.group)
    except dcp.api.CheckpointException as error:
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items())]
        raise ValueError("; ".join(failures)) from error


def tensors_in(path: Path) -> set[str]:
    """Read which tensors the shards of a checkpoint hold."""
    return set(_Reader(path).read_metadata().state_dict_metadata)


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place from the shards of a checkpoint. No rank waits for another one.

    Raises:
        ValueError: A tensor is not there or has another shape, or a file is missing or cannot be read.
    """
    planner = _Planner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is exchanged, which is intended
        try:
            dcp.load(dict(tensors), storage_reader=_Reader(path), planner=planner, no_dist=True)
        except dcp.api.CheckpointException as error:
            ((failure, _),) = error.failures.values()
            raise ValueError(f"{path} cannot be read: {type(failure).__name__}: {failure!s:.300}") from failure


def full_disk(error: BaseException) -> BaseException:
    """Return the OSError behind an error of torch's, such as that of a full disk, which torch.save hides."""
    causes = [error]
    while causes[-1].__context__ is not None:
        causes.append(causes[-1].__context__)
    return next((cause for cause in causes if isinstance(cause, OSError)), error)


class _Writer(dcp.FileSystemWriter):
    """Writes the files of this rank. Its errors can be sent to other ranks, which their causes would not survive."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = full_disk(error)
            kept = cause if isinstance(cause, OSError) else RuntimeError(str(error))
            raise kept from None


class _Planner(dcp.DefaultLoadPlanner):
    """Reads tensors alone. All else torch would unpickle, which calls whatever a forged file names."""

    def load_bytes(self, read_item, value):
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


class _Reader(dcp.FileSystemReader):
    """Reads the list of tensors without calling what a forged one names."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        file = self.path / ".metadata"
        try:
            with open(file, "rb") as stream:
                metadata = _Unpickler(stream).load()
            for name, listed in metadata.state_dict_metadata.items():
                if type(listed) is not TensorStorageMetadata:
                    raise ValueError(f"{name} is no tensor")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            return metadata
        except Exception as error:  # what a damaged file makes of the unpickler is of any type
            raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error!s:.100}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if not _LISTED.fullmatch(f"{module} {name}"):
            raise ValueError(f"it names {module}.{name}, which no list of tensors does")
        return super().find_class(module, name)
