"""Outputs of a run besides log and checkpoints: models, cards, metrics and the summary.

Functions with the name of a method of transformers.Trainer are also methods of GRPOTrainer.
"""

import contextlib
import json
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastgrpo.policy.lora import merged
from fastgrpo.run.card import model_card, on_hub
from fastgrpo.run.checkpoint import save_model as write_model
from fastgrpo.run.curves import conclude
from fastgrpo.run.metrics import Summary, last_training, mean_loss
from fastgrpo.run.profiling import peak_gib
from fastgrpo.run.snapshot import HostCopies

# Files that an upload of adapters, of a whole model, or of fewer shards would otherwise leave in the repository.
STALE = [
    "model*.safetensors", "model.safetensors.index.json", "adapter_model*.safetensors", "adapter_config.json",
    "config.json",
]  # fmt: skip


def card_of(trainer: Any, adapters: bool) -> str:
    """Write the model card of saved adapters or of a whole model."""
    base, rows, name = trainer.policy.module.name_or_path, len(trainer.source), trainer.log.dir.name
    rewards = trainer.rewards.names if trainer.rewards else ()
    return model_card(
        trainer.args, trainer.state, name=name, base=base, rows=rows, rewards=rewards, adapters=adapters,
        inputs=trainer.inputs,
    )  # fmt: skip


def finish(trainer: Any) -> Summary:
    """Write the files of a finished run, and return its summary."""
    state, history = trainer.state, trainer.log.history
    seconds = round(time.perf_counter() - trainer.log.started, 2)
    summary = {
        "accuracy_before": state.accuracy_before,
        "accuracy_after": state.accuracy_after,
        "steps": state.global_step,
        "wall_seconds": seconds,
        "num_tokens": state.num_tokens,
        "peak_memory_gib": max(trainer.ranks.gather(peak_gib(history), "the peak of the memory")),
    }
    metrics = {
        "train_runtime": seconds,
        "train_steps_per_second": round(state.global_step / max(seconds, 0.01), 3),
        "train_loss": mean_loss(history),
        "epoch": state.epoch,
    }
    history.append({**last_training(history), **metrics, "step": state.global_step})
    trainer.callbacks.call("on_log", logs=history[-1])
    trainer.callbacks.call("on_train_end")
    if trainer.args.use_peft:
        _save_merged(trainer, trainer.log.folder.claim("merged"))
    if trainer.ranks.lead:
        rows = conclude(trainer.log.folder, summary, trainer.checkpoints.newest, trainer.log.say, trainer.panels)
        trainer.log.terminal.table(rows)
        trainer.log.terminal.last(f"run folder {trainer.log.dir}")
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    return Summary(summary, metrics)


def _save_merged(trainer, path):
    """Write the model with its adapters merged. All ranks must call this together."""
    with trainer.policy.gather():
        if trainer.ranks.lead:
            whole, card = merged(trainer.policy.for_rollouts.module), card_of(trainer, adapters=False)
            write_model(path, whole, trainer.tokenizer, card=card)


def save_model(trainer: Any, output_dir: str | Path | None = None) -> None:
    """Write the tokenizer and the model, or only its adapters, in the format of transformers.

    Rank 0 writes. With parallel=fsdp2 all ranks must call this together, to gather the model.
    """
    trainer.open()
    path = Path(output_dir or trainer.log.dir)
    if trainer.policy.lockstep:
        trainer.checkpoints.wait()  # a checkpoint in progress reads the host copies that are gathered again here
    whole = trainer.policy.full_state_dict() if trainer.policy.lockstep else None
    if trainer.ranks.lead:
        inside = path.resolve() in (trainer.log.dir.resolve(), trainer.log.dir.resolve() / "final")
        card = card_of(trainer, adapters=trainer.args.use_peft)
        copies = HostCopies()  # on the host, where save_pretrained recognizes tied weights
        states = whole or copies.take(trainer.policy.state_dict())
        copies.wait()
        with _claimed(trainer, "final") if inside else nullcontext(path) as path:
            write_model(path, trainer.policy.module, trainer.tokenizer, states, card)
        if inside:
            trainer.log.say(f"the model is saved in {path}")


def push_to_hub(
    trainer: Any,
    commit_message: str = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    **card: Any,
) -> Any:
    """Upload the model, its tokenizer and its card to the hub. All ranks must call this together.

    Adapters are merged if their base model is not on the hub. The upload always blocks, and the fields of transformers'
    own `card` are not used.
    """
    from huggingface_hub import HfApi

    trainer.open()
    with TemporaryDirectory() as folder:
        if trainer.args.use_peft and not on_hub(trainer.policy.module.name_or_path, trainer.inputs):
            _save_merged(trainer, Path(folder))
        else:
            trainer.save_model(folder)
        if not trainer.ranks.lead:
            return None
        api, name = HfApi(token=token), trainer.args.hub_model_id or repository_name(trainer.log.dir.name)
        repo = api.create_repo(name, private=trainer.args.hub_private_repo, exist_ok=True).repo_id
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return api.upload_folder(
            folder_path=folder, repo_id=repo, commit_message=commit_message, revision=revision,
            delete_patterns=STALE,
        )  # fmt: skip


def repository_name(folder: str) -> str:
    """Turn the name of a folder into a name that the hub allows."""
    words = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.]+", "-", folder))[:90].removesuffix(".git")
    return words.strip("-.") or "model"


def log_metrics(trainer: Any, split: str, metrics: Mapping[str, Any]) -> None:
    """Print metrics as a table."""
    trainer.open()
    if trainer.ranks.lead:
        width = max(map(len, metrics), default=0)
        lines = [f"  {name:{width}} = {value}" for name, value in sorted(metrics.items())]
        trainer.log.say("\n".join([f"***** {split} metrics *****", *lines]))


def save_metrics(trainer: Any, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
    """Write metrics to SPLIT_results.json in the run folder, and merge them into all_results.json if `combined`."""
    trainer.open()
    files = [f"{split}_results.json", *(["all_results.json"] if combined else [])]
    for file in files if trainer.ranks.lead else ():
        with _claimed(trainer, file) as path:
            before = json.loads(path.read_text()) if path.exists() and file.startswith("all") else {}
            path.write_text(json.dumps({**before, **metrics}, indent=2, sort_keys=True) + "\n")


def save_state(trainer: Any) -> None:
    """Write trainer_state.json, with the log, to the run folder."""
    trainer.open()
    if trainer.ranks.lead:
        state = {**trainer.state.state_dict(), "log_history": trainer.state.log_history}
        with _claimed(trainer, "trainer_state.json") as path:
            path.write_text(json.dumps(state, indent=2) + "\n")


@contextlib.contextmanager
def _claimed(trainer, name):
    """Lock the run folder, which is released when the run ends, and claim a name in it."""
    with trainer.log.folder.held_for():
        trainer.written = True
        yield trainer.log.folder.claim(name)
