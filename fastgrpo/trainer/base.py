"""The training loop that all trainers share: steps, evaluations, checkpoints, and the files of a finished run."""

import dataclasses
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.data.records import Stateful, Step, TrainerState
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.data.sources import Source, as_source
from fastgrpo.policy.fit import check_rows
from fastgrpo.policy.load import stop_token_ids
from fastgrpo.ranks import join
from fastgrpo.rewards.call import Rewards, rewards_settings
from fastgrpo.rollout import make_backend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.curves import Panel
from fastgrpo.run.log import RunLog
from fastgrpo.run.metrics import Summary
from fastgrpo.run.profiling import StageTimer, needed_steps, peak_flops
from fastgrpo.run.resume import digest_of_rows, inputs_of, may_go_on, refuse_differences, set_aside
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.snapshot import GlobalRNG, HostCopies, Snapshot, restore
from fastgrpo.run.terminal import is_terminal
from fastgrpo.trainer.callbacks import Arguments, Callbacks
from fastgrpo.trainer.collect import rates
from fastgrpo.trainer.evaluating import Evaluating
from fastgrpo.trainer.finishing import Finishing
from fastgrpo.trainer.given import with_adapters
from fastgrpo.trainer.held_out import all_rows, read_held_out
from fastgrpo.trainer.leaving import Leaving
from fastgrpo.trainer.opening import Opening
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.policy import make_policy
from fastgrpo.trainer.update import Updater


class Trainer(Opening, Evaluating, Finishing, Leaving, ABC):
    """Trains a causal LM step by step, evaluates and saves it. A subclass says what one step is.

    Args:
        model: A folder, hub id or GGUF file, or a transformers causal LM, which is trained in place.
        reward_funcs: A reward function or a list of them, see `Rewards`.
        args: The settings; None for the defaults.
        train_dataset: Training rows, or a `Source` of them.
        eval_dataset: Held-out rows, or a dict of them by name, or None.
        processing_class: The tokenizer; None loads the model's.
        log: A `RunLog` that has claimed its folder already. None makes one from args.
        panels: What the picture of the run shows.
        callbacks: Callbacks of transformers, as instances or classes.
        peft_config: A `peft.LoraConfig`, which stands for the settings of LoRA.

    Raises:
        ValueError: An argument or a setting cannot be used; the message names it and the remedy.
    """

    config_class: ClassVar[type[TrainingConfig]]
    title: ClassVar[str]  # in front of the progress bar
    shown: ClassVar[dict[str, str]]  # what the bar and the line of a logged step show: a short name -> the metric
    needed_rows: ClassVar[str] = "rows with a `prompt` column"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Callable | Sequence[Callable],
        args: TrainingConfig | None,
        train_dataset: Source | Iterable[dict] | None,
        eval_dataset: Iterable[dict] | dict[str, Iterable[dict]] | None,
        processing_class: PreTrainedTokenizerBase | None,
        log: RunLog | None,
        panels: Sequence[Panel],
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        peft_config: Any = None,
    ):
        args = self._checked(args, processing_class)
        model, args, wrapper = with_adapters(model, peft_config, args)
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        self.ranks = join(args.device, args.ddp_timeout)
        if train_dataset is None:
            raise ValueError(f"train_dataset is needed: {self.needed_rows}")
        self.source = as_source(train_dataset, seed=args.seed, shuffle=args.shuffle_dataset, needed=self._most_rows())
        train_rows = as_rows(self.source.rows, "train_dataset.rows")
        self.held_out = read_held_out(eval_dataset, args.max_eval_samples)
        self.rewards = self._make_rewards(reward_funcs)
        self.made = made = make_policy(model, processing_class, args, self.ranks, wrapper, self.rewards)
        self.policy, self.tokenizer, self.plan = made.policy, made.tokenizer, made.plan
        if self.rewards is not None:
            reads_steps = getattr(args, "process_rewards", "outcome") == "token"  # only then are steps found in tokens
            place = self.rewards.device(self.policy.device, args.reward_device)
            self.rewards.place(place, self.tokenizer if reads_steps else None)
        self.digests = {"model": made.digest}
        self._check_rows(train_rows)
        self.digests["data"] = digest_of_rows(train_rows)
        if self.ranks.size > 1:
            rows = self.digests["data"], len(self.source)
            refuse_differences(self.ranks, training_rows=rows, held_out_rows=digest_of_rows(all_rows(self.held_out)))
        self.state = TrainerState(
            0, self._count_steps(), 0.0, args.max_completion_length, logging_steps=args.logging_steps,
            eval_steps=args.eval_steps or 0, save_steps=args.save_steps or 0, num_train_epochs=args.num_train_epochs,
            is_world_process_zero=self.ranks.lead, is_local_process_zero=self.ranks.lead,
        )  # fmt: skip
        self.timer = StageTimer(self.policy.device, peak_flops(self.policy.device, self.policy.dtype))
        self.sampling = SamplingParams(
            max_tokens=args.max_completion_length, stop_token_ids=stop_token_ids(self.policy, self.tokenizer)
        )
        self.optimizer = MasterAdamW(
            self.policy.module,
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
            timer=self.timer,
            ranks=self.ranks,
        )
        judged = self.rewards is not None  # without rewards nothing is drawn
        self.engine = make_backend(self.policy.for_rollouts, args, self._to_come) if judged else None
        self._prepare()
        functions = self.rewards.functions if judged else []
        self.inputs = inputs_of(args, functions, model, (train_rows, *self.held_out.values()))
        self.copies = HostCopies()
        self.optimizer.adamw.register_step_pre_hook(self.copies.before_update)
        self.panels = panels
        self.callbacks = Callbacks(
            callbacks, self.state, self.model, self.tokenizer, self.optimizer.adamw, self.schedule, self.ranks
        )
        self.log = None
        # TRL's scripts say in `train` what to go on from, in a folder that a run has left.
        if log or not may_go_on(args, self.ranks):
            self._open(log)
        else:
            self.callbacks.args = Arguments(args, self.ranks, Path(args.output_dir), bool(self.held_out))
        self.callbacks.call("on_init_end")

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
        return Rewards(reward_funcs, **rewards_settings(self.args))

    def _check_rows(self, train_rows: Rows) -> None:
        """Refuse rows that a later step or evaluation could not use."""
        for rows in (train_rows, *self.held_out.values()):
            limit, template_kwargs = self.args.max_completion_length, self.args.template_kwargs
            check_rows(rows, self.tokenizer, self.policy, limit, self._shows_bars, template_kwargs)

    @property
    def _shows_bars(self):
        """Whether this rank shows bars before the run has a log."""
        return self.ranks.lead and not (self.args.disable_tqdm or self.args.quiet) and is_terminal(sys.stderr)

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
        """The transformers model inside of the policy; where it has adapters, peft's `PeftModel` of it."""
        return self.policy.module if self.made.wrapper is None else self.made.wrapper

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The tokenizer, by TRL's name."""
        return self.tokenizer

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
            "gradient_checkpointing": self.policy.module.is_gradient_checkpointing,
            "config": dataclasses.asdict(self.args),
        }

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> Summary:
        """Train until the end, starting from a checkpoint if there is one to go on from.

        The first SIGINT or SIGTERM lets the step end and saves. A second one ends the process at once.

        Args:
            resume_from_checkpoint: The folder of a checkpoint; True for the newest one in output_dir; None for what
                the settings say.

        Returns:
            The summary, which is also written to summary.json. It has the attributes of transformers' `TrainOutput`.

        Raises:
            ValueError: A checkpoint could not be read or written, or the run has ended already.
            KeyboardInterrupt: The run was stopped by SIGINT, after everything was saved.
            SystemExit: The run was stopped after everything was saved: by SIGTERM, with the exit code 143, or because
                nobody reads the output any more, with 141.
        """
        self._go_on_from(resume_from_checkpoint)
        with StopSignals(self.ranks) as stop, self.log, self.rewards or nullcontext():
            with self.checkpoints:
                stopped_after = self._run(stop)
            if stopped_after is None:
                self.log.close_bar()
                return self._finish()
        how = f"--resume_from_checkpoint auto --output_dir {self.log.dir}"
        self.log.terminal.last(f"stopped after step {stopped_after}; continue with {how}")
        # The first rank that leaves makes torchrun end the others, which may be writing still.
        self.ranks.meet("the end of the others")
        stop.leave()

    def _run(self, stop):
        """Make the steps that are left. Return None at the end of the run, or the step after which it was stopped."""
        log, callbacks, control = self.log, self.callbacks, self._control
        callbacks.begin()
        if log.checkpoint is None:
            set_seed((self.args.seed + self.ranks.rank) % 2**32)  # reward functions may draw from these generators
        else:
            restore(self.parts(), log.checkpoint, self.about(), log.say, self.ranks)
            if self.ranks.lead:
                set_aside(log.folder, self.state.global_step, log.say)
            callbacks.restore()
        log.progress(self.state.max_steps, self.title, done=self.state.global_step)
        epoch = None  # the epoch that callbacks know to have begun
        while True:
            callbacks.agree(f"what the callbacks want before step {self.state.global_step + 1}")
            self.checkpoints.check()
            if not self._stopping(stop):
                self._evaluate_if_due()
            step, stopping = self.state.global_step, self._stopping(stop)
            last = step == self.state.max_steps or control().should_training_stop
            if last and not stopping:
                log.flush()
            if stopping or self.checkpoints.due(step, last) or control().should_save:
                self._save(step)
            if stopping:
                callbacks.call("on_train_end")
                return step
            if last:
                return None
            if epoch is None:
                epoch = int(self.state.epoch)
                callbacks.call("on_epoch_begin")
            callbacks.call("on_step_begin")
            values = self.step()
            callbacks.call("on_step_end")
            callbacks.agree(f"what the callbacks want after step {step + 1}")
            last = step + 1 == self.state.max_steps or control().should_training_stop
            line = log.step(step + 1, values, last=last or control().should_log)
            log.advance(**self._shown(values))
            if line is not None:
                log.terminal.logged(step + 1, self._shown(line), line["step_time"])
                callbacks.call("on_log", logs=line)
            if last or int(self.state.epoch) > epoch:
                epoch = None
                callbacks.call("on_epoch_end")

    def _shown(self, values):
        """Choose the values that the bar or a line shows. Those that are not finite are None in a logged line."""
        found = {short: values.get(name) for short, name in self.shown.items()}
        return {short: value for short, value in found.items() if value is not None}

    def _control(self):
        """Return what the callbacks have decided, which may be another object after each event."""
        return self.callbacks.control

    def _save(self, step):
        """Save a checkpoint. Where a callback waits for it, so does the run."""
        self.checkpoints.save(step, self._snapshot)
        self.callbacks.note_saved()
        if self.callbacks.any_hears("on_save"):
            self.checkpoints.wait()
        self.callbacks.call("on_save")

    def _stopping(self, stop):
        """Whether the run shall stop: one rank's signal stops all of them after the same step."""
        return stop.agree(f"the decision whether to stop after step {self.state.global_step}")

    def _snapshot(self):
        self.state.stateful_callbacks = self.callbacks.export()
        card = self._card(adapters=self.args.use_peft)
        return Snapshot(self.parts(), self.tokenizer, self.about(), self.copies, self.checkpoints.ranks, card)

    def step(self) -> dict[str, float]:
        """Make one step, from rows to updated weights.

        Returns:
            Its metrics by name.

        Raises:
            ValueError: The run has ended.
        """
        self.open()
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
            if warning.startswith("warning"):
                self.log.warn(step, warning)
            else:  # a note, such as that a loss near 0 is as it should be
                self.log.say(f"step {step}: {warning}")
        values = done.values | self.timer.stop() | {"num_tokens": state.num_tokens, "epoch": state.epoch}
        if "memory/peak_gib" in values:
            values["memory/peak_gib"] = max(self.ranks.gather(values["memory/peak_gib"], "the peak of the memory"))
        values |= rates(done.tokens, values["time/rollout"], time.perf_counter() - started)
        self.profiler.step(values, left=state.max_steps - step)
        return values
