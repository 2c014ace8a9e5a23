"""Digests of what a run reads, which a checkpoint keeps so that a resumed run notices where something has changed."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from fastgrpo.ranks import Ranks

BLOCK = 4096  # numbers that are added up before they are hashed
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_differences(ranks: Ranks, **values: Any) -> None:
    """Refuse a run whose ranks read different things. All ranks call this together."""
    for rank, theirs in enumerate(ranks.gather(values, "what each rank reads")):
        for name, value in values.items():
            if theirs[name] != value:
                raise ValueError(
                    f"the {name.replace('_', ' ')} are others on rank {rank} than on rank {ranks.rank}; let all "
                    "machines read the same files and rows in the same order"
                )


def digest_of_rows(rows: Iterable[dict]) -> str:
    """Hash data rows with all of their columns, in their order.

    The order of the columns does not count. Arrays and tensors count by their numbers. Any other object that
    JSON cannot hold counts by its type alone, because its text may differ from one process to the next.
    """
    digest = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            digest.update(f"{json.dumps(name)}:{_text(row[name])},".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _text(value: Any) -> str:
    """Return a value as JSON; its type where it cannot be written, such as a list that holds itself."""
    try:
        return json.dumps(value, default=_plain, skipkeys=True, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return type(value).__qualname__


def _plain(value: Any) -> Any:
    """Return what JSON holds in place of a value: numbers of an array, or the name of its type."""
    try:
        return value.tolist()
    except Exception:  # no array, or one without numbers in memory, such as a sparse tensor
        return type(value).__qualname__


@torch.no_grad()
def digest_of_weights(weights: dict[str, torch.Tensor]) -> str:
    """Hash weights with their names, dtypes and shapes.

    The bits of every `BLOCK` numbers are added up as integers on the device of the weights, and the sums are hashed. So
    the result is the same on every device, and a model of many gigabytes takes seconds.

    Args:
        weights: The weights by name, floating point or integer of any shape.
    """
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
        whole = len(bits) // BLOCK * BLOCK
        for part in (bits[:whole].view(-1, BLOCK), bits[whole:].view(1, -1)):
            digest.update(part.sum(1, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()
