"""The state of a run between two steps: what a checkpoint holds besides the tokenizer, and how a run gets it back.

    model, tokenizer     in Hugging Face format, at the top: `from_pretrained(checkpoint)` loads them
    README.md            the model card (see `card.py`)
    optimizer.pt         fp32 masters, AdamW's moments, the schedule
    rng.pt               the generators of Python, NumPy, torch and every CUDA device
    reference.pt         what the reference has of its own: its weights where it follows the policy
    trainer_state.json   step, epoch, tokens, accuracies, the source's cursor, the best checkpoint, the settings, and
                         the place in metrics.jsonl and samples.jsonl with what is not yet logged

Several ranks write shards/ (see `shards.py`) in place of optimizer.pt, rng.pt and reference.pt, and rank 0 the rest.
trainer_state.json then says how many they were, and how they held the policy. Every number of ranks reads both forms.

Nothing of a rollout outlives its step, so none of it is saved.

A run is a dictionary of named parts, each with `state_dict` and `load_state_dict`; `FILES` says where each part's state
goes, and the parts that it does not name go to trainer_state.json.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from fastgrpo.data.records import Stateful
from fastgrpo.policy.load import read_weights
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks, together
from fastgrpo.run.checkpoint import SHARDS, STATE, read_state, save_model
from fastgrpo.run.host_copies import HostCopies
from fastgrpo.run.shards import full_disk, read_tensors, share_of, tensors_in, write_tensors

# The generators come after these, because nothing may draw from them after they are restored.
FILES = {"optimizer.pt": ("optimizer", "schedule"), "reference.pt": ("reference",), "rng.pt": ("rng",)}
VALUES = f"{SHARDS}/values.pt"
LOG = "log"  # the part that changes files when it gets its state
PROGRESS = "progress"  # the part whose entries stand at the top of trainer_state.json, as transformers has them


class Snapshot:
    """A copy of a run's state on the host, which later training does not change."""

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
        self.model, self.tokenizer, self.copies, self.ranks = policy.module, tokenizer, copies, ranks
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
        """Write the state into an empty folder, once its copies are complete. Only once, since the copies go then.

        This runs in the thread that writes checkpoints.
        """
        together(self.ranks, lambda: self._write_files(path), f"the files of {path.name.removeprefix('.tmp-')}")
        if self.sharded:
            write_tensors(path / SHARDS, self.tensors, self.ranks)
        self.weights = self.tensors = self.files = None
        self.copies.release()

    def _write_files(self, path):
        """Write all but the shards of the tensors: rank 0 the files of the run, each rank those of its own."""
        self.copies.wait()
        if self.ranks.lead:
            logging.disable_progress_bar()  # transformers' bar would break up the run's own
            save_model(path, self.model, self.tokenizer, self.weights, self.card)
            (path / STATE).write_text(self.state + "\n")
        for file, state in self.files.items():
            (path / file).parent.mkdir(exist_ok=True)
            _save(state, path / file)


def _state(parts, about):
    """Return what trainer_state.json holds."""
    apart = {"policy", PROGRESS}.union(*FILES.values())
    state = {name: part.state_dict() for name, part in parts.items() if name not in apart}
    return json.dumps({**parts[PROGRESS].state_dict(), **state, **about}, indent=2)


def _files(parts):
    """Return what one process writes: the states by the file that they go to."""
    files = {}
    for file, names in FILES.items():
        states = {name: parts[name].state_dict() for name in names if name in parts}
        if any(states.values()):
            files[file] = states if len(names) > 1 else states[names[0]]
    return files


def _named(parts):
    """Return what several ranks write: the tensors in use by name, and all that is no tensor."""
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
    """Say how many ranks a run has and how they hold the policy; nothing of one process alone."""
    if ranks.size == 1 and not policy.lockstep:
        return {}
    return {"ranks": ranks.size, "parallel": "fsdp2" if policy.lockstep else "ddp"}


def _save(state, path):
    """Write a file of torch's. Raises the OSError of a disk that is full, which torch hides behind one of its own."""
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        raise full_disk(error) from None


def restore(
    parts: Mapping[str, Stateful],
    path: Path,
    about: Mapping[str, Any],
    say: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> None:
    """Restore the parts of a run from a checkpoint, the random generators after all that could draw from them.

    The log comes last: it cuts off what was written after the checkpoint. That stays where a rank cannot go on.
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
    for do, what in ((compare, "what is compared with"), (load, "the state in"), (go_back, "the log's return to")):
        together(ranks, partial(_with_state, path, do), f"{what} {path}")


def _with_state(path, do):
    """Do something with the state in trainer_state.json."""
    try:
        do(read_state(path))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} does not hold the state that this run needs ({type(error).__name__}: {error!s:.100}); resume "
            "an older checkpoint, or continue with the version of fastgrpo that wrote it"
        ) from error


def _compare(state, path, about, say):
    """Compare what a run reads with what it read when the checkpoint was written."""
    if state["dtype"] != about["dtype"]:
        before, now = (name.removeprefix("torch.") for name in (state["dtype"], about["dtype"]))
        raise ValueError(f"{path} was trained in {before}, the policy is {now} now; go on with --dtype {before}")
    settings = state["config"]["gradient_checkpointing"], about["config"]["gradient_checkpointing"]
    before, now = state["gradient_checkpointing"], about["gradient_checkpointing"]
    if "auto" in settings and before != now:  # `check_settings` reports a changed setting
        say(
            f"warning: gradient_checkpointing was {before} and is {now} now, by what auto chooses: the run continues, "
            "but not bit for bit as it would have without the change"
        )
    changes = {}
    if state["rows"] != about["rows"]:
        changes["data"] = f"{path} was trained on {state['rows']} rows, the data now has {about['rows']}"
    for name, what in (("data", "the rows of the training data"), ("model", "the weights at model_name_or_path")):
        before, now = state[f"{name}_digest"], about[f"{name}_digest"]
        if before != now and None not in (before, now):
            changes.setdefault(name, f"{what} have changed since {path} was written")
    for name, change in changes.items():
        if name not in about["config"]["resume_ignore"]:
            raise ValueError(
                f"{change}; bring back what was there, or go on with what is there now: --resume_ignore {name}"
            )
        say(f"warning: {change}, which resume_ignore={name} accepts")


def _compare_division(before, now, path, say):
    """Tell where the ranks are others than those that wrote the checkpoint, since they add up in another order."""
    told = []
    for state in (before, now):
        count = state.get("ranks", 1)
        told.append("one process" if count == 1 else f"{count} processes with {state['parallel']}")
    if told[0] != told[1]:
        say(
            f"warning: {path.name} was written by {told[0]}, and goes on with {told[1]}: the run continues, but not "
            "bit for bit as it would have without the change"
        )


def _load(parts, path, ranks, state):
    """Hand each part but the log its state."""
    parts[PROGRESS].load_state_dict(state)
    apart = {"policy", PROGRESS, LOG}.union(*FILES.values())
    for name, part in parts.items():
        if name not in apart:
            part.load_state_dict(state[name])
    (_load_shards if "ranks" in state else _load_files)(parts, path)
    if ranks.rank >= state.get("ranks", 1):  # there was no such rank
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
    """Load what several ranks wrote, in place. The weights that training changes are those of the optimizer."""
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
    """Read a file of a checkpoint. Raises ValueError where it is missing or is no file of torch's."""
    if file.exists():
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # what a damaged file makes of torch and of its unpickler is of any type
            raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error!s:.100}") from error
    raise ValueError(f"{file} is missing from the checkpoint")


class GlobalRNG:
    """The global random generators. Reward functions may use them; rollouts draw from seeds of their own."""

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
