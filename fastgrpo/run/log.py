"""One sink for everything a run measures: progress bar, metrics.jsonl, samples.jsonl, TensorBoard, W&B.

`METRICS` is the table of names and units; names are TRL's where they mean the same.
"""

import dataclasses
import json
import math
import os
import re
import sys
import time

from tqdm import tqdm

from fastgrpo.config.fields import did_you_mean
from fastgrpo.run.checkpoint import step_of
from fastgrpo.run.resume import open_run

METRICS = {
    "loss": "the objective's value, the mean over a step's updates; near 0 on the first one of a rollout is right: "
    "ratios are 1 and advantages cancel, the gradient does not",
    "policy_loss": "the loss without its KL term",
    "reward": "mean total reward of the completions",
    "reward_std": "mean over groups of the standard deviation of the total reward",
    "rewards/{function}/mean": "mean of one reward function, unweighted",
    "rewards/{function}/std": "its standard deviation",
    "rewards/{function}/errors": "completions that it failed on, with reward_errors skip (a sum, not a mean)",
    "accuracy": "share of completions whose first reward function gives at least 1",
    "frac_reward_zero_std": "share of groups without spread, which teach nothing",
    "frac_informative": "share of groups with spread",
    "dynamic_sampling/num_gen_batches": "batches of prompts drawn for a step, with --dynamic_sampling",
    "dynamic_sampling/dropped_groups": "groups drawn that the step did not train on",
    "dynamic_sampling/filled_groups": "groups that teach nothing and were trained on all the same: the bound was hit",
    "oversampling/aborted_groups": "groups started and not finished, with --oversampling_factor",
    "oversampling/aborted_tokens": "completion tokens thrown away with them",
    "advantage/mean": "mean advantage",
    "advantage/abs_mean": "mean magnitude of the advantages",
    "kl": "mean KL estimate to the reference over active tokens, nats (absent at beta 0)",
    "ref/kl_error": "first step, with --ref_quantization: mean KL estimate (k3) of the exact reference to it, nats",
    "entropy": "mean entropy of the policy over active tokens, nats, of the step that is logged",
    "ratio/mean": "mean of policy / old policy over active tokens",
    "ratio/max": "the largest one",
    "clip_ratio/low_mean": "share of active tokens clipped below",
    "clip_ratio/high_mean": "share of active tokens clipped above",
    "completions/mean_length": "tokens",
    "completions/min_length": "tokens of the shortest one",
    "completions/max_length": "tokens of the longest one",
    "completions/clipped_ratio": "share of completions truncated at max_completion_length",
    "rollout/tokens/s": "completion tokens a second of generation",
    "rollout/share": "share of the step's time that generation took",
    "rollout/live_mean": "completions in flight, the mean over the generation",
    "rollout/live_share": "the same as a share of the most in flight: how full the device was",
    "rollout/logp_gap_max": "max |sampler log-prob - trainer log-prob| over active tokens, nats",
    "rollout/logp_gap": "mean |sampler log-prob - trainer log-prob| over active tokens, nats",
    "grad_norm": "norm of the gradient before clipping",
    "skipped_updates": "updates whose loss or gradient was not finite: nothing moved (a sum, not a mean)",
    "learning_rate": "of the last update",
    "num_tokens": "prompt and completion tokens so far, those of dropped and aborted groups too",
    "curriculum/level": "index of the level that prompts are drawn from",
    "step_time": "seconds of the whole step",
    "time/rollout": "seconds of generation",
    "time/reward": "seconds of the reward functions",
    "time/reference": "seconds of the reference's forward passes",
    "time/forward": "seconds of the policy's layers, and of old log-probs where a later update needs them",
    "time/loss": "seconds of head and loss, with as much of their backward as runs in their forward",
    "time/backward": "seconds of the backward passes",
    "time/optimizer": "seconds of clipping and the optimizer",
    "time/other": "seconds of all else; with the seven above, the step",
    "mfu": "model FLOPs of the update over its seconds (forward to optimizer) and the GPU's bf16 peak, where known",
    "memory/peak_gib": "most GPU memory that torch held during the step, GiB (CUDA)",
    "tokens/s": "completion tokens a second of the whole step",
    "custom/{name}": "what a reward function passed to log_metric, averaged",
    "eval/accuracy": "share of held-out prompts answered right, greedy",
    "eval/rewards/{function}/mean": "mean of one reward function on held-out prompts, greedy",
    "eval/rewards/{function}/errors": "held-out completions that it failed on, with reward_errors skip",
    "eval/format_rate": "share of greedy completions with the full mark of the format reward, where there is one",
    "eval/mean_length": "tokens, greedy",
    "eval/clipped_ratio": "share truncated, greedy",
    "eval/pass@{k}": "probability that one of k draws is right",
    "eval/maj@{k}": "probability that the most frequent answer of k draws is right",
    "eval/sampled/rewards/{function}/mean": "mean of one reward function on the draws of held-out prompts",
    "eval/sampled/rewards/{function}/errors": "draws that it failed on, with reward_errors skip",
    "eval/sampled/format_rate": "as eval/format_rate, of the draws",
    "eval/sampled/mean_length": "tokens, of the draws",
    "eval/sampled/clipped_ratio": "share truncated, of the draws",
    "eval/{metric}/ci95_low": "where the 95% interval of an eval metric begins: see fastgrpo/estimators.py",
    "eval/{metric}/ci95_high": "and where it ends",
    "eval/time": "seconds of the evaluation",
}


def check_metric(name):
    """Raises ValueError for a name that is no metric (the nearest is named). None is welcome."""
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(known)) for known in METRICS]
    if name is not None and not any(re.fullmatch(pattern, name) for pattern in patterns):
        raise ValueError(f"unknown metric {name!r}{did_you_mean(name, METRICS)}")


class RunLog:
    """The folder of a run and all that goes into it while it lasts.

    Creating one claims the folder (see `open_run`) and, for a new run, writes config.json. `started` is when;
    `checkpoint` is the Path of what the run goes on from, or None; `latest` holds (step, value) of every metric. A
    context: leaving it closes.
    """

    def __init__(self, config):
        self.started = time.perf_counter()
        self.config = config
        check_metric(config.metric_for_best_model)
        self.dir, self._lock, self.checkpoint = open_run(config, self.say)
        if self.checkpoint is None:
            self._write_config()
        self._metrics = open(self.dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open while the run lasts
        self._samples = open(self.dir / "samples.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._writers = [_WRITERS[name](self) for name in config.report_to if name != "none"]
        self._pending = []  # (step, metrics) of what is not yet logged
        self.latest = {}
        self.bar = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is not None and self._pending:  # a run that was told to stop has them in its checkpoint
                self._reduce()
        finally:
            self.close()

    def _write_config(self):
        resolved = {**dataclasses.asdict(self.config), "output_dir": str(self.dir)}
        (self.dir / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")

    def say(self, text):
        """A line above the progress bar."""
        tqdm.write(text, file=sys.stdout)

    def progress(self, total, name, done=0):
        """A new progress bar; `advance` moves it."""
        self.close_bar()
        self.bar = tqdm(total=total, initial=done, desc=name, dynamic_ncols=True, file=sys.stderr)

    def advance(self, count=1, **values):
        """Move the bar, with a few numbers at its end."""
        if values:
            self.bar.set_postfix({name: f"{value:.3g}" for name, value in values.items()}, refresh=False)
        self.bar.update(count)

    def close_bar(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def step(self, step, values, last=False):
        """The metrics of one step; every logging_steps steps their means become a line of metrics.jsonl."""
        self._pending.append((step, values))
        if step % self.config.logging_steps == 0 or last:
            self._reduce()

    def _reduce(self):
        """The steps that are not yet logged become a line."""
        rows = [values for _, values in self._pending]
        names = dict.fromkeys(name for values in rows for name in values)
        means = {}
        for name in names:
            seen = [values[name] for values in rows if name in values]
            means[name] = (sum if name.endswith("/errors") else _REDUCED.get(name, _mean))(seen)
        step, self._pending = self._pending[-1][0], []
        self.write(step, means)

    def write(self, step, values):
        """One line of metrics.jsonl, now."""
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")
        self._metrics.flush()
        self.latest |= {name: (step, value) for name, value in values.items()}
        for writer in self._writers:
            writer(step, values)

    def samples(self, rows):
        """Lines of samples.jsonl."""
        self._samples.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._samples.flush()

    def close(self):
        """Close the files and give the folder free."""
        self.close_bar()
        for file in (self._metrics, self._samples, self._lock):
            file.close()

    def state_dict(self):
        """Seconds so far, metrics of steps not yet logged, and the bytes of metrics.jsonl and samples.jsonl."""
        return {
            "wall_seconds": time.perf_counter() - self.started,
            "pending": self._pending,
            "metrics_bytes": os.fstat(self._metrics.fileno()).st_size,
            "samples_bytes": os.fstat(self._samples.fileno()).st_size,
        }

    def load_state_dict(self, state):
        """Undo `state_dict`: rows that came after it are cut. config.json is the resumed run's from here on."""
        self._write_config()
        self.started = time.perf_counter() - state["wall_seconds"]
        self._pending = state["pending"]
        for file, size in ((self._metrics, state["metrics_bytes"]), (self._samples, state["samples_bytes"])):
            if os.fstat(file.fileno()).st_size < size:
                self.say(f"warning: {file.name} has lost rows that were there when the checkpoint was written")
            else:
                file.truncate(size)


def _tensorboard(log):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("report_to tensorboard needs the package: pip install tensorboard") from None

    purge_step = None if log.checkpoint is None else step_of(log.checkpoint) + 1  # what came after it is hidden
    writer = SummaryWriter(log.dir / "tensorboard", purge_step=purge_step)

    def write(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(log):
    try:
        import wandb
    except ImportError:
        raise ValueError("report_to wandb needs the package: pip install wandb") from None
    run = wandb.init(project="fastgrpo", name=log.dir.name, dir=log.dir, config=dataclasses.asdict(log.config))
    return lambda step, values: run.log(values, step=step)


def _mean(values):
    return math.fsum(values) / len(values)


def _last(values):
    return values[-1]


# How the values of logging_steps steps become one, where not by their mean.
_REDUCED = {
    "num_tokens": _last,
    "learning_rate": _last,
    "curriculum/level": _last,
    "ratio/max": max,
    "completions/min_length": min,
    "completions/max_length": max,
    "skipped_updates": sum,
    "rollout/logp_gap_max": max,
    "memory/peak_gib": max,
}
_WRITERS = {"tensorboard": _tensorboard, "wandb": _wandb}
