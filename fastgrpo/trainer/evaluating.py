"""What every trainer measures on held-out rows, and when."""

import dataclasses
from typing import Any, ClassVar

from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.run.metrics import evaluated
from fastgrpo.trainer.held_out import prefixes, read_held_out, renamed


class Evaluating:
    """The evaluations of a `Trainer`, which has the policy, the rewards, the log and the held-out rows."""

    unmeasured: ClassVar[str] = (
        "no held-out rows: accuracy is not measured; a folder with train.jsonl and test.jsonl has some"
    )

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float] | None:
        """Measure held-out rows, and log what was measured, unless the run has ended."""
        self.open()
        given = eval_dataset is not None
        held_out = read_held_out(eval_dataset, self.args.max_eval_samples) if given else self.held_out
        values = {}
        for prefix, rows in zip(prefixes(held_out, metric_key_prefix), held_out.values(), strict=True):
            measured = self._measure(rows, prefix)
            if measured:
                named = evaluated(measured, prefix) | {"epoch": self.state.epoch}
                values |= measured | named
                self.callbacks.call("on_evaluate", metrics=named)
        if not values and self.state.global_step == 0:
            self.log.say(self.unmeasured)
        return values or None

    def _measure(self, rows, prefix, further=()):
        """Complete and judge held-out rows, and log this with `further` metrics. Return the metrics by name."""
        if not rows:
            return {}
        draws = self.args.eval_num_generations
        sampling = dataclasses.replace(
            self.sampling,
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            top_k=self.args.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            seed=self.args.seed,
        )
        where = f"the evaluation after step {self.state.global_step}"
        with self.log.terminal.share("evaluate") as progress, self.ranks.waiting(where):
            result = evaluate(
                self.engine, self.tokenizer, rows, self.rewards, sampling, self.state, progress, draws, self.ranks,
                self.args.template_kwargs,
            )  # fmt: skip
        told = result.summary()
        result = renamed(result, prefix)
        self._write(dict(further) | result.metrics())
        name = "" if prefix == "eval" else f" of {prefix}"
        self.log.say(f"step {self.state.global_step}: held-out{name} {told}")
        return dict(further) | result.values

    def _write(self, values):
        """Log what was measured on held-out rows, unless the run has ended."""
        if self.log.folder.held:
            line = self.log.write(self.state.global_step, values | {"epoch": self.state.epoch})
            self.callbacks.call("on_log", logs=line)

    def _evaluate_if_due(self):
        """Evaluate at the start (with eval_on_start), at the end, every eval_steps steps, and where a callback asks.

        A run that was stopped just before an evaluation makes it after it is resumed.
        """
        state, every, control = self.state, self.args.eval_steps, self._control()
        step = state.global_step
        due = step % every == 0 if step and every else step == 0 and self.args.eval_on_start
        due = due or step == state.max_steps or control.should_evaluate or control.should_training_stop
        if due and state.evaluated_at != step:
            values = self.evaluate()
            state.evaluated_at = step
            if values is None:
                return
            self.callbacks.note_best(values)
            self.callbacks.agree(f"what the callbacks want after the evaluation of step {step}")
            first = prefixes(self.held_out, "eval")[0]
            if f"{first}/accuracy" in values:
                state.accuracy_after = values[f"{first}/accuracy"]
                state.accuracy_before = state.accuracy_after if step == 0 else state.accuracy_before
