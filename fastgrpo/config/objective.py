"""Settings of the learning signal: advantages, the loss, and the reference.

Those that `fastgrpo.loss.Objective` has too are its knobs, under the same names. Their choices and ranges are its own.
"""

from dataclasses import dataclass

from fastgrpo.config.fields import Interval, When, documented, setting
from fastgrpo.loss.advantage import AGGREGATIONS, BASELINES, SCALES
from fastgrpo.loss.objective import (
    IMPORTANCE_SAMPLING_LEVELS,
    IMPORTANCE_SAMPLING_MODES,
    KL_ESTIMATORS,
    LOSS_TYPES,
    POSITIVE,
    RANGES,
)

WITH_SAMPLER = When("importance_sampling_mode is set", lambda settings: settings.importance_sampling_mode is not None)
WITH_SAPO = When("loss_type is sapo", lambda settings: settings.loss_type == "sapo")
WITH_VESPO = When("loss_type is vespo", lambda settings: settings.loss_type == "vespo")
WITH_REFERENCE = When("beta is above 0", lambda settings: settings.beta != 0)
WITH_SYNC = When("sync_ref_model is True", lambda settings: settings.sync_ref_model)


@documented
@dataclass(frozen=True)
class AdvantageConfig:
    """How the rewards of a group become advantages."""

    reward_weights: tuple[float, ...] = setting(
        (), "Weights of the reward functions, one for each. Empty weighs all of them 1.", within=Interval()
    )
    scale_rewards: str = setting(
        "group",
        "What a centred reward is divided by: the standard deviation of its group, that of the batch, or nothing.",
        choices=SCALES,
    )
    advantage_baseline: str = setting(
        "group",
        "What is subtracted from a reward: the mean of its group, or with leave_one_out the mean of the others in it "
        "(RLOO).",
        choices=BASELINES,
    )
    advantage_clip: float | None = setting(
        None, "Bound on the magnitude of an advantage. None sets no bound.", within=POSITIVE
    )
    multi_objective_aggregation: str = setting(
        "sum_then_normalize",
        "How several rewards are combined: summed and then standardized, or with normalize_then_sum each standardized "
        "within its group first (GDPO).",
        choices=AGGREGATIONS,
    )
    soft_punish_cache: int = setting(
        0,
        "Add a reward that falls from 0 to -1 over this many tokens, the last of max_completion_length (DAPO's soft "
        "overlong punishment); 0 turns it off.",
        within=Interval(at_least=0),
    )


@documented
@dataclass(frozen=True)
class ObjectiveConfig:
    """Which loss is minimized."""

    loss_type: str = setting(
        "dapo", "Surrogate and aggregation of the loss; docs/objectives.md has the formulas.", choices=LOSS_TYPES
    )
    importance_sampling_level: str = setting(
        "token",
        "Whether the ratio of policy to old policy is that of a token, or with sequence the geometric mean over the "
        "completion (GSPO).",
        choices=IMPORTANCE_SAMPLING_LEVELS,
    )
    importance_sampling_mode: str | None = setting(
        None,
        "How the loss is corrected for the tokens that top_k, top_p and min_p never draw: it is weighed by the ratio "
        "of policy to sampler, that of each token or of the whole sequence, and a ratio beyond its bounds is truncated "
        "to them or masked, that is, dropped. None does not correct.",
        choices=(None, *IMPORTANCE_SAMPLING_MODES),
    )
    importance_sampling_clip_max: float | None = setting(
        3.0,
        "Upper bound of the ratio of policy to sampler. None sets no bound.",
        within=RANGES["importance_sampling_clip_max"],
        active=WITH_SAMPLER,
    )
    importance_sampling_clip_min: float | None = setting(
        None,
        "Lower bound of the ratio of policy to sampler. None sets no bound.",
        within=RANGES["importance_sampling_clip_min"],
        active=WITH_SAMPLER,
    )
    epsilon: float = setting(
        0.2,
        "The losses that clip hold the ratio of policy to old policy above 1 - epsilon.",
        within=RANGES["epsilon"],
    )
    epsilon_high: float | None = setting(
        None,
        "The losses that clip hold the ratio of policy to old policy below 1 + epsilon_high, and cispo below "
        "epsilon_high itself. None is the same as epsilon.",
        within=RANGES["epsilon_high"],
    )
    delta: float | None = setting(
        None,
        "Upper bound on the ratio where it is not clipped (two-sided clipping, arXiv 2505.07291). None sets no bound.",
        within=RANGES["delta"],
    )
    entropy_coef: float = setting(
        0.0, "Coefficient of the entropy bonus; 0 turns it off.", within=RANGES["entropy_coef"]
    )
    sapo_temperature_pos: float = setting(
        1.0,
        "Temperature of SAPO's gate for tokens with a positive advantage.",
        within=RANGES["sapo_temperature_pos"],
        active=WITH_SAPO,
    )
    sapo_temperature_neg: float = setting(
        1.05,
        "Temperature of SAPO's gate for tokens with a negative advantage.",
        within=RANGES["sapo_temperature_neg"],
        active=WITH_SAPO,
    )
    vespo_k_pos: float = setting(
        2.0,
        "Power of VESPO's sequence weight for completions with a positive advantage.",
        within=RANGES["vespo_k_pos"],
        active=WITH_VESPO,
    )
    vespo_lambda_pos: float = setting(
        3.0,
        "Rate at which VESPO's sequence weight decays for completions with a positive advantage.",
        within=RANGES["vespo_lambda_pos"],
        active=WITH_VESPO,
    )
    vespo_k_neg: float = setting(
        3.0,
        "Power of VESPO's sequence weight for completions with a negative advantage.",
        within=RANGES["vespo_k_neg"],
        active=WITH_VESPO,
    )
    vespo_lambda_neg: float = setting(
        2.0,
        "Rate at which VESPO's sequence weight decays for completions with a negative advantage.",
        within=RANGES["vespo_lambda_neg"],
        active=WITH_VESPO,
    )
    mask_truncated_completions: bool = setting(False, "Leave truncated completions out of the loss.")


@documented
@dataclass(frozen=True)
class ReferenceConfig:
    """How the policy is held near a reference."""

    beta: float = setting(
        0.0,
        "Coefficient of the KL divergence from the reference; at 0 no reference is held in memory.",
        within=RANGES["beta"],
    )
    kl: str = setting(
        "k3",
        "Estimator of the KL divergence from the reference.",
        choices=KL_ESTIMATORS,
        active=WITH_REFERENCE,
    )
    use_bias_correction_kl: bool = setting(
        False,
        "Multiply the KL divergence by the ratio of policy to old policy, so that it stays unbiased off-policy.",
        active=WITH_REFERENCE,
    )
    ref_device: str | None = setting(
        None,
        "Where the reference rests: with cpu in host memory, from where its layers pass through the GPU one by one. "
        "None is where the policy is.",
        choices=(None, "cpu"),
        active=WITH_REFERENCE,
        resume="inexact",
    )
    ref_quantization: str | None = setting(
        None,
        "Precision of the reference's linear layers: int8 takes half the memory of bfloat16, nf4 a quarter. None "
        "leaves them as they are.",
        choices=(None, "int8", "nf4"),
        active=WITH_REFERENCE,
    )
    sync_ref_model: bool = setting(
        False, "Let the reference follow the policy (TR-DPO, arXiv 2404.09656).", active=WITH_REFERENCE
    )
    ref_model_sync_steps: int = setting(
        512, "Number of steps between two moves of the reference towards the policy.", within=Interval(at_least=1),
        active=WITH_SYNC,
    )  # fmt: skip
    ref_model_mixup_alpha: float = setting(
        0.6,
        "Share of the policy in a move of the reference, which becomes ref_model_mixup_alpha * policy + "
        "(1 - ref_model_mixup_alpha) * reference.",
        within=Interval(above=0, at_most=1),
        active=WITH_SYNC,
    )
