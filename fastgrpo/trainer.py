"""The loop: prompts -> rollouts -> rewards -> advantages -> updates, and what is measured on the way."""

import dataclasses
import math
import time

from tqdm import tqdm
from transformers import set_seed

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.prompts import check_rows
from fastgrpo.data.records import TrainerState
from fastgrpo.data.sources import Curriculum, ShuffledRows
from fastgrpo.evaluation.heldout import evaluate
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
from fastgrpo.run.health import Watch
from fastgrpo.run.log import RunLog
from fastgrpo.run.profiling import Profiler, StageTimer, needed_steps, peak_flops
from fastgrpo.run.resume import set_aside
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.snapshot import Snapshot, restore
from fastgrpo.step.experience import ExperienceMaker
from fastgrpo.step.grpo import GRPOUpdate
from fastgrpo.step.measure import rates, sample_rows
from fastgrpo.step.optim import MasterAdamW, make_schedule
from fastgrpo.step.update import Updater


class GRPOTrainer:
    """Trains a causal LM by GRPO, under TRL's names.

    Args:
        model: a folder or hub id, or a transformers causal LM (trained in place).
        reward_funcs: a function or a list: `f(prompts, completions, **columns) -> list[float | None]`, see `Rewards`.
        args: `GRPOConfig`. train_dataset: rows with a `prompt` column (a list, a datasets.Dataset), or a source like
            `ShuffledRows`; the `rows` of one that has them are looked at before the first step. eval_dataset: held-out
            rows, or None for no evaluation.
        processing_class: the tokenizer; None loads the model's.
        log: a `RunLog` whose folder is claimed already; None makes one from args.

    Raises:
        ValueError: naming what does not fit.
    """

    def __init__(self, model, reward_funcs, args=None, train_dataset=None, eval_dataset=None, processing_class=None,
                 log=None):  # fmt: skip
        self.args = args or GRPOConfig()
        if train_dataset is None:
            raise ValueError("train_dataset is needed: rows with a `prompt` column")
        functions = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self.rewards = Rewards(functions, self.args.reward_weights, self.args.reward_errors, shaping(self.args))
        self.model, self.tokenizer = policy_and_tokenizer(model, processing_class, self.args)
        apply_liger(self.model, self.args.use_liger_kernel)
        refuse_adapters(self.model)
        if self.args.use_peft:
            add_lora(
                self.model,
                r=self.args.lora_r,
                alpha=self.args.lora_alpha,
                target_modules=self.args.lora_target_modules,
                seed=self.args.seed,
            )
        self.source = train_dataset
        if not (hasattr(train_dataset, "take") and hasattr(train_dataset, "observe")):
            self.source = ShuffledRows(train_dataset, seed=self.args.seed, shuffle=self.args.shuffle_dataset)
        if hasattr(self.source, "rows"):
            check_rows(self.source.rows, self.tokenizer, self.model, self.args.max_completion_length)
        self.eval_rows = None if eval_dataset is None else list(eval_dataset)[: self.args.max_eval_samples]
        max_steps = self.args.max_steps
        if max_steps < 0:
            max_steps = math.ceil(self.args.num_train_epochs * len(self.source) / self.args.prompts_per_step)
        needed = needed_steps(self.args.profile)
        if self.args.profile and needed > max_steps:
            raise ValueError(
                f"profile={self.args.profile} needs a run of at least {needed} steps (warm-up, timed, traced), "
                f"and this one has {max_steps}; raise max_steps or lower profile"
            )
        self.state = TrainerState(0, max_steps, 0.0, self.args.max_completion_length)
        self.num_tokens, self.evaluated_at = 0, None
        self.accuracy_before = self.accuracy_after = None
        self.sampling = SamplingParams(
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            top_k=self.args.top_k,
            min_p=self.args.min_p or 0.0,
            max_tokens=self.args.max_completion_length,
            stop_token_ids=stop_token_ids(self.model, self.tokenizer),
        )
        self.engine = make_backend(self.model, self.args, lambda: self.optimizer.bytes_to_come())
        self.timer = StageTimer(self.model.device, peak_flops(self.model.device, self.model.dtype))
        self.make_experience = ExperienceMaker(
            self.source, self.tokenizer, self.engine, self.rewards, self.sampling, self.args, self.timer
        )
        self.update = self._make_update()
        self.log = log or RunLog(self.args)
        self.checkpoints = Checkpointer(self.args, self.log)
        self.watch = Watch(self.args, self.checkpoints)
        self.profiler = Profiler(self.args.profile, self.log.dir, self.log.say)

    def _make_update(self):
        args = self.args
        self.optimizer = MasterAdamW(
            self.model,
            learning_rate=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        updates = self.state.max_steps * args.num_iterations * args.updates_per_rollout
        schedule = make_schedule(
            self.optimizer, args.lr_scheduler_type, warmup_steps=args.warmup_steps, total_steps=updates
        )
        updater = Updater(
            self.optimizer,
            schedule,
            max_grad_norm=args.max_grad_norm,
            max_tokens=args.max_tokens_per_microbatch,
            device=self.model.device,
            share_prompt=args.share_prompt,
            timer=self.timer,
        )
        return GRPOUpdate(
            self.model,
            make_reference(self.model, args.beta, device=args.ref_device, quantization=args.ref_quantization),
            updater,
            args.objective,
            temperature=args.temperature,
            updates_per_rollout=args.updates_per_rollout,
            num_iterations=args.num_iterations,
        )

    def train(self):
        """Run to the end, from the checkpoint that the log found, where it found one.

        The first SIGINT or SIGTERM lets the step end and saves; a second one leaves at once.

        Returns:
            the summary, which is also written to summary.json.

        Raises:
            ValueError: a checkpoint could not be read or written. KeyboardInterrupt, SystemExit(143): after SIGINT,
            SIGTERM; everything is saved then.
        """
        log = self.log
        with StopSignals() as stop, log, self.checkpoints:
            if log.checkpoint is None:
                set_seed(self.args.seed)  # reward functions may draw from the global generators
            else:
                restore(self, log.checkpoint)
                set_aside(log.dir, self.state.global_step, log.say)
            while True:
                self.checkpoints.check()
                if not stop:
                    self._evaluate_if_due()
                step, stopping = self.state.global_step, bool(stop)
                last = step == self.state.max_steps
                if stopping or self.checkpoints.due(step, last):
                    self.checkpoints.save(step, lambda: Snapshot(self))
                if stopping or last:
                    break
                if log.bar is None:
                    log.progress(self.state.max_steps, "GRPO", done=step)
                values = self.step()
                log.step(step + 1, values, last=step + 1 == self.state.max_steps)
                shown = {"reward": "reward", "acc": "accuracy", "kl": "kl", "tok/s": "tokens/s"}
                log.advance(**{short: values[name] for short, name in shown.items() if name in values})
        if stopping:
            log.say(f"stopped after step {step}; --resume_from_checkpoint auto --output_dir {log.dir} goes on")
            stop.leave()
        return self._finish()

    def step(self):
        """One step, from prompts to updated weights. Returns its metrics."""
        started, step = time.perf_counter(), self.state.global_step + 1
        logged = step % self.args.logging_steps == 0 or step == self.state.max_steps
        self.timer.start()
        experience = self.make_experience(self.state)
        values = self.update(experience.groups, logged)
        if self.args.sync_ref_model and step % self.args.ref_model_sync_steps == 0:
            self.update.reference.sync(self.model, self.args.ref_model_mixup_alpha)
        values |= experience.metrics
        self._count(step, experience, values)
        for warning in self.watch.observe(values, self.update.norms):
            self.log.say(f"step {step}: {warning}")
        if logged:
            self.log.samples(sample_rows(step, experience, self.rewards.names, self.args.num_generations))
        values |= self.timer.stop() | {"num_tokens": self.num_tokens}
        values |= rates(experience.rollouts, values["time/rollout"], time.perf_counter() - started)
        self.profiler.step(values, left=self.state.max_steps - step)
        return values

    def _count(self, step, experience, values):
        """Steps, epochs, tokens and the curriculum's level: where the run stands after a step."""
        if isinstance(self.source, Curriculum):
            values["curriculum/level"] = self.source.level
        if self.source.observe(values["accuracy"]):
            self.log.say(f"step {step}: the curriculum moves on to {self.source.name}")
        self.state.global_step = step
        rows = round(self.state.epoch * len(self.source)) + experience.taken  # whole rows: nothing is rounded away
        self.state.epoch = rows / len(self.source)
        self.num_tokens += experience.num_tokens

    def evaluate(self):
        """Measure the held-out rows, and log it. Returns the metrics, or None without such rows."""
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
        with tqdm(total=len(self.eval_rows) * (1 + draws), desc="evaluate", leave=False) as bar:
            result = evaluate(
                self.engine, self.tokenizer, self.eval_rows, self.rewards, sampling, self.state, bar.update, draws
            )
        self.log.write(self.state.global_step, result.metrics())
        self.log.say(f"step {self.state.global_step}: held-out {result.summary()}")
        return result.values

    def _evaluate_if_due(self):
        """At the first and the last step and every eval_steps, once; a run that was stopped before it catches up."""
        step, every = self.state.global_step, self.args.eval_steps
        due = step in (0, self.state.max_steps) or (every and step % every == 0)
        if due and self.evaluated_at != step:
            values = self.evaluate()
            self.evaluated_at = step
            if values is not None:
                self.accuracy_after = values["eval/accuracy"]
                self.accuracy_before = self.accuracy_after if step == 0 else self.accuracy_before

    def _finish(self):
        """What the run leaves when it is through. Returns the summary."""
        summary = {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "steps": self.state.global_step,
            "wall_seconds": round(time.perf_counter() - self.log.started, 2),
            "num_tokens": self.num_tokens,
        }
        if self.args.use_peft:
            save_model(self.log.dir / "merged", merged(self.model), self.tokenizer)
        self.log.say("\n" + conclude(self.log.dir, summary, self.checkpoints.newest))
        return summary
