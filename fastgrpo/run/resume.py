"""Resumes a run: finds its folder and checkpoint, and compares settings and inputs."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.config.validation import CONDITIONS, RESUME_MAY_CHANGE, on_resume
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.run.checkpoint import checkpoints, read_state, step_of, verify
from fastgrpo.run.folder import SWEEP_TABLE, RunFolder, claim_output_dir, contents, made_in, note

# Settings that may be auto. A checkpoint stores the choice of auto, and `restore` compares it.
CHOSEN = ("dtype", "gradient_checkpointing", "max_tokens_per_microbatch")


def open_run(
    config: TrainingConfig, say: Callable[[str], None], inputs: Mapping[str, Path] | None = None
) -> tuple[RunFolder, Path | None]:
    """Claim the folder of a run, and find the checkpoint to resume from."""
    resume, output_dir = config.resume_from_checkpoint, config.output_dir
    if output_dir is not None and SWEEP_TABLE in made_in(Path(output_dir)):
        raise ValueError(f"output_dir {output_dir} holds a sweep; choose another output_dir")
    if resume is None:
        return claim_output_dir(output_dir, config.folder_name, config.overwrite_output_dir, inputs=inputs), None
    if resume != "auto":
        output_dir = _parent(resume, output_dir)
    folder = claim_output_dir(output_dir, config.folder_name, resume=True, inputs=inputs)
    try:
        checkpoint = _find(folder, config, say)
    except BaseException:
        folder.close()
        raise
    return folder, checkpoint


def may_go_on(config: TrainingConfig, ranks: Ranks = ALONE) -> bool:
    """Return whether output_dir holds checkpoints, and resume_from_checkpoint is not set."""
    path = config.output_dir
    left = path is not None and os.path.isdir(path) and bool(checkpoints(path))
    return ranks.from_lead(left and config.resume_from_checkpoint is None, "whether output_dir holds a run")


def _find(folder, config, say):
    """Find the checkpoint in a claimed folder. Without one, empty the folder."""
    path, resume = folder.path, config.resume_from_checkpoint
    if resume == "auto":
        checkpoint = newest_good(path, say)
    else:
        checkpoint = path / Path(resume).name  # checkpoint-6/../checkpoint-4 is gone once checkpoint-6 is set aside
        verify(checkpoint, of_run=True)
    if checkpoint is None:
        if (path / "summary.json").exists():
            raise ValueError(f"{path} holds a finished run without its checkpoints; choose another output_dir")
        stale = [entry.name for entry in folder.made() if entry.name.startswith("stale-")]
        if stale:
            raise ValueError(
                f"{path} holds {stale[-1]}, but no checkpoint; rename it to checkpoint-STEP to resume from it, or "
                "choose another output_dir"
            )
        gone = [
            name for name in made_in(path) if name.startswith("checkpoint-") and not (path / f".tmp-{name}").exists()
        ]
        if gone:
            raise ValueError(
                f"{path} held {max(gone, key=step_of)}, which is not there now; put it back, or start anew with "
                "--overwrite_output_dir True"
            )
        if contents(path) and not folder.made():
            raise ValueError(f"output_dir {path} has no checkpoint, and no run made its files; choose another folder")
        folder.refuse_foreign()
        say(f"no checkpoint in {path}: a new run starts")
        folder.empty()
        return None
    check_settings(checkpoint, config, say)
    # A checkpoint may be a copy: its manifest proves that a run made it. A copy of a whole folder may lack the
    # notes: then config.json proves that a run made the other files.
    whole = not folder.made() and _is_run(path)
    note(path, *(entry.name for entry in folder.foreign() if whole or entry == checkpoint))
    folder.refuse_foreign()
    say(f"resuming from {checkpoint}")
    return checkpoint


def _is_run(path):
    """Return whether config.json in a folder holds the settings of a run."""
    try:
        return "resume_from_checkpoint" in json.loads((path / "config.json").read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _parent(checkpoint, output_dir):
    """Return the run folder of a checkpoint."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise ValueError(f"resume_from_checkpoint: no such folder: {path}")
    step_of(path)
    if output_dir is not None and Path(output_dir).resolve() != path.parent.resolve():
        raise ValueError(
            f"resume_from_checkpoint {path} continues in its own run folder: leave --output_dir {output_dir} out, or "
            f"start a new run from its weights with --model_name_or_path {path}"
        )
    return path.parent


def newest_good(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """Find the newest intact checkpoint. Skip damaged ones with a warning."""
    found = checkpoints(run_dir)
    for step in reversed(found):
        try:
            verify(found[step], of_run=True)
            return found[step]
        except ValueError as error:
            say(f"warning: {error}; {found[step].name} is skipped")
    if found:
        raise ValueError(f"no checkpoint in {run_dir} is intact; nothing was deleted; start in another output_dir")
    return None


def set_aside(folder: RunFolder, step: int, say: Callable[[str], None]) -> None:
    """Rename the checkpoints after a step, since the resumed run writes these steps again."""
    for later, path in checkpoints(folder.path).items():
        if later > step:
            free = f"stale-{path.name}"
            while (folder.path / free).exists():
                free += "+"
            folder.rename(path.name, free)
            say(f"{path.name} is renamed to {free}")


def check_settings(checkpoint: Path, config: TrainingConfig, say: Callable[[str], None]) -> None:
    """Compare the settings with those of a checkpoint. A change is allowed, a warning or an error, by `on_resume`.

    A setting without effect before and now may differ.
    """
    state = read_state(checkpoint)
    if state["command"] != config.command:
        raise ValueError(
            f"{checkpoint} was written by python -m fastgrpo.{state['command']}; continue it with that command, or "
            f"start a new run from its weights: --model_name_or_path {checkpoint}"
        )
    before, now = state["config"], asdict(config)
    earlier = _earlier(before, config)
    for field in fields(config):
        # Both go through JSON, where tuples are lists.
        old, new = (json.loads(json.dumps(v)) for v in (before.get(field.name, field.default), now[field.name]))
        rule, (_, holds) = on_resume(field.name, old, new), CONDITIONS.get(field.name, (None, None))
        if old == new or rule == "free" or (field.name in CHOSEN and {"auto", None} & {old, new}):
            continue
        if holds is not None and not (holds(earlier) or holds(config)):
            continue
        if rule == "same":
            anew = f", or start a new run from its weights: --model_name_or_path {checkpoint}"
            raise ValueError(
                f"{checkpoint} was trained with {field.name}={old!r}, now it is {new!r}, which changes what is "
                f"learned; leave {field.name} as it was" + ("" if config.use_peft else anew)
            )
        say(
            f"warning: {field.name} was {old!r} and is {new!r} now: the run continues, but not bit for bit as it would "
            "have without the change"
        )


def _earlier(before, config):
    """Return the settings of a checkpoint as a record, without validation: ranges may have changed."""
    record = object.__new__(type(config))
    for field in fields(config):
        value = before.get(field.name, field.default)
        object.__setattr__(record, field.name, tuple(value) if isinstance(value, list) else value)
    return record


BLOCK = 4096  # numbers summed into one hashed value
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_differences(ranks: Ranks, **values: Any) -> None:
    """Raise if ranks read different inputs. All ranks call this together."""
    for rank, theirs in enumerate(ranks.gather(values, "the comparison of inputs")):
        for name, value in values.items():
            if theirs[name] != value:
                raise ValueError(
                    f"the {name.replace('_', ' ')} differ between rank {rank} and rank {ranks.rank}; give all ranks "
                    "the same settings, packages, files and rows in the same order"
                )


def shared_settings(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks: not paths, and not what only rank 0 does."""
    own = RESUME_MAY_CHANGE - {
        "logging_steps", "logging_first_step", "eval_steps", "eval_on_start", "eval_num_generations", "save_steps",
        "metric_for_best_model", "parallel",
    }  # fmt: skip
    own |= {"device", "model_name_or_path", "dataset_name", "train_file"}
    return {f"values_of_{name}": value for name, value in asdict(config).items() if name not in own}


def digest_of_rows(rows: Iterable[dict]) -> str:
    """Hash data rows with all of their columns, in their order.

    The order of columns does not matter. Arrays and tensors are hashed by value. Other objects that are not JSON are
    hashed by type, because their text may differ between processes.
    """
    digest = hashlib.sha256()
    for row in rows:
        if not isinstance(row, Mapping):  # refused by the check of rows
            continue
        for name in sorted(row, key=str):
            digest.update(f"{json.dumps(name)}:{_text(row[name])},".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _text(value):
    """Return a value as JSON, or its type if it cannot be written, such as a list that contains itself."""
    try:
        return json.dumps(value, default=_plain, skipkeys=True, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return type(value).__qualname__


def _plain(value):
    """Return the numbers of an array, or the name of another type."""
    try:
        return value.tolist()
    except Exception:  # no array, or one without numbers in memory, such as a sparse tensor
        return type(value).__qualname__


@torch.no_grad()
def digest_of_weights(weights: dict[str, torch.Tensor]) -> str:
    """Hash weights with their names, dtypes and shapes.

    The bits of every `BLOCK` numbers are summed as integers on the device, and the sums are hashed. The result does not
    depend on the device, and a model of many gigabytes takes seconds.
    """
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
        whole = len(bits) // BLOCK * BLOCK
        for part in (bits[:whole].view(-1, BLOCK), bits[whole:].view(1, -1)):
            digest.update(part.sum(1, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def inputs_of(config: TrainingConfig, model: Any = None) -> dict[str, Path]:
    """Return the paths of the model, the data set and train_file, if they are files or folders."""
    found = {"the model": getattr(model, "name_or_path", model), "the data set": config.dataset_name}
    found["the rows of train_file"] = getattr(config, "train_file", None)  # only in supervised training
    return {what: Path(path) for what, path in found.items() if path and Path(path).exists()}
