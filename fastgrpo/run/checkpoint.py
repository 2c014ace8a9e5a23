"""Checkpoints: writes them atomically, verifies them, and deletes old ones.

A thread writes a checkpoint during training: it syncs a temporary folder, writes manifest.json with the SHA-256 of
every file, and renames the folder to checkpoint-STEP. The last good checkpoint survives a kill at any moment.
`snapshot.py` defines the content.

With several ranks, rank 0 creates and renames the folder, and each rank writes, hashes and syncs its own files. A
failure on one rank fails the checkpoint on all.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fastgrpo.config.fields import did_you_mean
from fastgrpo.config.settings import TrainingConfig
from fastgrpo.ranks import ALONE, RankLost, Ranks, apart, together
from fastgrpo.run.folder import RunFolder, see

if TYPE_CHECKING:  # transformers takes seconds to import
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
SHARDS = "shards"  # folder in checkpoints of several ranks
NEEDED = (STATE, "optimizer.pt", "rng.pt")  # files that every checkpoint of one process has
NEEDED_OF_RANKS = (STATE, f"{SHARDS}/.metadata", f"{SHARDS}/values.pt", f"{SHARDS}/rng-0.pt")  # and of several ranks
_OF_RANK = re.compile(rf"{SHARDS}/(?:__|rng-)(\d+)[_.].*")  # the files of one rank; rank 0 writes all others
VERIFYING = 8  # files that are read concurrently: one at a time would take hours for a large model
CHUNK = 1 << 24  # bytes hashed at a time; large, because each chunk acquires the interpreter's lock


def save_model(
    path: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    state_dict: "dict[str, torch.Tensor] | None" = None,
    card: str | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` reads: weights (safetensors), config and tokenizer.

    transformers 4, and with it many versions of vLLM, also reads these files: names that it expects are added.
    """
    # Read the dtype from state_dict: the parameters of a sharded model are fp32 masters, whatever is saved.
    dtypes = [value.dtype for value in (state_dict or {}).values() if value.is_floating_point()]
    model.save_pretrained(path, state_dict=state_dict)  # empties state_dict
    tokenizer.save_pretrained(path)
    for file, change in ((path / "config.json", _add_old_rope), (path / "tokenizer_config.json", _with_old_names)):
        if file.exists():  # a folder of adapters has no config.json
            known = json.loads(file.read_text(encoding="utf-8"))
            change(known)
            if dtypes and file.name == "config.json":
                known["dtype"] = str(dtypes[0]).removeprefix("torch.")
            if "dtype" in known:
                known["torch_dtype"] = known["dtype"]  # transformers before 4.56 reads only this name
            file.write_text(json.dumps(known, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    if getattr(model.config, "vision_config", None) is not None:
        _copy_processor(model.name_or_path, path)
    if card is not None:
        (path / "README.md").write_text(card, encoding="utf-8")


def _add_old_rope(config):
    """Add rope_theta and rope_scaling: without them, transformers 4 uses 10,000 and None (vLLM pull request 42624)."""
    for inner in config.values():
        if isinstance(inner, dict) and "rope_parameters" in inner:
            _add_old_rope(inner)
    rope, kind = config.get("rope_parameters") or {}, config.get("model_type", "")
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    # transformers 4 does not know other models with a rope per kind of layer, and transformers 5 misreads the names.
    if "rope_theta" not in rope or (local and not kind.startswith(("gemma3", "olmo3"))):
        return
    config["rope_theta"] = rope["rope_theta"]
    if kind == "gpt_neox":
        config |= {"rotary_pct": rope.get("partial_rotary_factor", 0.25), "rotary_emb_base": rope["rope_theta"]}
    if local and "gemma3" in kind:
        config["rope_local_base_freq"] = local["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    if config.get("model_type") == "phi3":  # it refuses other names
        scaling = {"type": "longrope"} | {name: scaling.get(name) for name in ("short_factor", "long_factor")}
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = scaling


def _with_old_names(tokenizer):
    """Change the names that transformers 4 does not read; transformers 5 reads both."""
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")


def _copy_processor(source, path):
    """Copy the files of the images' processor, without which vLLM does not start a model with a vision tower."""
    from transformers.utils import cached_file

    for name in ("preprocessor_config.json", "processor_config.json"):
        with contextlib.suppress(OSError):  # a model made in memory, or without network, has no such file
            if source and (found := cached_file(source, name, _raise_exceptions_for_missing_entries=False)):
                shutil.copy(found, path / name)


def checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """Return the checkpoints in a run folder by step, intact or not."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(run_dir).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))


def step_of(path: str | Path) -> int:
    """Read the step from the name of a checkpoint."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(path).name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint: the name of a checkpoint is checkpoint-STEP")
    return int(match[1])


def write_checkpoint(folder: RunFolder, step: int, write: Callable[[Path], None], ranks: Ranks = ALONE) -> Path:
    """Write checkpoint-STEP into the run folder atomically."""
    name = f"checkpoint-{step}"
    lead = ranks.lead
    temporary = together(ranks, lambda: _make(folder, name) if lead else None, f"the folder of {name}")[0]
    try:
        together(ranks, lambda: see(temporary), f"the folder of {name}")
        write(temporary)
        entries = together(ranks, lambda: _sealed(temporary, ranks.rank), f"the digests of {name}")
        return together(ranks, lambda: _finish(folder, name, entries) if lead else None, f"the manifest of {name}")[0]
    except RankLost:
        raise  # other ranks may still write into the folder; the next save deletes it
    except BaseException:
        if lead and temporary.exists():
            folder.remove(temporary.name)
        raise


def _make(folder, name):
    """Create the temporary folder of a checkpoint, and delete those of interrupted saves."""
    for leftover in folder.made():
        if leftover.name.startswith(".tmp-"):
            folder.remove(leftover.name)
    temporary = folder.claim(f".tmp-{name}")
    temporary.mkdir()
    return temporary


def _sealed(temporary, rank):
    """Hash and sync the files of this rank, and return their manifest entries."""
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
    """Write the manifest, and rename the folder."""
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
    if of_run:  # a resume needs all parts
        sharded = any(name.startswith(f"{SHARDS}/") for name in expected)
        for name in NEEDED_OF_RANKS if sharded else NEEDED:
            if name not in expected:
                raise ValueError(f"{path / MANIFEST} does not list {name}: the checkpoint is not complete")
        if not any(name.endswith(".safetensors") for name in expected):
            raise ValueError(f"{path / MANIFEST} lists no weights: the checkpoint is not complete")
    for name in expected:
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing from the checkpoint")
    with ThreadPoolExecutor(VERIFYING) as threads:  # hashing and reading release the lock of the interpreter
        found = threads.map(_entry, [path / name for name in expected])
        for (name, (size, digest)), entry in zip(expected.items(), found, strict=True):
            if entry != {"bytes": size, "sha256": digest}:
                raise ValueError(f"{path / name} is damaged: its size or SHA-256 differs from the one in {MANIFEST}")


def _entry(file):
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: RunFolder, limit: int, best: int | None = None) -> None:
    """Delete checkpoints until `limit` are left: keep the newest, the best, then the next newest.

    As in transformers, the newest and the best are kept even with a limit of 1. Checkpoints that no run made here are
    neither counted nor deleted.
    """
    made = folder.made()
    found = {step: path for step, path in checkpoints(folder.path).items() if path in made}
    newest_first = sorted(found, reverse=True)
    kept = {*newest_first[:1], best} & set(found)
    kept |= set([step for step in newest_first if step not in kept][: max(0, limit - len(kept))])
    for step, path in found.items():
        if step not in kept:
            folder.remove(path.name)


class Checkpointer:
    """Saves and prunes a run's checkpoints in a thread. As a context manager, it waits for the one in progress."""

    def __init__(self, config: TrainingConfig, log: Any, ranks: Ranks = ALONE) -> None:
        self.config, self.log = config, log
        self._trainers = ranks
        self.ranks = apart(ranks, "checkpoint", config.ddp_timeout)  # the process group of the writing threads
        self._good = log.checkpoint
        self.saved = None if log.checkpoint is None else step_of(log.checkpoint)  # step of the last save
        metric = config.metric_for_best_model
        self.greater = not (metric or "").endswith("loss")
        if config.greater_is_better is not None:
            self.greater = config.greater_is_better
        self.best = None  # {"metric", "value", "step"} of the best checkpoint so far
        self.same = True  # whether the resumed run had the same metric and direction
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.wait()
        except (ValueError, RankLost) as failure:
            if error is None:
                raise
            if not isinstance(failure, RankLost):  # else the lost rank has ended the run too
                self.log.say(f"error: {failure}")  # only printed: the error that ends the run must stay the one raised
        finally:
            self._thread.shutdown()

    @property
    def newest(self) -> Path | None:
        """The newest good checkpoint of this run, or None. Waits for the one in progress."""
        if self._writing is not None and self._writing.exception() is None:
            return self._writing.result()
        return self._good

    def due(self, step: int, last: bool) -> bool:
        """Return whether to save after a step."""
        every = self.config.save_steps
        return last or (step > 0 and every is not None and step % every == 0)

    def save(self, step: int, take: Callable[[], Any]) -> None:
        """Wait for the previous save, take a snapshot, and write it in the thread."""
        if self.saved == step:
            if self._measured(step):  # a stopped run saves first, and evaluates this step after the resume
                self._compare(step)
            return
        self.wait()
        self._compare(step)
        snapshot = take()
        self.saved = step
        self._writing = self._thread.submit(self._write, step, snapshot)

    def check(self) -> None:
        """Raise the error of a failed save, after the same step on all ranks. Does not wait."""
        if self._writing is None:
            return
        failed = self._writing.done() and self._writing.exception() is not None
        if self._trainers.any(failed, f"whether checkpoint-{self.saved} was written"):
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint in progress."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            self._good = writing.result()
        except RankLost:
            raise
        except Exception as error:
            good = f"{self._good} is the newest good one" if self._good else "there is no earlier one"
            raise ValueError(
                f"checkpoint-{self.saved} could not be written to {self.log.dir}: {error}; {good}. Fix the cause, then "
                f"continue with --output_dir {self.log.dir} --resume_from_checkpoint auto"
            ) from error

    def _write(self, step, snapshot):
        lead, folder = self.ranks.lead, self.log.folder
        for name in ("metrics.jsonl", "samples.jsonl") if lead else ():  # the checkpoint records their lengths
            with contextlib.suppress(FileNotFoundError):  # the user may have deleted it
                sync(self.log.dir / name)
        path = write_checkpoint(folder, step, snapshot.write, self.ranks)
        limit, best = self.config.save_total_limit, self.best and self.best["step"]
        if limit is not None:
            together(self.ranks, lambda: prune(folder, limit, best) if lead else None, "the deletion of checkpoints")
        return path

    def _measured(self, step):
        return self.log.latest.get(self.config.metric_for_best_model, (None, None))[0] == step

    def _compare(self, step):
        """Mark this step as the best if the metric logged for this step is better."""
        metric = self.config.metric_for_best_model
        if metric is None or step == 0:
            return
        value = self.log.latest[metric][1] if self._measured(step) else math.nan
        if math.isnan(value):
            meant = "" if metric in self.log.latest else did_you_mean(metric, self.log.latest)
            self.log.say(f"step {step}: {metric} was not measured, so checkpoint-{step} cannot be the best one{meant}")
        elif self.best is None or (value > self.best["value"] if self.greater else value < self.best["value"]):
            self.best = {"metric": metric, "value": value, "step": step}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: which checkpoint is the best one, and by which metric and direction."""
        return {"best": self.best, "by": [self.config.metric_for_best_model, self.greater]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best checkpoint of the resumed run, unless its metric or direction has changed."""
        mine = self.state_dict()["by"]
        self.same = state.get("by", mine) == mine  # older checkpoints do not name it
        self.best = state["best"] if self.same else None
