"""Checkpoints: folders that are either complete or absent, written by a thread while training continues.

A checkpoint is first written to a temporary folder and synced. Then manifest.json, which lists every file with its
SHA-256, is written and synced, and the folder is renamed to checkpoint-STEP. So a process may be killed at any moment
and the last good checkpoint is still there. `snapshot.py` says what a checkpoint contains.

Where several ranks write one, rank 0 alone makes and renames the folder, and each rank writes, hashes and syncs files
of its own in it. What fails on one of them fails the checkpoint on all.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fastgrpo.ranks import ALONE, RankLost, Ranks, together
from fastgrpo.run.folder import RunFolder

if TYPE_CHECKING:  # transformers takes seconds to import
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
SHARDS = "shards"  # the folder of what several ranks wrote; a checkpoint of one process has none
NEEDED = (STATE, "optimizer.pt", "rng.pt")  # files that every checkpoint of one process has
NEEDED_OF_RANKS = (STATE, f"{SHARDS}/.metadata", f"{SHARDS}/values.pt", f"{SHARDS}/rng-0.pt")  # and of several ranks
_OF_RANK = re.compile(rf"{SHARDS}/(?:__|rng-)(\d+)[_.].*")  # the files of one rank; all others are of rank 0
VERIFYING = 8  # files that are read at once: one alone would take hours for the state of a large model
CHUNK = 1 << 24  # bytes hashed at a time; chunks are large because each one has to acquire the interpreter's lock again


def save_model(
    path: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    state_dict: "dict[str, torch.Tensor] | None" = None,
    card: str | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` reads: weights (safetensors), config and tokenizer.

    transformers 4, and with it many versions of vLLM, reads `rope_theta` and `rope_scaling` at the top of config.json
    and takes 10,000 and none where they are missing, without an error (vLLM pull request 42624). So they stand there
    too. Rotary parameters that differ among the layers have no such names.
    """
    model.save_pretrained(path, state_dict=state_dict)
    tokenizer.save_pretrained(path)
    file = path / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}  # a folder of adapters has none
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
        file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if card is not None:
        (path / "README.md").write_text(card, encoding="utf-8")


def checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """Find the checkpoints in the folder of a run, whether they are intact or not."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(run_dir).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))


def step_of(path: str | Path) -> int:
    """Read the step from the name of a checkpoint."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(path).name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint: the name of a checkpoint is checkpoint-STEP")
    return int(match[1])


def write_checkpoint(folder: RunFolder, step: int, write: Callable[[Path], None], ranks: Ranks = ALONE) -> Path:
    """Write checkpoint-STEP into the folder of a run, either complete or not at all, whenever the process ends."""
    name = f"checkpoint-{step}"
    lead = ranks.lead
    temporary = together(ranks, lambda: _make(folder, name) if lead else None, f"the folder of {name}")[0]
    try:
        together(ranks, lambda: _see(temporary), f"the folder of {name}")
        write(temporary)
        entries = together(ranks, lambda: _sealed(temporary, ranks.rank), f"the digests of {name}")
        return together(ranks, lambda: _finish(folder, name, entries) if lead else None, f"the manifest of {name}")[0]
    except RankLost:
        raise  # the others may still write into the folder; the next save removes it
    except BaseException:
        if lead and temporary.exists():
            folder.remove(temporary.name)
        raise


def _make(folder, name):
    """Make the temporary folder of a checkpoint, and remove those of saves that were interrupted."""
    for leftover in folder.made():
        if leftover.name.startswith(".tmp-"):
            folder.remove(leftover.name)
    temporary = folder.claim(f".tmp-{name}")
    temporary.mkdir()
    return temporary


def _see(temporary):
    if not temporary.is_dir():
        raise ValueError(
            f"{socket.gethostname()} does not see {temporary}, which rank 0 has made: output_dir must lie in a file "
            "system that all machines of the run share"
        )


def _sealed(temporary, rank):
    """Hash and sync the files that this rank wrote, and return their entries in the manifest."""
    files = {str(file.relative_to(temporary)): file for file in sorted(temporary.rglob("*")) if file.is_file()}
    files = {name: file for name, file in files.items() if _writer_of(name) == rank}
    entries = {name: _entry(file) for name, file in files.items()}
    folders = [inner for inner in temporary.rglob("*") if inner.is_dir()]
    for written in (*files.values(), *folders, temporary):
        sync(written)
    return entries


def _writer_of(name):
    match = _OF_RANK.fullmatch(name)
    return int(match[1]) if match else 0


def _finish(folder, name, entries):
    """Write the manifest, and give the folder its name."""
    temporary = folder.path / f".tmp-{name}"
    files = {file: entry for of_rank in entries for file, entry in of_rank.items()}
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=2) + "\n")
    sync(manifest)
    sync(temporary)
    path = folder.rename(temporary.name, name)
    sync(folder.path)
    return path


def read_state(path: Path) -> dict[str, Any]:
    """Read trainer_state.json of a checkpoint."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path / STATE} cannot be read: {type(error).__name__}: {error!s:.100}") from None
    if not (isinstance(state, dict) and isinstance(state.get("config"), dict) and "command" in state):
        raise ValueError(f"{path / STATE} does not hold the state of a run")
    return state


def verify(path: Path, of_run: bool = False) -> None:
    """Check that every file of a checkpoint has the size and the SHA-256 that its manifest lists."""
    try:
        entries = json.loads((path / MANIFEST).read_text())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path / MANIFEST} is missing or cannot be read: the checkpoint is not complete") from None
    if of_run:
        _check_complete(path, expected)
    for name in expected:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{path / MANIFEST} names {name!r}, which lies outside the checkpoint")
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing from the checkpoint")
    with ThreadPoolExecutor(VERIFYING) as threads:  # hashing and reading both let the other threads run
        found = threads.map(_entry, [path / name for name in expected])
        for (name, (size, digest)), entry in zip(expected.items(), found, strict=True):
            if entry != {"bytes": size, "sha256": digest}:
                raise ValueError(f"{path / name} is damaged: its size or SHA-256 differs from the one in {MANIFEST}")


def _check_complete(path, listed):
    """Refuse a manifest that does not list all that a run needs, in the form of one process or of several ranks."""
    sharded = any(name.startswith(f"{SHARDS}/") for name in listed)
    for name in NEEDED_OF_RANKS if sharded else NEEDED:
        if name not in listed:
            raise ValueError(f"{path / MANIFEST} does not list {name}: the checkpoint is not complete")
    if not any(name.endswith(".safetensors") for name in listed):
        raise ValueError(f"{path / MANIFEST} lists no weights: the checkpoint is not complete")


def _entry(file):
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: RunFolder, limit: int, best: int | None = None) -> None:
    """Delete checkpoints until `limit` are left: the newest, the best, then the next newest ones.

    As in transformers, the newest and the best checkpoint both stay even at a limit of 1. Checkpoints that no run made
    here neither count nor are deleted.
    """
    made = folder.made()
    found = {step: path for step, path in checkpoints(folder.path).items() if path in made}
    newest_first = sorted(found, reverse=True)
    kept = {*newest_first[:1], best} & set(found)
    kept |= set([step for step in newest_first if step not in kept][: max(0, limit - len(kept))])
    for step, path in found.items():
        if step not in kept:
            folder.remove(path.name)
