"""The loop: prompts -> rollouts -> rewards -> advantages -> updates, and what is measured on the way."""

import dataclasses
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from fastgrpo.advantage import group_advantages
from fastgrpo.batch import Sample
from fastgrpo.checkpoint import save_checkpoint
from fastgrpo.config import GRPOConfig
from fastgrpo.data import Curriculum, ShuffledRows, to_completion, to_prompt
from fastgrpo.evaluate import evaluate
from fastgrpo.frozen import make_reference
from fastgrpo.grpo import GRPOUpdate
from fastgrpo.measure import reward_metrics, rollout_metrics, sample_rows
from fastgrpo.metrics import RunLog
from fastgrpo.model import cast, choose_device, choose_dtype, load_policy, prepare
from fastgrpo.optim import MasterAdamW, make_schedule
from fastgrpo.report import draw_curves, table
from fastgrpo.rewards import Rewards
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.update import Updater


@dataclass
class TrainerState:
    """What reward functions may know of the run: steps done, of how many, epochs done, and the completion limit."""

    global_step: int
    max_steps: int
    epoch: float
    max_completion_length: int


class GRPOTrainer:
    """Trains a causal LM by GRPO, under TRL's names.

    Args:
        model: a folder or hub id, or a transformers causal LM (trained in place).
        reward_funcs: a function or a list: `f(prompts, completions, **columns) -> list[float | None]`, see `Rewards`.
        args: `GRPOConfig`. train_dataset: rows with a `prompt` column (a list, a datasets.Dataset), or a source like
            `ShuffledRows`. eval_dataset: held-out rows, or None for no evaluation.
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
        self.rewards = Rewards(functions, self.args.reward_weights)
        self.model, self.tokenizer = self._load(model, processing_class)
        self.source = train_dataset
        if not (hasattr(train_dataset, "take") and hasattr(train_dataset, "observe")):
            self.source = ShuffledRows(train_dataset, seed=self.args.seed, shuffle=self.args.shuffle_dataset)
        self.eval_rows = None if eval_dataset is None else list(eval_dataset)[: self.args.max_eval_samples]
        max_steps = self.args.max_steps
        if max_steps < 0:
            max_steps = math.ceil(self.args.num_train_epochs * len(self.source) / self.args.prompts_per_step)
        self.state = TrainerState(0, max_steps, 0.0, self.args.max_completion_length)
        self.num_tokens = 0
        self.sampling = SamplingParams(
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            top_k=self.args.top_k,
            min_p=self.args.min_p or 0.0,
            max_tokens=self.args.max_completion_length,
            stop_token_ids=stop_token_ids(self.model, self.tokenizer),
        )
        self.engine = RolloutEngine(self.model, max_num_seqs=self.args.max_num_seqs)
        self.update = self._make_update()
        self.log = log or RunLog(self.args)

    def _make_update(self):
        args = self.args
        optimizer = MasterAdamW(
            self.model,
            learning_rate=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        updates = self.state.max_steps * args.num_iterations * args.updates_per_rollout
        schedule = make_schedule(optimizer, args.lr_scheduler_type, warmup_steps=args.warmup_steps, total_steps=updates)
        updater = Updater(
            optimizer,
            schedule,
            max_grad_norm=args.max_grad_norm,
            max_tokens=args.max_tokens_per_microbatch,
            device=self.model.device,
        )
        return GRPOUpdate(
            self.model,
            make_reference(self.model, args.beta),
            updater,
            args.objective,
            temperature=args.temperature,
            updates_per_rollout=args.updates_per_rollout,
            num_iterations=args.num_iterations,
        )

    def _load(self, model, tokenizer):
        if not isinstance(model, PreTrainedModel):
            policy, own = load_policy(
                model,
                dtype=self.args.dtype,
                device=self.args.device,
                gradient_checkpointing=self.args.gradient_checkpointing,
            )
            return policy, tokenizer or own
        if tokenizer is None and not model.config._name_or_path:
            raise ValueError("a model made in memory has no tokenizer to load; pass processing_class")
        device = choose_device(self.args.device)
        policy = prepare(
            cast(model.to(device), choose_dtype(self.args.dtype, device)), self.args.gradient_checkpointing
        )
        return policy, tokenizer or AutoTokenizer.from_pretrained(model.config._name_or_path)

    def train(self):
        """Run to the end. Returns the summary, which is also written to summary.json."""
        log, steps = self.log, self.state.max_steps
        before = self.evaluate()
        log.progress(steps, "GRPO")
        for step in range(1, steps + 1):
            values = self.step()
            log.step(step, values, last=step == steps)
            shown = {"reward": "reward", "acc": "accuracy", "kl": "kl", "tok/s": "tokens/s"}
            log.advance(**{short: values[name] for short, name in shown.items() if name in values})
            if step == steps or (self.args.eval_steps and step % self.args.eval_steps == 0):
                after = self.evaluate()
            if step == steps or step % self.args.save_steps == 0:
                checkpoint = save_checkpoint(log.dir, step, self.model, self.tokenizer)
        log.close()
        return self._finish(before, after, checkpoint)

    def step(self):
        """One step, from prompts to updated weights. Returns its metrics."""
        group_size, started = self.args.num_generations, time.perf_counter()
        prompts = [to_prompt(row, self.tokenizer) for row in self.source.take(self.args.prompts_per_step)]
        rollouts = self.generate(prompts)
        generated = time.perf_counter()

        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        completions = [to_completion(p, r.ids, self.tokenizer) for p, r in zip(prompts, rollouts, strict=True)]
        per_function, extras, custom = self.score(prompts, completions, rollouts)
        totals = self.rewards.total(per_function)
        advantages = group_advantages(totals, group_size, scale=self.args.scale_rewards)
        rewarded = time.perf_counter()

        samples = self.samples(prompts, rollouts, advantages)
        values = self.update([samples[i : i + group_size] for i in range(0, len(samples), group_size)])
        ended = time.perf_counter()

        names = self.rewards.names
        values |= custom | rollout_metrics(rollouts)
        values |= reward_metrics(names, per_function, totals, advantages, group_size)
        if isinstance(self.source, Curriculum):
            values["curriculum/level"] = self.source.level
        if self.source.observe(values["accuracy"]):
            self.log.say(f"step {self.state.global_step + 1}: the curriculum moves on to {self.source.name}")
        self.state.global_step += 1
        self.state.epoch = self.state.global_step * self.args.prompts_per_step / len(self.source)
        self.num_tokens += sum(len(sample) for sample in samples)
        step = self.state.global_step
        if step % self.args.logging_steps == 0 or step == self.state.max_steps:
            self.log.samples(
                sample_rows(step, samples, prompts, completions, rollouts, names, per_function, extras, group_size)
            )
        return values | {
            "num_tokens": self.num_tokens,
            "step_time": ended - started,
            "time/rollout": generated - started,
            "time/reward": rewarded - generated,
            "time/update": ended - rewarded,
            "tokens/s": sum(len(rollout.ids) for rollout in rollouts) / (ended - started),
        }

    def samples(self, prompts, rollouts, advantages):
        """Prompts, rollouts and advantages, one a completion -> `Sample`s."""
        masked = self.args.mask_truncated_completions
        return [
            Sample(prompt.ids, rollout.ids, advantage, rollout.logps, masked=masked and rollout.truncated)
            for prompt, rollout, advantage in zip(prompts, rollouts, advantages.tolist(), strict=True)
        ]

    def generate(self, prompts):
        """num_generations rollouts of each prompt, from a seed of this step's own."""
        seed = self.args.seed * 1_000_003 + self.state.global_step
        sampling = dataclasses.replace(self.sampling, seed=seed)
        return self.engine.generate([prompt.ids for prompt in prompts], self.args.num_generations, sampling)

    def score(self, prompts, completions, rollouts):
        """Rewards [S, F], the extra columns and the mean of the metrics that reward functions logged."""
        extras, custom = {}, defaultdict(list)
        per_function = self.rewards(
            prompts,
            completions,
            [rollout.ids for rollout in rollouts],
            trainer_state=self.state,
            log_metric=lambda name, value: custom[name].append(float(value)),
            log_extra=extras.__setitem__,
        )
        means = {f"custom/{name}": sum(values) / len(values) for name, values in custom.items()}
        return per_function, extras, {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def evaluate(self):
        """Greedy accuracy on the held-out rows, logged. Returns its metrics, or None without such rows."""
        if not self.eval_rows:
            if self.state.global_step == 0:
                self.log.say("no held-out rows: accuracy is not measured")
            return None
        with tqdm(total=len(self.eval_rows), desc="evaluate", leave=False) as bar:
            values = evaluate(
                self.engine, self.tokenizer, self.eval_rows, self.rewards, self.sampling, self.state, bar.update
            )
        self.log.write(self.state.global_step, values)
        self.log.say(
            f"step {self.state.global_step}: held-out accuracy {values['eval/accuracy']:.3f} "
            f"({len(self.eval_rows)} prompts, {values['eval/time']:.1f} s)"
        )
        return values

    def _finish(self, before, after, checkpoint):
        """summary.json, curves.png, and the table at the end."""
        summary = {
            "accuracy_before": before and before["eval/accuracy"],
            "accuracy_after": after and after["eval/accuracy"],
            "steps": self.state.global_step,
            "wall_seconds": round(time.perf_counter() - self.log.started, 2),
            "num_tokens": self.num_tokens,
        }
        (self.log.dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_curves(self.log.dir)
        files = {"checkpoint": checkpoint.name, "metrics": "metrics.jsonl", "samples": "samples.jsonl"}
        files |= {"curves": "curves.png", "summary": "summary.json", "config": "config.json"}
        shown = [(name, value) for name, value in summary.items() if value is not None]
        self.log.say("\n" + table([*shown, *((name, self.log.dir / file) for name, file in files.items())]))
        return summary


def stop_token_ids(model, tokenizer):
    """The ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(ids - {None}))
