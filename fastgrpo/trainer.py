"""The loop: prompts -> rollouts -> rewards -> advantages -> updates, and what is measured on the way."""

import dataclasses
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, PreTrainedModel

from fastgrpo.advantage import group_advantages
from fastgrpo.batch import Sample
from fastgrpo.checkpoint import save_checkpoint
from fastgrpo.config import GRPOConfig
from fastgrpo.data import ShuffledRows, to_completion, to_prompt
from fastgrpo.evaluate import evaluate
from fastgrpo.frozen import make_reference, score
from fastgrpo.loss import linear_grpo_loss
from fastgrpo.metrics import RunLog
from fastgrpo.model import choose_device, choose_dtype, completion_states, head, load_policy, prepare
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
        args: `GRPOConfig`. train_dataset: rows with a `prompt` column (a list, a datasets.Dataset), or a source with
            take and observe. eval_dataset: held-out rows, or None for no evaluation.
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
        is_source = hasattr(train_dataset, "take") and hasattr(train_dataset, "observe")
        self.source = (
            train_dataset
            if is_source
            else ShuffledRows(train_dataset, seed=self.args.seed, shuffle=self.args.shuffle_dataset)
        )
        self.eval_rows = None if eval_dataset is None else list(eval_dataset)[: self.args.max_eval_samples]
        self.max_steps = self.args.max_steps
        if self.max_steps < 0:
            self.max_steps = math.ceil(self.args.num_train_epochs * len(self.source) / self.args.prompts_per_step)
        self.objective = self.args.objective
        self.sampling = SamplingParams(
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            top_k=self.args.top_k,
            min_p=self.args.min_p or 0.0,
            max_tokens=self.args.max_completion_length,
            stop_token_ids=stop_token_ids(self.model, self.tokenizer),
        )
        self.engine = RolloutEngine(self.model, max_num_seqs=self.args.max_num_seqs)
        self.reference = make_reference(self.model, self.objective.beta)
        optimizer = MasterAdamW(
            self.model,
            learning_rate=self.args.learning_rate,
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
            weight_decay=self.args.weight_decay,
        )
        updates = self.max_steps * self.args.num_iterations * self.args.updates_per_rollout
        schedule = make_schedule(
            optimizer, self.args.lr_scheduler_type, warmup_steps=self.args.warmup_steps, total_steps=updates
        )
        self.updater = Updater(
            optimizer,
            schedule,
            max_grad_norm=self.args.max_grad_norm,
            max_tokens=self.args.max_tokens_per_microbatch,
            device=self.model.device,
        )
        self.state = TrainerState(0, self.max_steps, 0.0, self.args.max_completion_length)
        self.num_tokens = 0
        self.log = log or RunLog(self.args)

    def _load(self, model, tokenizer):
        if not isinstance(model, PreTrainedModel):
            policy, own = load_policy(
                model,
                dtype=self.args.dtype,
                device=self.args.device,
                gradient_checkpointing=self.args.gradient_checkpointing,
            )
            return policy, tokenizer or own
        device = choose_device(self.args.device)
        policy = prepare(model.to(device, choose_dtype(self.args.dtype, device)), self.args.gradient_checkpointing)
        return policy, tokenizer or AutoTokenizer.from_pretrained(model.config._name_or_path)

    def train(self):
        """Run to the end. Returns the summary, which is also written to summary.json."""
        log = self.log
        before = self.evaluate()
        log.progress(self.max_steps, "GRPO")
        after, path = before, None
        for step in range(1, self.max_steps + 1):
            values = self.step()
            last = step == self.max_steps
            log.step(step, values, last)
            shown = {"reward": values["reward"], "acc": values["accuracy"], "tok/s": values["tokens/s"]}
            log.advance(**shown, **({"kl": values["kl"]} if "kl" in values else {}))
            if last or (self.args.eval_steps and step % self.args.eval_steps == 0):
                after = self.evaluate()
            if last or step % self.args.save_steps == 0:
                path = save_checkpoint(log.dir, step, self.model, self.tokenizer)
        log.close()
        return self._finish(before, after, path)

    def step(self):
        """One step, from prompts to updated weights. Returns its metrics."""
        started = time.perf_counter()
        prompts = [to_prompt(row, self.tokenizer) for row in self.source.take(self.args.prompts_per_step)]
        rollouts = self.generate(prompts)
        generated = time.perf_counter()
        prompts = [prompt for prompt in prompts for _ in range(self.args.num_generations)]
        completions = [to_completion(p, r.ids, self.tokenizer) for p, r in zip(prompts, rollouts, strict=True)]
        per_function, extras, custom = self.score(prompts, completions, rollouts)
        totals = self.rewards.total(per_function)
        advantages = group_advantages(totals, self.args.num_generations, scale=self.args.scale_rewards)
        rewarded = time.perf_counter()
        samples = [
            Sample(
                prompt.ids,
                rollout.ids,
                advantage,
                sampler_logps=rollout.logps,
                masked=self.args.mask_truncated_completions and rollout.truncated,
            )
            for prompt, rollout, advantage in zip(prompts, rollouts, advantages.tolist(), strict=True)
        ]
        values = self.update(samples)
        ended = time.perf_counter()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step * self.args.prompts_per_step / len(self.source)
        self.num_tokens += sum(len(sample) for sample in samples)
        values |= custom | self.reward_metrics(per_function, totals, advantages) | self.rollout_metrics(rollouts)
        self.source.observe(values["accuracy"])
        if self.state.global_step % self.args.logging_steps == 0:
            self.log.samples(self.sample_rows(samples, prompts, completions, rollouts, per_function, extras))
        return values | {
            "num_tokens": self.num_tokens,
            "step_time": ended - started,
            "time/rollout": generated - started,
            "time/reward": rewarded - generated,
            "time/update": ended - rewarded,
            "tokens/s": sum(len(rollout.ids) for rollout in rollouts) / (ended - started),
        }

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
        return per_function, extras, {f"custom/{name}": sum(v) / len(v) for name, v in custom.items()}

    def update(self, samples):
        """All updates of one rollout: num_iterations passes over updates_per_rollout minibatches. Returns metrics."""
        size = self.args.num_generations * math.ceil(self.args.prompts_per_step / self.args.updates_per_rollout)
        minibatches = [samples[start : start + size] for start in range(0, len(samples), size)]
        for minibatch in minibatches:
            self.set_weights(minibatch, samples, len(minibatches))
        kept = [[sample for sample in minibatch if self.teaches(sample)] for minibatch in minibatches]
        budget = self.args.max_tokens_per_microbatch
        if self.reference is not None:
            every = [sample for minibatch in kept for sample in minibatch]
            for sample, logps in zip(every, score(self.reference, every, self.args.temperature, budget), strict=True):
                sample.ref_logps = logps
        # The first minibatch meets the policy that drew it: its ratio is 1 and its log-probs come for free. The others
        # meet a policy that has moved, so theirs are taken before it does.
        later = [sample for minibatch in kept[1:] for sample in minibatch]
        for sample, logps in zip(later, score(self.model, later, self.args.temperature, budget), strict=True):
            sample.old_logps = logps
        meter = _Meter()
        for _ in range(self.args.num_iterations):
            for minibatch in kept:
                meter.updates += 1
                norm = self.updater.step(minibatch, lambda part, batch: self.loss(part, batch, meter))
                if norm is not None:
                    meter.norms.append(norm)
        return meter.values(self.objective.beta) | {"learning_rate": self.updater.schedule.get_last_lr()[0]}

    def teaches(self, sample):
        """Whether a sample carries gradient: at beta = 0 one without advantage does not, and leaves the batch."""
        return not sample.masked and (self.objective.beta != 0 or sample.advantage != 0)

    def set_weights(self, minibatch, samples, minibatches):
        """The objective's token weights over one update, before any sample is dropped from it."""
        counts = torch.tensor([len(sample.completion_ids) for sample in minibatch])
        masked = torch.tensor([sample.masked for sample in minibatch])
        mask = (~masked).repeat_interleave(counts)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        # dapo's normalizer is the whole rollout's, shared evenly among its updates; bnpo's is the minibatch's own.
        tokens = sum(len(sample.completion_ids) for sample in samples if not sample.masked) / minibatches
        weights = self.objective.token_weights(mask, bounds, num_items_in_batch=tokens)
        for sample, part in zip(minibatch, weights.split(counts.tolist()), strict=True):
            sample.weights = part

    def loss(self, part, batch, meter):
        """The loss of a micro-batch, a sum over its tokens; what it measures goes to the meter."""
        weight, bias = head(self.model)
        out = linear_grpo_loss(
            completion_states(self.model, batch),
            weight,
            batch.targets,
            batch.advantages,
            cu_seqlens=batch.cu_seqlens,
            old_logps=batch.old_logps,
            ref_logps=batch.ref_logps,
            token_weights=batch.weights,
            temperature=self.args.temperature,
            bias=bias,
            return_entropy=True,
            **dataclasses.asdict(self.objective),
        )
        meter.add(out, batch)
        if batch.old_logps is None and self.args.num_iterations > 1:
            for sample, logps in zip(part, _split(out.logps, part), strict=True):
                sample.old_logps = logps
        elif batch.old_logps is not None:
            for sample, share in zip(part, self.clipped_share(out.logps, part), strict=True):
                sample.clipped = share
        return out.loss

    def clipped_share(self, logps, part):
        """The share of each sample's tokens whose ratio lies on the clipped side."""
        low, high = 1 - self.objective.epsilon, 1 + self.objective.epsilon_high
        for sample, now in zip(part, _split(logps, part), strict=True):
            log_ratio = now - sample.old_logps.to(now.device)
            if self.objective.importance_sampling_level == "sequence":
                log_ratio = log_ratio.mean().expand(len(now))
            ratio = log_ratio.exp()
            yield (ratio > high if sample.advantage > 0 else ratio < low).float().mean()

    def reward_metrics(self, per_function, totals, advantages):
        """How the completions of a step were rewarded."""
        groups = advantages.view(-1, self.args.num_generations)
        spread = (groups != 0).any(1).double().mean().item()
        std = totals.view(-1, self.args.num_generations).std(1)
        values = {
            "reward": totals.nanmean().item(),
            "reward_std": std.nanmean().item(),
            "accuracy": (per_function[:, 0] >= 1).double().mean().item(),
            "frac_reward_zero_std": 1 - spread,
            "frac_informative": spread,
            "advantage/mean": advantages.mean().item(),
            "advantage/abs_mean": advantages.abs().mean().item(),
        }
        for name, column in zip(self.rewards.names, per_function.T, strict=True):
            given = column[~column.isnan()]
            if len(given):
                values[f"rewards/{name}/mean"] = given.mean().item()
                values[f"rewards/{name}/std"] = given.std(correction=0).item()
        if hasattr(self.source, "level"):
            values["curriculum/level"] = self.source.level
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def rollout_metrics(self, rollouts):
        """How long the completions of a step were."""
        return {
            "completions/mean_length": sum(len(rollout.ids) for rollout in rollouts) / len(rollouts),
            "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        }

    def sample_rows(self, samples, prompts, completions, rollouts, per_function, extras):
        """Lines of samples.jsonl: every completion of the step."""
        for i, (sample, rollout) in enumerate(zip(samples, rollouts, strict=True)):
            verdicts = zip(self.rewards.names, per_function[i].tolist(), strict=True)
            yield {
                "step": self.state.global_step,
                "group": i // self.args.num_generations,
                "prompt": prompts[i].prompt,
                "completion": completions[i],
                "rewards": {name: None if math.isnan(value) else value for name, value in verdicts},
                "advantage": sample.advantage,
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.ids),
                "clipped": float(sample.clipped),
                **{name: values[i] for name, values in extras.items()},
            }

    def evaluate(self):
        """Greedy accuracy on the held-out rows, logged. Returns its metrics, or None without such rows."""
        if not self.eval_rows:
            return None
        values = evaluate(self.engine, self.tokenizer, self.eval_rows, self.rewards, self.sampling, self.state)
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
        files = (checkpoint, "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json", "config.json")
        names = ("checkpoint", "metrics", "samples", "curves", "summary", "config")
        shown = {name: value for name, value in summary.items() if value is not None}
        self.log.say(
            "\n"
            + table(
                [
                    *shown.items(),
                    *((n, self.log.dir / f if f != checkpoint else f) for n, f in zip(names, files, strict=True)),
                ]
            )
        )
        return summary


def stop_token_ids(model, tokenizer):
    """The ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(ids - {None}))


def _split(values, part):
    return values.split([len(sample.completion_ids) for sample in part])


class _Meter:
    """Sums what the micro-batches of a step measure, on the device; one look at it, at the end."""

    def __init__(self):
        self.sums, self.norms, self.updates = defaultdict(list), [], 0

    def add(self, out, batch):
        tokens = out.metrics["active_tokens"]
        for name, value in out.metrics.items():
            weighted = name not in ("policy_loss", "ratio/max", "active_tokens")
            self.sums[name].append(value * tokens if weighted else value)
        self.sums["loss"].append(out.loss.detach())
        if batch.old_logps is None and batch.sampler_logps is not None:
            gap = (out.logps - batch.sampler_logps).abs() * out.active
            self.sums["rollout/logp_gap"].append(gap.sum())
            self.sums["gap_tokens"].append(out.active.sum())

    def values(self, beta):
        sums = {name: torch.stack([torch.as_tensor(v).cpu().double() for v in vs]) for name, vs in self.sums.items()}
        if not sums:
            return {"loss": 0.0, "policy_loss": 0.0}
        tokens = max(sums.pop("active_tokens").sum().item(), 1)
        gap_tokens = max(sums.pop("gap_tokens", torch.ones(1)).sum().item(), 1)
        values = {}
        for name, parts in sums.items():
            if name == "ratio/max":
                values[name] = parts.max().item()
            elif name in ("loss", "policy_loss"):
                values[name] = parts.sum().item() / self.updates
            else:
                values[name] = parts.sum().item() / (gap_tokens if name == "rollout/logp_gap" else tokens)
        if beta == 0:
            values.pop("kl", None)
        if self.norms:
            values["grad_norm"] = torch.stack(self.norms).double().mean().item()
        return values
