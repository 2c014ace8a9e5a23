"""The training loop that all trainers share: steps, evaluations, checkpoints, and the files of a finished run."""

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.data.records import Stateful, Step, TrainerState
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.data.sources import Source, as_source
from fastgrpo.evaluation.heldout import evaluate, progress_bar
from fastgrpo.policy.fit import check_rows
from fastgrpo.policy.load import stop_token_ids
from fastgrpo.policy.lora import merged
from fastgrpo.ranks import join
from fastgrpo.rewards.call import Rewards
from fastgrpo.rollout import make_backend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.card import model_card
from fastgrpo.run.checkpoint import save_model
from fastgrpo.run.checkpointer import Checkpointer
from fastgrpo.run.curves import Panel, conclude, table
from fastgrpo.run.digest import digest_of_rows, refuse_differences
from fastgrpo.run.followed import open_log
from fastgrpo.run.health import Watch
from fastgrpo.run.host_copies import HostCopies
from fastgrpo.run.inputs import inputs_of
from fastgrpo.run.log import RunLog
from fastgrpo.run.profiling import Profiler, StageTimer, needed_steps, peak_flops
from fastgrpo.run.resume import set_aside
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.snapshot import GlobalRNG, Snapshot, restore
from fastgrpo.step.measure import rates
from fastgrpo.step.optim import MasterAdamW, make_schedule
from fastgrpo.step.update import Updater
from fastgrpo.trainer.policy import make_policy


class Trainer(ABC):
    """Trains a causal LM step by step, evaluates and saves it. A subclass says what one step is.

    Args:
        model: A folder, hub id or GGUF file, or a transformers causal LM, which is trained in place.
        reward_funcs: A reward function or a list of them, see `Rewards`.
        args: The settings; None for the defaults.
        train_dataset: Training rows, or a `Source` of them.
        eval_dataset: Held-out rows, or None.
        processing_class: The tokenizer; None loads the model's.
        log: A `RunLog` that has claimed its folder already. None makes one from args.
        panels: What the picture of the run shows.

    Raises:
        ValueError: An argument or a setting cannot be used; the message names it and the remedy.
    """

    config_class: ClassVar[type[TrainingConfig]]
    title: ClassVar[str]  # in front of the progress bar
    shown: ClassVar[dict[str, str]]  # what the progress bar shows: a short name -> the metric
    needed_rows: ClassVar[str] = "rows with a `prompt` column"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Callable | Sequence[Callable],
        args: TrainingConfig | None,
        train_dataset: Source | Iterable[dict] | None,
        eval_dataset: Iterable[dict] | None,
        processing_class: PreTrainedTokenizerBase | None,
        log: RunLog | None,
        panels: Sequence[Panel],
    ):
        self.args = args = self._checked(args, processing_class)
        self.ranks = join(args.device, args.ddp_timeout)
        if train_dataset is None:
            raise ValueError(f"train_dataset is needed: {self.needed_rows}")
        self.source = as_source(train_dataset, seed=args.seed, shuffle=args.shuffle_dataset, needed=self._most_rows())
        train_rows = as_rows(self.source.rows, "train_dataset.rows")
        self.eval_rows = None
        if eval_dataset is not None:
            count = args.max_eval_samples
            self.eval_rows = as_rows(eval_dataset, "eval_dataset", count, "max_eval_samples").head(count)
        self.rewards = self._make_rewards(reward_funcs)
        made = make_policy(model, processing_class, args, self.ranks)
        self.policy, self.tokenizer, self.plan = made.policy, made.tokenizer, made.plan
        self.digests = {"model": made.digest}
        self._check_rows(train_rows)
        self.digests["data"] = digest_of_rows(train_rows)
        if self.ranks.size > 1:
            rows = self.digests["data"], len(self.source)
            refuse_differences(self.ranks, training_rows=rows, held_out_rows=digest_of_rows(self.eval_rows or ()))
        self.state = TrainerState(0, self._count_steps(), 0.0, args.max_completion_length)
        self.timer = StageTimer(self.policy.device, peak_flops(self.policy.device, self.policy.dtype))
        self.sampling = SamplingParams(
            max_tokens=args.max_completion_length, stop_token_ids=stop_token_ids(self.policy, self.tokenizer)
        )
        self.optimizer = MasterAdamW(
            self.model,
            learning_rate=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.schedule = make_schedule(
            self.optimizer,
            args.lr_scheduler_type,
            warmup_steps=args.warmup_steps,
            total_steps=self.state.max_steps * args.updates_per_step,
            further=args.schedule_kwargs,
        )
        self.updater = Updater(
            self.policy,
            self.optimizer,
            self.schedule,
            max_grad_norm=args.max_grad_norm,
            max_tokens=args.max_tokens_per_microbatch,
            share_prompt=args.share_prompt,
            timer=self.timer,
            ranks=self.ranks,
        )
        judged = self.rewards is not None  # without rewards nothing is drawn
        self.engine = make_backend(self.policy.for_rollouts, args, self._to_come) if judged else None
        self._prepare()
        functions = self.rewards.functions if judged else []
        self.log = log or open_log(args, inputs_of(args, functions, model, (train_rows, self.eval_rows)), self.ranks)
        self.checkpoints = Checkpointer(args, self.log, self.ranks)
        self.copies = HostCopies()
        self.optimizer.adamw.register_step_pre_hook(self.copies.before_update)
        self.watch = Watch(args, self.checkpoints)
        self.profiler = Profiler(args.profile if self.ranks.lead else 0, self.log.folder, self.log.say)
        self.panels = panels
        if self.plan and math.isfinite(self.plan.room):
            self.log.say(f"memory of this run\n{table(self.plan.rows())}")
        if self.ranks.size > 1:
            self.log.say(f"{self.ranks.size} processes share the run by {made.parallel} ({made.why})")

    def _to_come(self):
        """Count the bytes that an update will take beyond those that are taken now."""
        return self.optimizer.bytes_to_come(self.policy.device) + (self.plan.passing if self.plan else 0)

    def _checked(self, args, tokenizer):
        """Return the settings, or refuse settings and a tokenizer of another kind."""
        kind = self.config_class
        args = kind() if args is None else args
        if not isinstance(args, kind):
            remedy = f"{kind.__name__}(**args)" if isinstance(args, dict) else f"a fastgrpo.{kind.__name__}"
            raise ValueError(f"args is of type {type(args).__name__}; pass {remedy}")
        lacking = [name for name in ("vocab_size", "eos_token_id", "decode") if not hasattr(tokenizer, name)]
        if tokenizer is not None and lacking:
            remedy = "its .tokenizer" if hasattr(tokenizer, "tokenizer") else "a tokenizer of transformers"
            raise ValueError(f"processing_class is of type {type(tokenizer).__name__}; pass {remedy}")
        return args

    def _make_rewards(self, reward_funcs) -> Rewards | None:
        """Make the reward functions; None where nothing is judged."""
        return Rewards(reward_funcs, on_error=self.args.reward_errors)

    def _check_rows(self, train_rows: Rows) -> None:
        """Refuse rows that a later step or evaluation could not use."""
        for rows in (train_rows, self.eval_rows or ()):
            limit, template_kwargs = self.args.max_completion_length, self.args.template_kwargs
            check_rows(rows, self.tokenizer, self.policy, limit, self._shows_bars, template_kwargs)

    @property
    def _shows_bars(self):
        """Whether this rank shows progress bars."""
        return self.ranks.lead and not self.args.disable_tqdm

    def _most_rows(self) -> int | None:
        """Return the most rows that a run of max_steps can draw; None where its steps follow from the rows."""
        return self.args.max_steps * self.args.rows_per_step if self.args.max_steps > 0 else None

    @abstractmethod
    def _prepare(self) -> None:
        """Make what only this kind of training needs, after the policy, its optimizer and the engine."""

    @abstractmethod
    def _step(self, step: int, logged: bool) -> Step:
        """Make one step.

        Args:
            step: The number of the step, from 1.
            logged: Whether a line of metrics.jsonl ends with this step.

        Returns:
            What the step did.
        """

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model inside of the policy."""
        return self.policy.module

    def _count_steps(self):
        """Count the steps of the run. Raises ValueError where they are too few to be profiled."""
        args, steps = self.args, self.args.max_steps
        if steps < 0:
            steps = math.ceil(args.num_train_epochs * len(self.source) / args.rows_per_step)
        needed = needed_steps(args.profile)
        if args.profile and needed > steps:
            raise ValueError(
                f"profile={args.profile} needs a run of at least {needed} steps (warm-up, timed, traced), "
                f"and this one has {steps}; raise max_steps or lower profile"
            )
        return steps

    def parts(self) -> dict[str, Stateful]:
        """Return the parts of the run that have state, by the names that a checkpoint gives them."""
        return {
            "policy": self.policy,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "progress": self.state,
            "source": self.source,
            "checkpoints": self.checkpoints,
            "log": self.log,
            "watch": self.watch,
            "rng": GlobalRNG(),
        }

    def about(self) -> dict[str, Any]:
        """Return what a resumed run is compared with: the data, the model, the settings and choices, the command."""
        return {
            "command": self.args.command,
            "rows": len(self.source),
            "data_digest": self.digests["data"],
            "model_digest": self.digests["model"],
            "dtype": str(self.policy.dtype),
            "gradient_checkpointing": self.model.is_gradient_checkpointing,
            "config": dataclasses.asdict(self.args),
        }

    def train(self) -> dict[str, Any]:
        """Train until the end, starting from the checkpoint that the log found, if it found one.

        The first SIGINT or SIGTERM lets the step end and saves. A second one ends the process at once.

        Returns:
            The summary, which is also written to summary.json.

        Raises:
            ValueError: A checkpoint could not be read or written, or the run has ended already.
            KeyboardInterrupt: The run was stopped by SIGINT, after everything was saved.
            SystemExit: The run was stopped after everything was saved: by SIGTERM, with the exit code 143, or because
                nobody reads the output any more, with 141.
        """
        with StopSignals(self.ranks) as stop, self.log:
            with self.checkpoints, self.ranks.failing():
                stopped_after = self._run(stop)
            if stopped_after is None:
                self.log.close_bar()
                return self._finish()
        how = f"--resume_from_checkpoint auto --output_dir {self.log.dir}"
        self.log.say(f"stopped after step {stopped_after}; continue with {how}")
        # The first rank that leaves makes torchrun end the others, which may be writing still.
        self.ranks.meet("the end of the others")
        stop.leave()

    def _run(self, stop):
        """Make the steps that are left. Return None at the end of the run, or the step after which it was stopped."""
        log = self.log
        if log.checkpoint is None:
            set_seed((self.args.seed + self.ranks.rank) % 2**32)  # reward functions may draw from these generators
        else:
            restore(self.parts(), log.checkpoint, self.about(), log.say, self.ranks)
            if self.ranks.lead:
                set_aside(log.folder, self.state.global_step, log.say)
        while True:
            self.checkpoints.check()
            if not self._stopping(stop):
                self._evaluate_if_due()
            step, stopping = self.state.global_step, self._stopping(stop)
            last = step == self.state.max_steps
            if stopping or self.checkpoints.due(step, last):
                self.checkpoints.save(step, self._snapshot)
            if stopping or last:
                return step if stopping else None
            if log.bar is None:
                log.progress(self.state.max_steps, self.title, done=step)
            values = self.step()
            log.step(step + 1, values, last=step + 1 == self.state.max_steps)
            log.advance(**{short: values[name] for short, name in self.shown.items() if name in values})

    def _stopping(self, stop):
        """Whether the run shall stop: one rank's signal stops all of them after the same step."""
        return stop.agree(f"the decision whether to stop after step {self.state.global_step}")

    def _snapshot(self):
        card = self._card(adapters=self.args.use_peft)
        return Snapshot(self.parts(), self.tokenizer, self.about(), self.copies, self.checkpoints.ranks, card)

    def _card(self, adapters):
        model, rows, rewards = self.model.name_or_path, len(self.source), self.rewards.names if self.rewards else ()
        name = self.log.dir.name
        return model_card(self.args, self.state, name=name, base=model, rows=rows, rewards=rewards, adapters=adapters)

    def step(self) -> dict[str, float]:
        """Make one step, from rows to updated weights.

        Returns:
            Its metrics by name.

        Raises:
            ValueError: The run has ended.
        """
        self.log.folder.check()
        step = self.state.global_step + 1
        logged = self.args.logs(step) or step == self.state.max_steps
        started, state = time.perf_counter(), self.state
        self.timer.start()
        with self.ranks.waiting(f"step {step}"):
            done = self._step(step, logged)
        state.global_step = step
        state.num_tokens += done.all_tokens
        rows = round(state.epoch * len(self.source)) + done.rows  # in whole rows, so that no rounding adds up
        state.epoch = rows / len(self.source)
        for warning in self.watch.observe(done.values, done.norms):
            self.log.say(f"step {step}: {warning}")
        values = done.values | self.timer.stop() | {"num_tokens": state.num_tokens}
        if "memory/peak_gib" in values:
            values["memory/peak_gib"] = max(self.ranks.gather(values["memory/peak_gib"], "the peak of the memory"))
        values |= rates(done.tokens, values["time/rollout"], time.perf_counter() - started)
        self.profiler.step(values, left=state.max_steps - step)
        return values

    def evaluate(self) -> dict[str, float] | None:
        """Measure the held-out rows, and log what was measured, unless the run has ended.

        Returns:
            The metrics by name, or None without held-out rows.
        """
        if not self.eval_rows:
            if self.state.global_step == 0:
                self.log.say("no held-out rows: accuracy is not measured")
            return None
        draws = self.args.eval_num_generations
        sampling = dataclasses.replace(
            self.sampling,
            temperature=self.args.eval_temperature,
            top_p=self.args.eval_top_p,
            top_k=self.args.eval_top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            seed=self.args.seed,
        )
        where = f"the evaluation after step {self.state.global_step}"
        with progress_bar("evaluate", shown=self._shows_bars) as bar, self.ranks.waiting(where):
            result = evaluate(
                self.engine, self.tokenizer, self.eval_rows, self.rewards, sampling, self.state, bar.update, draws,
                self.ranks, self.args.template_kwargs,
            )  # fmt: skip
        if self.log.folder.held:
            self.log.write(self.state.global_step, result.metrics())
        self.log.say(f"step {self.state.global_step}: held-out {result.summary()}")
        return result.values

    def _evaluate_if_due(self):
        """Evaluate at the start (with eval_on_start), at the end, and every eval_steps steps, once each.

        A run that was stopped just before an evaluation makes it after it is resumed.
        """
        state, every = self.state, self.args.eval_steps
        step = state.global_step
        due = step % every == 0 if step and every else step == 0 and self.args.eval_on_start
        due = due or step == state.max_steps
        if due and state.evaluated_at != step:
            values = self.evaluate()
            state.evaluated_at = step
            if values is not None and "eval/accuracy" in values:
                state.accuracy_after = values["eval/accuracy"]
                state.accuracy_before = state.accuracy_after if step == 0 else state.accuracy_before

    def _finish(self):
        """Write the files that a finished run leaves, and return its summary."""
        state = self.state
        summary = {
            "accuracy_before": state.accuracy_before,
            "accuracy_after": state.accuracy_after,
            "steps": state.global_step,
            "wall_seconds": round(time.perf_counter() - self.log.started, 2),
            "num_tokens": state.num_tokens,
        }
        if self.args.use_peft:
            with self.policy.gather():  # which all ranks open together
                if self.ranks.lead:
                    whole = merged(self.policy.for_rollouts.module)
                    path, card = self.log.folder.claim("merged"), self._card(adapters=False)
                    save_model(path, whole, self.tokenizer, card=card)
        if not self.ranks.lead:
            return summary
        left = conclude(self.log.folder, summary, self.checkpoints.newest, self.log.say, self.panels)
        self.log.say("\n" + left)
        return summary
