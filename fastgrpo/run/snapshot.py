"""The state of a run between two steps: what a checkpoint holds besides the tokenizer, and how a run gets it back.

    model, tokenizer     Hugging Face format, at the top: `from_pretrained(checkpoint)` loads them
    optimizer.pt         fp32 masters, AdamW's moments, the schedule
    rng.pt               generators of Python, NumPy, torch and every CUDA device
    trainer_state.json   step, epoch, tokens, accuracies, data cursor and curriculum level, the best checkpoint, the
                         settings, and the place in metrics.jsonl and samples.jsonl with what is not yet logged

    reference.pt         with --sync_ref_model: the reference's weights

Nothing of a rollout outlives its step, so none is saved. A reference that does not move is not either: it is made from
the model that the run began with.
"""

import dataclasses
import json
import random
import sys

import torch
from transformers.utils import logging

from fastgrpo.policy.lora import ADAPTER, has_adapters, load_adapters
from fastgrpo.run.checkpoint import save_model


class Snapshot:
    """A copy on the host, which training does not touch any more; `write` puts it into a folder."""

    def __init__(self, trainer):
        updater = trainer.update.updater
        copies = {}
        self.model, self.tokenizer = trainer.model, trainer.tokenizer
        weights = trainer.model.state_dict()
        if has_adapters(trainer.model):  # their base does not move
            weights = {name: value for name, value in weights.items() if ADAPTER in name}
        self.weights = to_host(weights, copies)
        parts = {"optimizer": updater.optimizer.state_dict(), "schedule": updater.schedule.state_dict()}
        self.optimizer = to_host(parts, copies)
        self.reference = to_host(moved_reference(trainer), {})
        self.rng = rng_state()
        self.state = json.dumps(trainer_state(trainer), indent=2)  # text already: later steps cannot change it

    def write(self, path):
        """Into an empty folder. Runs in the thread that writes checkpoints."""
        logging.disable_progress_bar()  # that of transformers would tear the run's own
        save_model(path, self.model, self.tokenizer, self.weights)
        torch.save(self.optimizer, path / "optimizer.pt")
        torch.save(self.rng, path / "rng.pt")
        if self.reference is not None:
            torch.save(self.reference, path / "reference.pt")
        (path / "trainer_state.json").write_text(self.state + "\n")


def moved_reference(trainer):
    """The reference's weights where it follows the policy (--sync_ref_model), or None."""
    return trainer.update.reference.model.state_dict() if trainer.args.sync_ref_model else None


def measured(reference):
    """Whether a quantized reference has been compared with the exact one; true where there is nothing to compare."""
    return reference is None or reference.exact is None


def to_host(tree, copies):
    """Nested dicts and lists with every tensor copied to the CPU; one that occurs twice (tied weights) stays one.

    copies: {} to share among several calls.
    """
    if isinstance(tree, torch.Tensor):
        key = (tree.device, tree.data_ptr(), tree.dtype, tree.shape, tree.stride())
        if key not in copies:
            copies[key] = tree.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(tree, dict):
        return {name: to_host(value, copies) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(to_host(value, copies) for value in tree)
    return tree


def trainer_state(trainer):
    """What goes into trainer_state.json."""
    return {
        "global_step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "epoch": trainer.state.epoch,
        "num_tokens": trainer.num_tokens,
        "evaluated_at": trainer.evaluated_at,
        "accuracy_before": trainer.accuracy_before,
        "accuracy_after": trainer.accuracy_after,
        "rows": len(trainer.source),
        "source": trainer.source.state_dict(),
        "checkpoints": trainer.checkpoints.state_dict(),
        "log": trainer.log.state_dict(),
        "watch": trainer.watch.state_dict(),
        "reference_measured": measured(trainer.update.reference),
        "dtype": str(trainer.model.dtype),
        "config": dataclasses.asdict(trainer.args),
    }


def restore(trainer, path):
    """Put a new trainer where the one was that wrote the checkpoint; its generators come last.

    Raises:
        ValueError: the data, the number of steps or the precision is not what the run had.
    """
    state = json.loads((path / "trainer_state.json").read_text())
    if state["rows"] != len(trainer.source):
        raise ValueError(f"{path} was trained on {state['rows']} rows, the data now has {len(trainer.source)}")
    if state["global_step"] > trainer.state.max_steps:
        raise ValueError(f"{path} is past max_steps={trainer.state.max_steps}; raise it")
    if state["dtype"] != str(trainer.model.dtype):
        before, now = (name.removeprefix("torch.") for name in (state["dtype"], str(trainer.model.dtype)))
        raise ValueError(f"{path} was trained in {before}, the policy is {now} now; go on with --dtype {before}")
    load_weights(trainer.model, path)
    if trainer.args.sync_ref_model:
        weights = torch.load(path / "reference.pt", map_location="cpu", weights_only=True)
        trainer.update.reference.model.load_state_dict(weights)
    if state["reference_measured"] and not measured(trainer.update.reference):
        trainer.update.reference.exact = None
    updater = trainer.update.updater
    parts = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    updater.optimizer.load_state_dict(parts["optimizer"])
    updater.schedule.load_state_dict(parts["schedule"])
    trainer.state.global_step, trainer.state.epoch = state["global_step"], state["epoch"]
    for name in ("num_tokens", "evaluated_at", "accuracy_before", "accuracy_after"):
        setattr(trainer, name, state[name])
    trainer.source.load_state_dict(state["source"])
    trainer.checkpoints.load_state_dict(state["checkpoints"])
    trainer.log.load_state_dict(state["log"])
    trainer.watch.load_state_dict(state["watch"])
    set_rng_state(torch.load(path / "rng.pt", map_location="cpu", weights_only=True))


def load_weights(model, path):
    """Copy the weights of a checkpoint into a model: the storage that rollouts and the optimizer use stays."""
    if has_adapters(model):
        load_adapters(model, path)
        return
    model.load_state_dict(type(model).from_pretrained(path, dtype=model.dtype).state_dict())


def rng_state():
    """The global generators. Rollouts draw from seeds of their own; reward functions may use these."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        state["numpy"] = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state):
    """Undo `rng_state`. A GPU that was not there then, or is not any more, is left alone."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
