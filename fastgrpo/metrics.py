"""One sink for everything a run measures: progress bar, metrics.jsonl, samples.jsonl, TensorBoard, W&B.

`METRICS` is the table of names and units; names are TRL's where they mean the same.
"""

import dataclasses
import json
import math
import sys
import time

from tqdm import tqdm

from fastgrpo.checkpoint import claim_output_dir

METRICS = {
    "loss": "the objective's value, the mean over a step's updates; near 0 on the first one of a rollout is right: "
    "ratios are 1 and advantages cancel, the gradient does not",
    "policy_loss": "the loss without its KL term",
    "reward": "mean total reward of the completions",
    "reward_std": "mean over groups of the standard deviation of the total reward",
    "rewards/{function}/mean": "mean of one reward function, unweighted",
    "rewards/{function}/std": "its standard deviation",
    "accuracy": "share of completions whose first reward function gives at least 1",
    "frac_reward_zero_std": "share of groups without spread, which teach nothing",
    "frac_informative": "share of groups with spread",
    "advantage/mean": "mean advantage",
    "advantage/abs_mean": "mean magnitude of the advantages",
    "kl": "mean KL estimate to the reference over active tokens, nats (absent at beta 0)",
    "entropy": "mean entropy of the policy over active tokens, nats",
    "ratio/mean": "mean of policy / old policy over active tokens",
    "ratio/max": "the largest one",
    "clip_ratio/low_mean": "share of active tokens clipped below",
    "clip_ratio/high_mean": "share of active tokens clipped above",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "share of completions truncated at max_completion_length",
    "rollout/logp_gap": "mean |sampler log-prob - trainer log-prob| over active tokens, nats",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "of the last update",
    "num_tokens": "prompt and completion tokens so far",
    "curriculum/level": "index of the level that prompts are drawn from",
    "step_time": "seconds of the whole step",
    "time/rollout": "seconds of generation",
    "time/reward": "seconds of the reward functions",
    "time/update": "seconds of reference, forward, backward and optimizer",
    "tokens/s": "completion tokens a second of the whole step",
    "custom/{name}": "what a reward function passed to log_metric, averaged",
    "eval/accuracy": "share of held-out prompts answered right, greedy",
    "eval/rewards/{function}/mean": "mean of one reward function on held-out prompts",
    "eval/mean_length": "tokens",
    "eval/time": "seconds of the evaluation",
}


class RunLog:
    """The folder of a run and all that goes into it while it lasts.

    Creating one claims the folder (see `claim_output_dir`) and writes config.json. `started` is when.
    """

    def __init__(self, config):
        self.started = time.perf_counter()
        self.config = config
        self.dir = claim_output_dir(config.output_dir, config.task, config.overwrite_output_dir)
        resolved = {**dataclasses.asdict(config), "output_dir": str(self.dir)}
        (self.dir / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
        self._metrics = open(self.dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open while the run lasts
        self._samples = open(self.dir / "samples.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._writers = [_WRITERS[name](self) for name in config.report_to if name != "none"]
        self._pending = []
        self.bar = None

    def say(self, text):
        """A line above the progress bar."""
        tqdm.write(text, file=sys.stdout)

    def progress(self, total, name):
        """A new progress bar; `advance` moves it."""
        self.close_bar()
        self.bar = tqdm(total=total, desc=name, dynamic_ncols=True, file=sys.stderr)

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
        self._pending.append(values)
        if step % self.config.logging_steps and not last:
            return
        names = dict.fromkeys(name for values in self._pending for name in values)
        means = {}
        for name in names:
            seen = [values[name] for values in self._pending if name in values]
            means[name] = _REDUCED.get(name, _mean)(seen)
        self._pending = []
        self.write(step, means)

    def write(self, step, values):
        """One line of metrics.jsonl, now."""
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")
        self._metrics.flush()
        for writer in self._writers:
            writer(step, values)

    def samples(self, rows):
        """Lines of samples.jsonl."""
        self._samples.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._samples.flush()

    def close(self):
        self.close_bar()
        self._metrics.close()
        self._samples.close()


def _tensorboard(log):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log.dir / "tensorboard")

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
_REDUCED = {"num_tokens": _last, "learning_rate": _last, "curriculum/level": _last, "ratio/max": max}
_WRITERS = {"tensorboard": _tensorboard, "wandb": _wandb}
