"""What a trainer leaves behind at the end of a run, and what it writes when it is told to."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback

from fastgrpo.policy.lora import merged
from fastgrpo.run.card import model_card
from fastgrpo.run.checkpoint import save_model
from fastgrpo.run.curves import conclude
from fastgrpo.run.history import Summary, last_training, mean_loss


class Leaving:
    """The end of a `Trainer`, which has the policy, the tokenizer, the log and the callbacks."""

    def is_world_process_zero(self) -> bool:
        """Tell whether this process is rank 0, which alone writes and speaks."""
        return self.ranks.lead

    def is_local_process_zero(self) -> bool:
        """Tell whether this process speaks on its machine: rank 0 alone does."""
        return self.ranks.lead

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback of transformers.

        Args:
            callback: An instance or a class.

        Raises:
            ValueError: It is no callback.
        """
        self.callbacks.add(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback.

        Args:
            callback: The instance, or the class of the first one to go.
        """
        self.callbacks.handler.remove_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback and return it.

        Args:
            callback: The instance, or the class of the first one to go.

        Returns:
            The callback; None where there was none.
        """
        return self.callbacks.handler.pop_callback(callback)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model, with adapters these alone, and the tokenizer in the format of transformers.

        All ranks call this together, and rank 0 writes.

        Args:
            output_dir: The folder. For None and for the folder of the run, whose config.json has the run's settings, it
                is final/ in that folder.
        """
        self.open()
        path = Path(output_dir or self.log.dir)
        whole = self.policy.full_state_dict() if self.policy.lockstep else None
        if self.ranks.lead:
            if path.resolve() == self.log.dir.resolve():
                path = self.log.folder.claim("final")
                self.log.say(f"the model is saved in {path}")
            card = self._card(adapters=self.args.use_peft)
            save_model(path, self.policy.module, self.tokenizer, whole or self.policy.state_dict(), card)
        self.ranks.meet("the end of saving the model")

    def push_to_hub(self, commit_message: str = "End of training", **settings: Any) -> Any:
        """Upload the model, its tokenizer and its card to the hub, by huggingface_hub. All ranks call this together.

        Args:
            commit_message: The message of the commit.
            settings: What TRL's scripts say for its model card; it is not used, since the card is made from the run.

        Returns:
            What `HfApi.upload_folder` returns, on rank 0; None on the others.
        """
        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self.save_model(folder)
            if not self.ranks.lead:
                return None
            api, name = HfApi(), self.args.hub_model_id or self.log.dir.name
            repo = api.create_repo(name, private=self.args.hub_private_repo, exist_ok=True).repo_id
            return api.upload_folder(folder_path=folder, repo_id=repo, commit_message=commit_message)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as a table.

        Args:
            split: What they were measured on: train, eval or any other name.
            metrics: The metrics by name.
        """
        self.open()
        if self.ranks.lead:
            width = max(map(len, metrics), default=0)
            lines = [f"  {name:{width}} = {value}" for name, value in sorted(metrics.items())]
            self.log.say("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to SPLIT_results.json in the folder of the run.

        Args:
            split: What they were measured on: train, eval or test.
            metrics: The metrics by name.
            combined: Whether all_results.json gets them too.
        """
        self.open()
        if not self.ranks.lead:
            return
        files = [f"{split}_results.json", *(["all_results.json"] if combined else [])]
        for file in files:
            path = self.log.folder.claim(file)
            before = json.loads(path.read_text()) if path.exists() and file.startswith("all") else {}
            path.write_text(json.dumps({**before, **metrics}, indent=2, sort_keys=True) + "\n")

    def save_state(self) -> None:
        """Write trainer_state.json, with the log, to the folder of the run."""
        self.open()
        if self.ranks.lead:
            state = {**self.state.state_dict(), "log_history": self.state.log_history}
            self.log.folder.claim("trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")

    def _card(self, adapters):
        """Write the model card of what is saved now: of adapters, or of a whole model."""
        base, rows, name = self.policy.module.name_or_path, len(self.source), self.log.dir.name
        rewards = self.rewards.names if self.rewards else ()
        return model_card(
            self.args, self.state, name=name, base=base, rows=rows, rewards=rewards, adapters=adapters,
            inputs=self.inputs,
        )  # fmt: skip

    def _finish(self):
        """Write the files that a finished run leaves, and return its summary."""
        state, history = self.state, self.log.history
        seconds = round(time.perf_counter() - self.log.started, 2)
        summary = {
            "accuracy_before": state.accuracy_before,
            "accuracy_after": state.accuracy_after,
            "steps": state.global_step,
            "wall_seconds": seconds,
            "num_tokens": state.num_tokens,
        }
        metrics = {
            "train_runtime": seconds,
            "train_steps_per_second": round(state.global_step / max(seconds, 0.01), 3),
            "train_loss": mean_loss(history),
            "epoch": state.epoch,
        }
        history.append({**last_training(history), **metrics, "step": state.global_step})
        self.callbacks.call("on_log", logs=history[-1])
        self.callbacks.call("on_train_end")
        result = Summary(summary, metrics)
        if self.args.use_peft:
            with self.policy.gather():  # which all ranks open together
                if self.ranks.lead:
                    whole = merged(self.policy.for_rollouts.module)
                    card = self._card(adapters=False)
                    save_model(self.log.folder.claim("merged"), whole, self.tokenizer, card=card)
        if self.ranks.lead:
            left = conclude(self.log.folder, summary, self.checkpoints.newest, self.log.say, self.panels)
            self.log.say("\n" + left)
        if self.args.push_to_hub:
            self.push_to_hub()
        return result
