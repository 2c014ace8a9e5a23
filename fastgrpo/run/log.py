"""The one place to which a run logs: progress bar, metrics.jsonl, samples.jsonl, TensorBoard and W&B.

`METRICS` lists every metric with its meaning and unit. A metric that TRL has too goes by TRL's name. An active token is
a completion token that carries gradient: its completion is not masked, and its weight in the loss is not 0.
"""

import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from fastgrpo.config.fields import did_you_mean
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run.checkpoint import step_of
from fastgrpo.run.resume import open_run

METRICS = {
    "loss": "mean of the loss over the updates of a step; it is near 0 on the first update of a rollout, where all "
    "ratios are 1 and the advantages of a group add up to 0, although the gradient is not 0",
    "policy_loss": "the loss without its KL and entropy terms",
    "reward": "mean of the completions' total reward, the weighted sum over the reward functions",
    "reward_std": "standard deviation of the total reward within a group, averaged over the groups",
    "rewards/{function}/mean": "mean of what one reward function gave, before it is weighted",
    "rewards/{function}/std": "standard deviation of what one reward function gave, over the completions of the step",
    "rewards/{function}/errors": "number of completions on which one reward function failed, summed over the logged "
    "steps; with --reward_errors skip",
    "accuracy": "share of completions to which the first reward function gave at least 1",
    "frac_reward_zero_std": "share of groups whose advantages are all 0, which teach nothing",
    "frac_informative": "share of groups with an advantage that is not 0",
    "dynamic_sampling/num_gen_batches": "batches of prompts that were drawn for one step, with --dynamic_sampling",
    "dynamic_sampling/dropped_groups": "groups that were drawn and that the step did not train on",
    "dynamic_sampling/filled_groups": "groups that teach nothing and were trained on nevertheless, because "
    "max_num_gen_batches was reached",
    "oversampling/aborted_groups": "groups that were started and aborted, with --oversampling_factor",
    "oversampling/aborted_tokens": "completion tokens of aborted groups, which were drawn and thrown away",
    "advantage/mean": "mean of the advantages",
    "advantage/abs_mean": "mean magnitude of the advantages",
    "kl": "estimated KL divergence to the reference, nats per active token; absent at beta 0",
    "ref/kl_error": "KL divergence (k3 estimate) from the exact reference to the quantized one that is used in its "
    "place, nats per token; measured in the first step, with --ref_quantization",
    "entropy": "mean entropy of the policy at the active tokens, nats; measured in logged steps only",
    "ratio/mean": "mean over active tokens of the ratio of the policy's probability to the old policy's",
    "ratio/max": "largest ratio of the policy's probability to the old policy's",
    "clip_ratio/low_mean": "share of active tokens that were clipped at the lower bound of the ratio",
    "clip_ratio/high_mean": "share of active tokens that were clipped at the upper bound of the ratio",
    "completions/mean_length": "mean length of the completions in tokens",
    "completions/min_length": "length of the shortest completion in tokens",
    "completions/max_length": "length of the longest completion in tokens",
    "completions/clipped_ratio": "share of completions that were truncated at max_completion_length",
    "rollout/tokens/s": "completion tokens per second of generation",
    "rollout/share": "share of the step's time that generation took",
    "rollout/live_mean": "mean number of lanes (completions in flight) over the decoding steps of a rollout",
    "rollout/live_share": "rollout/live_mean as a share of the largest number of lanes: how full the device was kept",
    "rollout/logp_gap_max": "largest absolute difference of the sampler's and the trainer's log-prob of a token, nats",
    "sampling/importance_sampling_ratio/min": "smallest importance weight of the policy against the distribution that "
    "was drawn from, over active tokens, with --importance_sampling_mode",
    "sampling/importance_sampling_ratio/mean": "mean importance weight over active tokens, as it was used",
    "sampling/importance_sampling_ratio/max": "largest importance weight over active tokens",
    "sampling/sampling_logp_difference/mean": "mean absolute difference of the old policy's log-probs and those of the "
    "distribution that was drawn from, nats",
    "sampling/sampling_logp_difference/max": "largest such difference, nats",
    "rollout/logp_gap": "mean absolute difference of the sampler's and the trainer's log-probs of active tokens, nats",
    "grad_norm": "norm of the gradient before clipping, averaged over the updates of a step that were not skipped",
    "skipped_updates": "number of updates, summed over the logged steps, that left the weights unchanged because the "
    "loss or the gradient was not finite",
    "learning_rate": "learning rate of the last update",
    "num_tokens": "prompt and completion tokens since the start of the run, with those of dropped and aborted groups",
    "curriculum/level": "index of the curriculum's level that prompts are drawn from",
    "step_time": "seconds of the whole step",
    "time/rollout": "seconds of generation",
    "time/reward": "seconds of the reward functions",
    "time/reference": "seconds of the reference's forward passes",
    "time/forward": "seconds of the policy's layers, and of scoring old log-probs where a later update needs them",
    "time/loss": "seconds of the head and the loss, with the part of their backward pass that runs in the forward pass",
    "time/backward": "seconds of the backward passes",
    "time/optimizer": "seconds of gradient clipping and of the optimizer",
    "time/other": "seconds of the step that are in no other time/ metric",
    "mfu": "model FLOPs utilization: the update's FLOPs, divided by its seconds (forward to optimizer) and by the peak "
    "FLOP/s of the GPU in 16 bits; absent where the peak is not known",
    "memory/peak_gib": "largest GPU memory that torch had allocated during the step, GiB; CUDA only",
    "tokens/s": "completion tokens per second of the whole step",
    "custom/{name}": "mean of the values that reward functions passed to log_metric under this name",
    "eval/accuracy": "share of held-out prompts whose greedy completion the first reward function gives at least 1",
    "eval/rewards/{function}/mean": "mean of one reward function over the greedy completions of held-out prompts",
    "eval/rewards/{function}/errors": "number of greedy completions on which one reward function failed, with "
    "--reward_errors skip",
    "eval/format_rate": "share of greedy completions with the full mark of the reward function named ...format_reward; "
    "absent without one",
    "eval/mean_length": "mean length of the greedy completions in tokens",
    "eval/clipped_ratio": "share of greedy completions that were truncated at max_completion_length",
    "eval/pass@{k}": "probability that at least one of k sampled completions of a held-out prompt is right",
    "eval/maj@{k}": "probability that the most frequent answer among k sampled completions is right",
    "eval/sampled/rewards/{function}/mean": "mean of one reward function over the sampled completions of held-out "
    "prompts",
    "eval/sampled/rewards/{function}/errors": "number of sampled completions on which one reward function failed, with "
    "--reward_errors skip",
    "eval/sampled/format_rate": "share of sampled completions with the full mark of the reward function named "
    "...format_reward; absent without one",
    "eval/sampled/mean_length": "mean length of the sampled completions in tokens",
    "eval/sampled/clipped_ratio": "share of sampled completions that were truncated at max_completion_length",
    "eval/{metric}/ci95_low": "lower end of the 95% confidence interval of an eval metric; "
    "fastgrpo/evaluation/estimators.py explains the intervals",
    "eval/{metric}/ci95_high": "upper end of the 95% confidence interval of an eval metric",
    "eval/time": "seconds of the evaluation",
}


def check_metric(name: str | None) -> None:
    """Check that a name is the name of a metric.

    Args:
        name: The name to check. None passes.

    Raises:
        ValueError: There is no such metric. The error names the one that is most similar.
    """
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(known)) for known in METRICS]
    if name is not None and not any(re.fullmatch(pattern, name) for pattern in patterns):
        raise ValueError(f"unknown metric {name!r}{did_you_mean(name, METRICS)}")


class RunLog:
    """The log of a run, and the owner of the run's folder.

    Creating one claims the folder (see `open_run`) and, for a new run, writes config.json. It is a context manager:
    leaving it closes the files and releases the folder.

    Attributes:
        folder: The `RunFolder`.
        dir: The path of the folder.
        started: The time of `time.perf_counter` at which the run began.
        checkpoint: The path of the checkpoint that the run continues from, or None.
        latest: The (step, value) that was last written of every metric, by name.

    Args:
        config: The settings of the run.
        inputs: What the run reads, by what it is called in an error. None of it may lie in the folder of the run.

    Raises:
        ValueError: metric_for_best_model names no metric, the folder cannot be claimed, or a package that report_to
            needs is not installed.
    """

    def __init__(self, config: GRPOConfig, inputs: Mapping[str, Path] | None = None) -> None:
        self.started = time.perf_counter()
        self.config = config
        check_metric(config.metric_for_best_model)
        self.folder, self.checkpoint = open_run(config, self.say, inputs)
        self.dir = self.folder.path
        try:
            if self.checkpoint is None:
                self._write_config()
            self._metrics, self._samples = (_appending(self.folder.claim(f"{name}.jsonl")) for name in _LINES)
            self._writers = [_WRITERS[name](self) for name in config.report_to if name != "none"]
        except BaseException:
            self.folder.close()
            raise
        self._pending = []  # (step, metrics) of the steps that no line of metrics.jsonl covers yet
        self.latest = {}
        self.bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace):
        try:
            # After an error these steps would be lost. A run that a signal stopped has saved them in its checkpoint.
            if error is not None and self._pending:
                self._reduce()
        finally:
            self.close()

    def _write_config(self):
        resolved = {**dataclasses.asdict(self.config), "output_dir": str(self.dir)}
        self.folder.claim("config.json").write_text(json.dumps(resolved, indent=2) + "\n")

    def say(self, text: str) -> None:
        """Print a text above the progress bar.

        Args:
            text: One or more lines.
        """
        tqdm.write(text, file=sys.stdout)

    def progress(self, total: int, name: str, done: int = 0) -> None:
        """Start a progress bar in place of the one before it. `advance` moves it.

        Args:
            total: The count at which the bar is full.
            name: The text in front of the bar.
            done: The count that the bar starts from.
        """
        self.close_bar()
        self.bar = tqdm(total=total, initial=done, desc=name, dynamic_ncols=True, file=sys.stderr)

    def advance(self, count: int = 1, **values: float) -> None:
        """Move the progress bar.

        Args:
            count: How far to move it.
            values: Numbers to show behind the bar, by their names there. Without any, the earlier ones stay.
        """
        if values:
            self.bar.set_postfix({name: f"{value:.3g}" for name, value in values.items()}, refresh=False)
        self.bar.update(count)

    def close_bar(self) -> None:
        """Close the progress bar, if there is one."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def step(self, step: int, values: dict[str, float], last: bool = False) -> None:
        """Take the metrics of one step. Every logging_steps steps their means become one line of metrics.jsonl.

        Args:
            step: The number of steps that are done.
            values: The metrics of the step by name.
            last: Whether this is the last step of the run, after which a line is written in any case.
        """
        self._pending.append((step, values))
        if step % self.config.logging_steps == 0 or last:
            self._reduce()

    def _reduce(self):
        """Write one line for the steps that are pending, each metric reduced over them as `_REDUCED` says."""
        rows = [values for _, values in self._pending]
        names = dict.fromkeys(name for values in rows for name in values)
        means = {}
        for name in names:
            seen = [values[name] for values in rows if name in values]
            counted = name.startswith("rewards/") and name.endswith("/errors")  # custom/NAME may end in the same way
            means[name] = (sum if counted else _REDUCED.get(name, _mean))(seen)
        step, self._pending = self._pending[-1][0], []
        self.write(step, means)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one line of metrics.jsonl at once, and report it to TensorBoard and W&B where they are used.

        Args:
            step: The number of steps that are done.
            values: The metrics of the line by name.
        """
        self._metrics.write(_line({"step": step, **values}))
        self._metrics.flush()
        self.latest |= {name: (step, value) for name, value in values.items()}
        for writer in self._writers:
            writer(step, values)

    def samples(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write lines of samples.jsonl.

        Args:
            rows: One dict for each line, of values that JSON can hold.
        """
        self._samples.writelines(_line(row) for row in rows)
        self._samples.flush()

    def close(self) -> None:
        """Close the progress bar and the files, and release the folder."""
        self.close_bar()
        for file in (self._metrics, self._samples, self.folder):
            file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the log stands, as JSON can hold it.

        Returns:
            The seconds of the run so far, the metrics of the steps that are pending, and the sizes of metrics.jsonl
            and samples.jsonl in bytes.
        """
        return {
            "wall_seconds": time.perf_counter() - self.started,
            "pending": self._pending,
            "metrics_bytes": os.fstat(self._metrics.fileno()).st_size,
            "samples_bytes": os.fstat(self._samples.fileno()).st_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to where the log stood at a checkpoint.

        Lines of metrics.jsonl and samples.jsonl that were written after the checkpoint are cut off. config.json is
        replaced by the settings of the resumed run.

        Args:
            state: What `state_dict` returned.
        """
        self._write_config()
        self.started = time.perf_counter() - state["wall_seconds"]
        self._pending = state["pending"]
        for file, size in ((self._metrics, state["metrics_bytes"]), (self._samples, state["samples_bytes"])):
            if os.fstat(file.fileno()).st_size < size:
                self.say(f"warning: {file.name} has lost lines that were there when the checkpoint was written")
            else:
                file.truncate(size)


def _appending(path):
    """Open a file of lines to append to. A lone surrogate becomes an escape of JSON: UTF-8 cannot encode it."""
    try:
        return open(path, "a", encoding="utf-8", errors="backslashreplace")
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder where the run needs a file; move it away") from None


def _line(row):
    """Write a row as one line of JSON. JSON has no NaN and no infinity, so these become null, at any depth."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False) + "\n"


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tensorboard(log):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("report_to tensorboard needs a package that is missing: pip install tensorboard") from None

    # purge_step hides the values that the interrupted run wrote after the checkpoint.
    purge_step = None if log.checkpoint is None else step_of(log.checkpoint) + 1
    writer = SummaryWriter(log.folder.claim("tensorboard"), purge_step=purge_step)

    def write(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(log):
    try:
        import wandb
    except ImportError:
        raise ValueError("report_to wandb needs a package that is missing: pip install wandb") from None
    log.folder.claim("wandb")  # it makes this folder inside of the run's
    run = wandb.init(project="fastgrpo", name=log.dir.name, dir=log.dir, config=dataclasses.asdict(log.config))
    return lambda step, values: run.log(values, step=step)


def _mean(values):
    return math.fsum(values) / len(values)


def _last(values):
    return values[-1]


_LINES = ("metrics", "samples")  # the names of the .jsonl files
# How the values of logging_steps steps become one where their mean would be wrong. `_reduce` adds up the errors.
_REDUCED = {
    "num_tokens": _last,
    "learning_rate": _last,
    "curriculum/level": _last,
    "ratio/max": max,
    "completions/min_length": min,
    "completions/max_length": max,
    "skipped_updates": sum,
    "rollout/logp_gap_max": max,
    "sampling/importance_sampling_ratio/min": min,
    "sampling/importance_sampling_ratio/max": max,
    "sampling/sampling_logp_difference/max": max,
    "memory/peak_gib": max,
}
_WRITERS = {"tensorboard": _tensorboard, "wandb": _wandb}
