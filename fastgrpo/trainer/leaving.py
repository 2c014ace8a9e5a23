"""The methods of transformers' Trainer by which a script writes, uploads and prints what a trainer has."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback

from fastgrpo.run.checkpoint import save_model


class Leaving:
    """What scripts tell a `Trainer`, which has the policy, the tokenizer, the log and the callbacks."""

    left = False  # whether a script has written something of its own into the folder of the run

    def is_world_process_zero(self) -> bool:
        """Tell whether this process is rank 0, which alone writes and speaks."""
        return self.ranks.lead

    def is_local_process_zero(self) -> bool:
        """Tell whether this process speaks on its machine: rank 0 alone does."""
        return self.ranks.lead

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback of transformers."""
        self.callbacks.add(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback."""
        self.callbacks.handler.remove_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback and return it."""
        return self.callbacks.handler.pop_callback(callback)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model, with adapters these alone, and the tokenizer in the format of transformers.

        Rank 0 writes, and may call this alone once the run has begun. Where the ranks hold shards of the model
        (parallel=fsdp2), all of them call this together, since they gather it.
        """
        self.open()
        path = Path(output_dir or self.log.dir)
        whole = self.policy.full_state_dict() if self.policy.lockstep else None
        if self.ranks.lead:
            card, states = self._card(adapters=self.args.use_peft), whole or self.policy.state_dict()
            if path.resolve() == self.log.dir.resolve():
                with self._claimed("final") as path:
                    save_model(path, self.policy.module, self.tokenizer, states, card)
                self.log.say(f"the model is saved in {path}")
            else:
                save_model(path, self.policy.module, self.tokenizer, states, card)

    def push_to_hub(self, commit_message: str = "End of training", **settings: Any) -> Any:
        """Upload the model, its tokenizer and its card to the hub, by huggingface_hub. All ranks call this together."""
        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self.save_model(folder)
            if not self.ranks.lead:
                return None
            api, name = HfApi(), self.args.hub_model_id or self.log.dir.name
            repo = api.create_repo(name, private=self.args.hub_private_repo, exist_ok=True).repo_id
            return api.upload_folder(folder_path=folder, repo_id=repo, commit_message=commit_message)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as a table."""
        self.open()
        if self.ranks.lead:
            width = max(map(len, metrics), default=0)
            lines = [f"  {name:{width}} = {value}" for name, value in sorted(metrics.items())]
            self.log.say("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to SPLIT_results.json in the folder of the run."""
        self.open()
        if not self.ranks.lead:
            return
        files = [f"{split}_results.json", *(["all_results.json"] if combined else [])]
        for file in files:
            with self._claimed(file) as path:
                before = json.loads(path.read_text()) if path.exists() and file.startswith("all") else {}
                path.write_text(json.dumps({**before, **metrics}, indent=2, sort_keys=True) + "\n")

    def save_state(self) -> None:
        """Write trainer_state.json, with the log, to the folder of the run."""
        self.open()
        if self.ranks.lead:
            state = {**self.state.state_dict(), "log_history": self.state.log_history}
            with self._claimed("trainer_state.json") as path:
                path.write_text(json.dumps(state, indent=2) + "\n")

    @contextlib.contextmanager
    def _claimed(self, name) -> Iterator[Path]:
        """Hold the folder of the run, which an ended run has released, and claim a name in it."""
        with self.log.folder.held_for():
            self.left = True
            yield self.log.folder.claim(name)
