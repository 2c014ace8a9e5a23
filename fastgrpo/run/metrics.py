"""The metrics of a run: meaning and unit, reduction over steps, and TRL's names.

Metrics of TRL have TRL's names. An active token is a completion token with a gradient: its completion is not masked,
and its weight in the loss is not 0.

Values that a reward function passes to log_metric are averaged into a metric NAME, in evaluations eval/NAME and
eval/sampled/NAME.

`state.log_history` has one entry per line of metrics.jsonl, with held-out metrics under TRL's names. "eval_reward" is
the mean total reward of the sampled completions, or of the greedy ones if none were sampled.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

METRICS = {
    "loss": "mean of the loss over the updates of a step. In supervised training it is the negative log-likelihood of "
    "a token, nats. In GRPO it is near 0 on the first update of a rollout, where all ratios are 1 and the "
    "advantages of a group add up to 0, although the gradient is not 0",
    "policy_loss": "the loss without its KL and entropy terms",
    "reward": "mean of the completions' total reward, the weighted sum over the reward functions",
    "reward_std": "standard deviation of the total reward within a group, averaged over the groups",
    "rewards/{function}/mean": "mean of one reward function, without its weight",
    "rewards/{function}/std": "standard deviation of one reward function over the completions of the step",
    "rewards/{function}/errors": "number of completions on which one reward function failed, summed over the logged "
    "steps; with --reward_errors skip",
    "rewards/{function}/timeouts": "number of completions for which one reward function took longer than "
    "--reward_timeout, summed over the logged steps",
    "accuracy": "share of completions with at least 1 from the first reward function",
    "frac_reward_zero_std": "share of groups whose advantages are all 0",
    "frac_informative": "share of groups with an advantage that is not 0",
    "dynamic_sampling/num_gen_batches": "batches of prompts that were drawn for one step, with --dynamic_sampling",
    "dynamic_sampling/dropped_groups": "drawn groups that the step did not train on",
    "dynamic_sampling/filled_groups": "groups of equal rewards that the step trained on, after "
    "dynamic_sampling batches",
    "oversampling/aborted_groups": "aborted groups, with --oversampling_factor",
    "oversampling/aborted_tokens": "drawn completion tokens of aborted groups",
    "advantage/mean": "mean of the advantages",
    "advantage/abs_mean": "mean magnitude of the advantages",
    "kl": "KL divergence to the reference, nats per active token: estimated, or exact with kl=full; absent at beta 0",
    "ref/kl_error": "KL divergence (k3 estimate) from the exact to the quantized reference, nats per token; "
    "measured in the first step, with a quantized --ref_storage",
    "entropy": "mean entropy of the policy at the active tokens, nats; measured in logged steps only",
    "aux_loss": "load-balancing loss of a mixture of experts, without its coefficient; the number of experts of "
    "a token if they are balanced, else more",
    "ratio/mean": "mean over active tokens of the ratio of the policy's probability to the old policy's",
    "ratio/max": "largest ratio of the policy's probability to the old policy's",
    "clip_ratio/low_mean": "share of active tokens that were clipped at the lower bound of the ratio",
    "clip_ratio/high_mean": "share of active tokens that were clipped at the upper bound of the ratio",
    "clip_ratio/region_mean": "share of active tokens that were clipped at either bound",
    "completions/mean_length": "mean length of the completions in tokens",
    "completions/min_length": "length of the shortest completion in tokens",
    "completions/max_length": "length of the longest completion in tokens",
    "completions/mean_terminated_length": "mean length in tokens of the completions that were not truncated",
    "completions/min_terminated_length": "length in tokens of the shortest completion that was not truncated",
    "completions/max_terminated_length": "length in tokens of the longest completion that was not truncated",
    "completions/clipped_ratio": "share of completions that were truncated at max_completion_length",
    "stop_reason/{reason}": "share of completions that ended for one reason; with tools",
    "tools/call_frequency": "calls of tools per completion",
    "tools/failure_frequency": "share of calls that failed: the tool raised, took too long, or does not exist",
    "tools/{name}/calls": "number of calls of one tool, summed over the logged steps; tools/unknown: nonexistent tools",
    "tools/{name}/failures": "number of these calls that failed, summed over the logged steps",
    "tools/{name}/latency_s": "mean seconds of a call of one tool",
    "rollout/tokens/s": "completion tokens per second of generation",
    "rollout/share": "share of the step's time that generation took",
    "rollout/live_mean": "mean number of lanes (completions in flight) over the decoding steps of a rollout",
    "rollout/live_share": "rollout/live_mean as a share of the largest number of lanes: how full the device was kept",
    "rollout/preemptions": "groups that started again because the KV cache was full; mean over GPUs and batches",
    "sampler/logp_gap_max": "largest absolute difference of the sampler's and the trainer's log-prob of a token, nats",
    "sampler/version_min": "training steps of the oldest weights that drew a token of the step",
    "sampler/version_max": "training steps of the newest weights that drew a token of the step",
    "sampler/staleness_{k}": "share of drawn tokens whose weights were k steps old; with --max_staleness",
    "sampler/idle_s": "seconds without a request at vLLM servers; the trainer waits for them during time/rollout",
    "sampling/importance_sampling_ratio/min": "smallest importance weight of policy to sampler over active "
    "tokens, with --importance_sampling_mode",
    "sampling/importance_sampling_ratio/mean": "mean importance weight over active tokens, after truncation or mask",
    "sampling/importance_sampling_ratio/max": "largest importance weight over active tokens",
    "sampling/sampling_logp_difference/mean": "mean absolute difference of log-probs between old policy and "
    "sampler, nats",
    "sampling/sampling_logp_difference/max": "largest such difference, nats",
    "sampler/logp_gap_mean": "mean absolute difference of the sampler's and the trainer's log-probs of active tokens, "
    "nats",
    "sampler/kl": "KL divergence (k3 estimate) from the sampler to the trainer's policy, nats per active token",
    "head/kept_columns": "share of the vocabulary over which the head's backward pass runs, with "
    "--head_backward_tolerance",
    "head/dropped_mass": "largest share of the probability besides the drawn token that the gradient of a token "
    "drops, at most --head_backward_tolerance",
    "grad_norm": "norm of the gradient before clipping, averaged over the updates of a step that were not skipped",
    "entropy_coef": "coefficient of the entropy bonus, after the last update if it is adaptive; absent if 0",
    "skipped_updates": "number of updates, summed over the logged steps, that left the weights unchanged because the "
    "loss or the gradient was not finite",
    "learning_rate": "learning rate of the last update",
    "num_tokens": "prompt and completion tokens, drawn or learned, since the start of the run, including dropped and "
    "aborted groups",
    "curriculum/level": "index of the current level of the curriculum",
    "step_time": "seconds of the whole step",
    "time/rollout": "seconds of generation",
    "time/reward": "seconds of the reward functions",
    "time/reference": "seconds of the reference's forward passes",
    "time/forward": "seconds of the policy's layers, and of scoring old log-probs where a later update needs them",
    "time/loss": "seconds of the head and the loss, with the part of their backward pass that runs in the forward pass",
    "time/backward": "seconds of the backward passes",
    "time/optimizer": "seconds of the sum of the gradients over ranks, of clipping and of the optimizer",
    "time/other": "seconds of the step that are in no other time/ metric",
    "mfu": "model FLOPs utilization: the update's FLOPs, divided by its seconds (forward to optimizer) and by the peak "
    "FLOP/s of the GPU in 16 bits; absent if the peak is unknown",
    "memory/peak_gib": "peak GPU memory of torch and KV cache in the step, on the GPU with the most, GiB; only on GPUs",
    "tokens/s": "completion tokens, drawn or learned, per second of the whole step",
    "epoch": "passes over the training rows since the start of the run",
    "eval/loss": "in supervised training, mean negative log-likelihood of a token of held-out completions, nats. In "
    "GRPO, loss of the sampled completions of held-out prompts as one batch, without an update; if none were sampled, "
    "of the greedy ones, which have no advantage",
    "eval/accuracy": "share of held-out prompts whose greedy completion gets at least 1 from the first reward "
    "function; with one prompt, share of its sampled completions, if any",
    "eval/reward": "mean of the total reward of the greedy completions of held-out prompts",
    "eval/rewards/{function}/mean": "mean of one reward function over the greedy completions of held-out prompts",
    "eval/rewards/{function}/errors": "number of greedy completions on which one reward function failed, with "
    "--reward_errors skip",
    "eval/rewards/{function}/timeouts": "number of greedy completions for which one reward function took longer than "
    "--reward_timeout",
    "eval/format_rate": "share of greedy completions with the maximum of the reward function whose name ends in "
    "format_reward; absent without one",
    "eval/mean_length": "mean length of the greedy completions in tokens",
    "eval/clipped_ratio": "share of greedy completions that were truncated at max_completion_length",
    "eval/pass@{k}": "probability that at least one of k sampled completions of a held-out prompt is right",
    "eval/maj@{k}": "probability that the most frequent answer among k sampled completions is right",
    "eval/sampled/reward": "mean of the total reward of the sampled completions of held-out prompts",
    "eval/sampled/rewards/{function}/mean": "mean of one reward function over the sampled completions of held-out "
    "prompts",
    "eval/sampled/rewards/{function}/errors": "number of sampled completions on which one reward function failed, with "
    "--reward_errors skip",
    "eval/sampled/rewards/{function}/timeouts": "number of sampled completions for which one reward function took "
    "longer than --reward_timeout",
    "eval/sampled/format_rate": "share of sampled completions with the maximum of the reward function whose name "
    "ends in format_reward; absent without one",
    "eval/sampled/mean_length": "mean length of the sampled completions in tokens",
    "eval/sampled/clipped_ratio": "share of sampled completions that were truncated at max_completion_length",
    "eval/{metric}/ci95_low": "lower end of the 95% confidence interval of an eval metric; "
    "fastgrpo/evaluation/estimators.py explains the intervals",
    "eval/{metric}/ci95_high": "upper end of the 95% confidence interval of an eval metric",
    "eval/time": "seconds of the evaluation",
}

# The columns of samples.jsonl in order; `ratios` and `clipped_tokens` only if tokens have ratios, and the last two only
# of completions with tools.
SAMPLE_COLUMNS = (
    "step", "group", "prompt", "completion", "rewards", "advantage", "finish_reason", "tokens", "clipped",
    "token_ends", "logps", "ratios", "clipped_tokens", "turns", "calls",
)  # fmt: skip
_PATTERNS = {known: re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(known))) for known in METRICS}


def is_known(name: str) -> bool:
    """Return whether a name is a metric of the table, or the step of a line."""
    return name == "step" or any(pattern.fullmatch(name) for pattern in _PATTERNS.values())


def meaning(name: str) -> str:
    """Return the meaning of a metric, also of a named held-out data set (eval_easy/...); empty if unknown."""
    name = re.sub("^(eval|test)(_[^/]+)?/", "eval/", name)
    # The last one: a bound of eval/pass@{k} also matches the pattern of eval/pass@{k}.
    return next((METRICS[known] for known, one in reversed(_PATTERNS.items()) if one.fullmatch(name)), "")


def mean_given(values: Sequence[float]) -> float:
    """Average the numbers that a reward function logged, without NaN as in TRL; NaN if all are."""
    given = [value for value in values if not math.isnan(value)]
    return _mean(given) if given else math.nan


def reduced(name: str, values: Sequence[float]) -> float:
    """Reduce the values of a metric over several steps to one value."""
    if _COUNTS.fullmatch(name):
        return sum(values)
    return (_REDUCED.get(name) or (_mean if is_known(name) else mean_given))(values)


def _mean(values):
    return math.fsum(values) / len(values)


def _last(values):
    return values[-1]


_COUNTS = re.compile("rewards/.+/(errors|timeouts)|tools/.+/(calls|failures)")

# Reductions over logging_steps steps other than the mean. `reduced` sums counts.
_REDUCED = {
    "num_tokens": _last,
    "learning_rate": _last,
    "curriculum/level": _last,
    "epoch": _last,
    "ratio/max": max,
    "head/dropped_mass": max,
    "completions/min_length": min,
    "completions/max_length": max,
    "completions/min_terminated_length": min,
    "completions/max_terminated_length": max,
    "skipped_updates": sum,
    "sampler/logp_gap_max": max,
    "sampler/version_min": min,
    "sampler/version_max": max,
    "sampling/importance_sampling_ratio/min": min,
    "sampling/importance_sampling_ratio/max": max,
    "sampling/sampling_logp_difference/max": max,
    "memory/peak_gib": max,
}


RENAMED = {
    "mean_length": "completions/mean_length",
    "clipped_ratio": "completions/clipped_ratio",
    "time": "runtime",
}  # names after eval/ that differ from TRL's
SAMPLED = "sampled/"
LEARNING_RATE = "learning_rate"  # every line of training has it, and no line of an evaluation


def evaluated(values: Mapping[str, float], prefix: str = "eval") -> dict[str, float]:
    """Rename the metrics of an evaluation as in TRL."""
    named, drawn = {}, {}
    for name, value in values.items():
        rest = name.removeprefix(f"{prefix}/")
        into = drawn if rest.startswith(SAMPLED) else named
        rest = rest.removeprefix(SAMPLED)
        into[f"{prefix}_{RENAMED.get(rest, rest)}"] = value
    return named | drawn


def entry(step: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Make the log_history entry of a line of metrics.jsonl."""
    made = {}
    for name, value in values.items():
        before, slash, _ = name.partition("/")
        # A line belongs to training or to one evaluation, whose metrics share a prefix.
        if slash and LEARNING_RATE not in values:
            made.setdefault(before, {})[name] = value
        else:
            made[name] = value
    held_out = [prefix for prefix, group in made.items() if isinstance(group, dict)]
    for prefix in held_out:
        made |= evaluated(made.pop(prefix), prefix)
    return {name: finite(value) for name, value in made.items()} | {"step": step}


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, also in lists and dicts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def metrics_of(line: bytes | str) -> dict[str, Any] | None:
    """Read one line of metrics.jsonl: the step and the metrics, or None."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    # A large int cannot be a float.
    ints = all(v is None or isinstance(v, float) or (isinstance(v, int) and abs(v) < 2**63) for v in row.values())
    return row if ints else None


def mean_loss(history: Iterable[Mapping[str, Any]]) -> float:
    """Compute the mean loss of all steps from the means of the logged lines."""
    total, steps, before = 0.0, 0, 0
    for line in history:
        if LEARNING_RATE not in line:  # of an evaluation
            continue
        if line.get("loss") is not None:  # some update was not skipped
            total, steps = total + line["loss"] * (line["step"] - before), steps + line["step"] - before
        before = line["step"]
    return total / steps if steps else 0.0


def last_training(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last entry of training."""
    return dict(next((line for line in reversed(history) if LEARNING_RATE in line), {}))


class Summary(dict):
    """The summary of a run: a dict with the attributes of transformers' `TrainOutput`."""

    def __init__(self, summary: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        super().__init__(summary)
        self.metrics = dict(metrics)

    @property
    def global_step(self) -> int:
        """Number of steps of the run."""
        return self["steps"]

    @property
    def training_loss(self) -> float:
        """Mean loss over the steps."""
        return self.metrics["train_loss"]
