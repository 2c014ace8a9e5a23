"""The end of a run: its summary, the merged model, the picture and the upload."""

import time

from fastgrpo.policy.lora import merged
from fastgrpo.run.card import model_card
from fastgrpo.run.checkpoint import save_model
from fastgrpo.run.curves import conclude
from fastgrpo.run.metrics import Summary, last_training, mean_loss
from fastgrpo.run.profiling import peak_gib


class Finishing:
    """The end of a `Trainer`, which has the policy, the tokenizer, the log and the callbacks."""

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
            "peak_memory_gib": max(self.ranks.gather(peak_gib(history), "the peak of the memory")),
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
            rows = conclude(self.log.folder, summary, self.checkpoints.newest, self.log.say, self.panels)
            self.log.terminal.table(rows)
            self.log.terminal.last(f"run folder {self.log.dir}")
        if self.args.push_to_hub:
            self.push_to_hub()
        return result
