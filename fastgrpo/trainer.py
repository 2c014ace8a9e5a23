"""The training loop: prompts -> rollouts -> rewards -> advantages -> updates, with logging and checkpoints."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import Completion, Stateful, TrainerState
from fastgrpo.data.rows import as_rows
from fastgrpo.data.sources import Source, as_source
from fastgrpo.evaluation.heldout import evaluate, progress_bar
from fastgrpo.policy.fit import check_rows
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.load import policy_and_tokenizer, stop_token_ids
from fastgrpo.policy.lora import add_lora, merged, refuse_adapters
from fastgrpo.policy.reference import make_reference
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.overlong import shaping
from fastgrpo.rollout import make_backend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.checkpoint import Checkpointer, save_model
from fastgrpo.run.curves import conclude
from fastgrpo.run.digest import digest_of_rows, digest_of_weights
from fastgrpo.run.health import Watch
from fastgrpo.run.inputs import inputs_of
from fastgrpo.run.log import RunLog
from fastgrpo.run.profiling import Profiler, StageTimer, needed_steps, peak_flops
from fastgrpo.run.resume import set_aside
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.snapshot import GlobalRNG, Snapshot, restore
from fastgrpo.step.experience import Experience, ExperienceMaker, to_sample
from fastgrpo.step.grpo import GRPOUpdate, Updated
from fastgrpo.step.measure import rates, sample_rows
from fastgrpo.step.optim import MasterAdamW, make_schedule
from fastgrpo.step.update import Updater


class GRPOTrainer:
    """Trains a causal LM by GRPO, under TRL's names.

    Args:
        model: A folder, hub id or GGUF file, or a transformers causal LM, which is trained in place.
        reward_funcs: A function or a list of them, `f(prompts, completions, **columns) -> list[float | None]`: see
            `Rewards`.
        args: The settings; None for the defaults.
        train_dataset: Rows with a `prompt` column (a list of dicts, a datasets.Dataset, a pandas.DataFrame), or a
            `Source` of them. An IterableDataset is read as far as the max_steps of the run can need. All rows are
            checked here.
        eval_dataset: Held-out rows, which are checked here too, or None for no evaluation. Of an IterableDataset
            max_eval_samples rows are read.
        processing_class: The tokenizer; None loads the model's.
        log: A `RunLog` that has claimed its folder already. None makes one from args.

    Raises:
        ValueError: An argument or a setting cannot be used; the message names it and the remedy.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Callable | Sequence[Callable],
        args: GRPOConfig | None = None,
        train_dataset: Source | Iterable[dict] | None = None,
        eval_dataset: Iterable[dict] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        log: RunLog | None = None,
    ):
        self.args = args = GRPOConfig() if args is None else args
        if not isinstance(args, GRPOConfig):
            remedy = "GRPOConfig(**args)" if isinstance(args, dict) else "a fastgrpo.GRPOConfig"
            raise ValueError(f"args is of type {type(args).__name__}; pass {remedy}")
        lacking = [name for name in ("vocab_size", "eos_token_id", "decode") if not hasattr(processing_class, name)]
        if processing_class is not None and lacking:
            remedy = "its .tokenizer" if hasattr(processing_class, "tokenizer") else "a tokenizer of transformers"
            raise ValueError(f"processing_class is of type {type(processing_class).__name__}; pass {remedy}")
        if train_dataset is None:
            raise ValueError("train_dataset is needed: rows with a `prompt` column")
        self.source = as_source(train_dataset, seed=args.seed, shuffle=args.shuffle_dataset, needed=_most_rows(args))
        train_rows = as_rows(self.source.rows, "train_dataset.rows")
        self.eval_rows = None
        if eval_dataset is not None:
            count = args.max_eval_samples
            self.eval_rows = as_rows(eval_dataset, "eval_dataset", count, "max_eval_samples").head(count)
        self.rewards = Rewards(reward_funcs, args.reward_weights, args.reward_errors, shaping(args))
        self.policy, self.tokenizer = policy_and_tokenizer(model, processing_class, args)
        # A resumed run makes the frozen reference, or the weights below the adapters, from the model that it is given.
        frozen = args.use_peft or (args.beta > 0 and not args.sync_ref_model)
        self.digests = {"model": digest_of_weights(self.policy.state_dict()) if frozen else None}
        apply_liger(self.model, args.use_liger_kernel)
        refuse_adapters(self.model)
        if args.use_peft:
            add_lora(
                self.model,
                r=args.lora_r,
                alpha=args.lora_alpha,
                target_modules=args.lora_target_modules,
                seed=args.seed,
            )
        for rows in (train_rows, self.eval_rows or ()):
            check_rows(rows, self.tokenizer, self.policy, args.max_completion_length)
        self.digests["data"] = digest_of_rows(train_rows)
        self.state = TrainerState(0, self._count_steps(), 0.0, args.max_completion_length)
        self.timer = StageTimer(self.policy.device, peak_flops(self.policy.device, self.policy.dtype))
        self.sampling = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            max_tokens=args.max_completion_length,
            stop_token_ids=stop_token_ids(self.policy, self.tokenizer),
        )
        self.optimizer = MasterAdamW(
            self.model,
            learning_rate=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.engine = make_backend(self.policy, args, self.optimizer.bytes_to_come)
        self.make_experience = ExperienceMaker(
            self.source, self.tokenizer, self.engine, self.rewards, self.sampling, args, self.timer
        )
        self.reference = make_reference(
            self.policy, args.beta, device=args.ref_device, quantization=args.ref_quantization,
            moving=args.sync_ref_model,
        )  # fmt: skip
        self.update = self._make_update()
        self.log = log or RunLog(args, inputs_of(args, self.rewards.functions, model, (train_rows, self.eval_rows)))
        self.checkpoints = Checkpointer(args, self.log)
        self.watch = Watch(args, self.checkpoints)
        self.profiler = Profiler(args.profile, self.log.folder, self.log.say)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model inside of the policy."""
        return self.policy.module

    def _count_steps(self):
        """Count the steps of the run. Raises ValueError where they are too few to be profiled."""
        args, steps = self.args, self.args.max_steps
        if steps < 0:
            steps = math.ceil(args.num_train_epochs * len(self.source) / args.prompts_per_step)
        needed = needed_steps(args.profile)
        if args.profile and needed > steps:
            raise ValueError(
                f"profile={args.profile} needs a run of at least {needed} steps (warm-up, timed, traced), "
                f"and this one has {steps}; raise max_steps or lower profile"
            )
        return steps

    def _make_update(self):
        args = self.args
        self.schedule = make_schedule(
            self.optimizer,
            args.lr_scheduler_type,
            warmup_steps=args.warmup_steps,
            total_steps=self.state.max_steps * args.num_iterations * args.updates_per_rollout,
        )
        updater = Updater(
            self.optimizer,
            self.schedule,
            max_grad_norm=args.max_grad_norm,
            max_tokens=args.max_tokens_per_microbatch,
            device=self.policy.device,
            share_prompt=args.share_prompt,
            timer=self.timer,
        )
        return GRPOUpdate(
            self.policy,
            self.reference,
            updater,
            args.objective,
            temperature=args.temperature,
            updates_per_rollout=args.updates_per_rollout,
            num_iterations=args.num_iterations,
        )

    def parts(self) -> dict[str, Stateful]:
        """Return the parts of the run that have state, by the names that a checkpoint gives them."""
        parts = {
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
        return parts if self.reference is None else parts | {"reference": self.reference}

    def about(self) -> dict[str, Any]:
        """Return what a resumed run is compared with: the data, the model, the dtype and the settings."""
        return {
            "rows": len(self.source),
            "data_digest": self.digests["data"],
            "model_digest": self.digests["model"],
            "dtype": str(self.policy.dtype),
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
        with StopSignals() as stop, self.log:
            with self.checkpoints:
                stopped_after = self._run(stop)
            if stopped_after is None:
                self.log.close_bar()
                return self._finish()
        how = f"--resume_from_checkpoint auto --output_dir {self.log.dir}"
        self.log.say(f"stopped after step {stopped_after}; continue with {how}")
        stop.leave()

    def _run(self, stop):
        """Make the steps that are left. Return None at the end of the run, or the step after which it was stopped."""
        log = self.log
        if log.checkpoint is None:
            set_seed(self.args.seed)  # reward functions may draw from the global generators
        else:
            restore(self.parts(), log.checkpoint, self.about(), log.say)
            set_aside(log.folder, self.state.global_step, log.say)
        while True:
            self.checkpoints.check()
            if not stop:
                self._evaluate_if_due()
            step, stopping = self.state.global_step, bool(stop)
            last = step == self.state.max_steps
            if stopping or self.checkpoints.due(step, last):
                self.checkpoints.save(step, lambda: Snapshot(self.parts(), self.tokenizer, self.about()))
            if stopping or last:
                return step if stopping else None
            if log.bar is None:
                log.progress(self.state.max_steps, "GRPO", done=step)
            values = self.step()
            log.step(step + 1, values, last=step + 1 == self.state.max_steps)
            shown = {"reward": "reward", "acc": "accuracy", "kl": "kl", "tok/s": "tokens/s"}
            log.advance(**{short: values[name] for short, name in shown.items() if name in values})

    def step(self) -> dict[str, float]:
        """Make one step, from prompts to updated weights.

        Returns:
            Its metrics by name.

        Raises:
            ValueError: The run has ended.
        """
        self.log.folder.check()
        started, step = time.perf_counter(), self.state.global_step + 1
        logged = step % self.args.logging_steps == 0 or step == self.state.max_steps
        self.timer.start()
        experience = self.make_experience(self.state)
        corrected = self.args.importance_sampling_mode is not None
        samples = [[to_sample(experience.completions[i], i, corrected) for i in group] for group in experience.trained]
        updated = self.update(samples, with_entropy=logged)
        if self.args.sync_ref_model and step % self.args.ref_model_sync_steps == 0:
            self.reference.sync(self.policy, self.args.ref_model_mixup_alpha)
        values = updated.metrics | experience.metrics | self.source.metrics()
        self._advance(experience, values["accuracy"])
        for warning in self.watch.observe(values, updated.norms):
            self.log.say(f"step {step}: {warning}")
        if logged:
            self.log.samples(sample_rows(step, clipped(experience, updated), self.args.num_generations))
        values |= self.timer.stop() | {"num_tokens": self.state.num_tokens}
        values |= rates(experience.completions, values["time/rollout"], time.perf_counter() - started)
        self.profiler.step(values, left=self.state.max_steps - step)
        return values

    def _advance(self, experience, accuracy):
        """Count the step, its epochs and its tokens, and tell the source the accuracy of the step."""
        state = self.state
        state.global_step += 1
        news = self.source.observe(accuracy)
        if news:
            self.log.say(f"step {state.global_step}: {news}")
        rows = round(state.epoch * len(self.source)) + experience.taken  # in whole rows, so that no rounding adds up
        state.epoch = rows / len(self.source)
        state.num_tokens += experience.num_tokens

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
            seed=self.args.seed,
        )
        with progress_bar("evaluate") as bar:
            result = evaluate(
                self.engine, self.tokenizer, self.eval_rows, self.rewards, sampling, self.state, bar.update, draws
            )
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
            if values is not None:
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
            save_model(self.log.folder.claim("merged"), merged(self.model), self.tokenizer)
        self.log.say("\n" + conclude(self.log.folder, summary, self.checkpoints.newest, self.log.say))
        return summary


def _most_rows(args: GRPOConfig) -> int | None:
    """Return the most rows that a run of max_steps can draw; None where its steps follow from the rows."""
    batches = args.max_num_gen_batches if args.dynamic_sampling else 1
    return args.max_steps * batches * args.oversampled(args.prompts_per_step) if args.max_steps > 0 else None


def clipped(experience: Experience, updated: Updated) -> list[Completion]:
    """Note in each completion that was trained on which share of its tokens the last update clipped.

    Args:
        experience: What was drawn for the step.
        updated: What the step's updates did.

    Returns:
        All completions of the step.
    """
    completions = list(experience.completions)
    for sample in updated.samples:
        completions[sample.index] = dataclasses.replace(completions[sample.index], clipped=float(sample.clipped))
    return completions
