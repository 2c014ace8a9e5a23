"""Settings of the learning signal: advantages, the loss, and the reference.

Many of them are also fields of `fastgrpo.loss.Objective`, under the same names. Their choices and ranges are declared
there.
"""

from dataclasses import dataclass

from fastgrpo.config.fields import Interval, When, documented, setting
from fastgrpo.loss.advantage import AGGREGATIONS, BASELINES, SCALES
from fastgrpo.loss.objective import (
    IMPORTANCE_SAMPLING_LEVELS,
    IMPORTANCE_SAMPLING_MODES,
    KL_KINDS,
    LOSS_TYPES,
    NOT_NEGATIVE,
    POSITIVE,
    RANGES,
)

# A magnitude that fp32 holds. Reward functions are held to it, too: fp64 then holds the squares of weighted rewards.
LARGEST_REWARD = 3.4e38
WITH_SAMPLER = When("importance_sampling_mode is set", lambda settings: settings.importance_sampling_mode is not None)
WITH_ADAPTIVE = When("use_adaptive_entropy is True", lambda settings: settings.use_adaptive_entropy)
WITH_SAPO = When("loss_type is sapo", lambda settings: settings.loss_type == "sapo")
WITH_VESPO = When("loss_type is vespo", lambda settings: settings.loss_type == "vespo")
WITH_REFERENCE = When("beta is above 0", lambda settings: settings.beta != 0)
WITH_ESTIMATE = When(
    "beta is above 0 and kl is not full", lambda settings: settings.beta != 0 and settings.kl != "full"
)
WITH_SYNC = When("sync_ref_model is True", lambda settings: settings.sync_ref_model)
WITH_MASK = When("mask_truncated_completions is True", lambda settings: settings.mask_truncated_completions)
PROCESS_REWARDS = ("outcome", "token")


@documented
@dataclass(frozen=True)
class AdvantageConfig:
    """How the rewards of a group become advantages."""

    reward_weights: tuple[float, ...] = setting(
        (),
        "Weights of the reward functions, one for each. If none is given, every weight is 1.",
        within=Interval(at_least=-LARGEST_REWARD, at_most=LARGEST_REWARD),
    )
    scale_rewards: str = setting(
        "group",
        "What a reward is divided by after its mean was subtracted: group is the standard deviation of its group, "
        "batch that of the whole batch, and none divides by nothing.",
        choices=SCALES,
    )
    advantage_baseline: str = setting(
        "group",
        "What is subtracted from a reward: group is the mean of its group, leave_one_out the mean of the other rewards "
        "of the group (RLOO).",
        choices=BASELINES,
    )
    advantage_clip: float | None = setting(
        None, "Bound on the magnitude of an advantage. None sets no bound.", within=POSITIVE
    )
    multi_objective_aggregation: str = setting(
        "sum_then_normalize",
        "How several rewards are combined: sum_then_normalize standardizes their sum, normalize_then_sum standardizes "
        "each of them within its group before they are summed (GDPO).",
        choices=AGGREGATIONS,
    )
    process_rewards: str = setting(
        "outcome",
        "What the step rewards that functions log become: token turns them into advantages of tokens (DeepSeekMath, "
        "arXiv 2402.03300, section 4.1.3), which are added to the advantages by the other functions; outcome does not "
        "read them, and the reward that the function returns counts.",
        choices=PROCESS_REWARDS,
    )
    soft_punish_cache: int = setting(
        0,
        "Number of tokens before max_completion_length over which an additional reward falls from 0 to -1 (DAPO's soft "
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
        "Level of the ratio of policy to old policy: token gives each token its own ratio, sequence gives all tokens "
        "of a completion the geometric mean of their ratios (GSPO).",
        choices=IMPORTANCE_SAMPLING_LEVELS,
    )
    importance_sampling_mode: str | None = setting(
        None,
        "Correction for top_k, top_p, min_p and repetition_penalty, which make the sampler differ from the policy: the "
        "loss without its KL is multiplied by the ratio of policy to sampler, of each token or of the whole sequence. "
        "A ratio outside of its bounds is moved to the nearest bound by the truncate modes and set to 0 by the mask "
        "modes. None corrects nothing.",
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
        "Lower clipping range: losses with clipping keep the ratio of policy to old policy at 1 - epsilon or above.",
        within=RANGES["epsilon"],
    )
    epsilon_high: float | None = setting(
        None,
        "Upper clipping range: losses with clipping keep the ratio of policy to old policy at 1 + epsilon_high or "
        "below. None uses epsilon. cispo caps the ratio at epsilon_high itself, and needs a value of at least 1.",
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
    use_adaptive_entropy: bool = setting(
        False,
        "Let the coefficient of the entropy bonus follow the entropy (Skywork-OR1, arXiv 2505.22312): it begins at "
        "entropy_coef, moves by entropy_coef_delta after each update, up where the entropy was at or below "
        "entropy_target and down elsewhere, and is applied only after an update at or below it.",
    )
    entropy_coef_min: float = setting(
        0.0, "Smallest coefficient of an adaptive entropy bonus.", within=RANGES["entropy_coef"], active=WITH_ADAPTIVE
    )
    entropy_coef_max: float = setting(
        1.0, "Largest coefficient of an adaptive entropy bonus.", within=RANGES["entropy_coef"], active=WITH_ADAPTIVE
    )
    entropy_coef_delta: float = setting(
        0.005,
        "Number by which an update moves the coefficient of an adaptive entropy bonus.",
        within=NOT_NEGATIVE,
        active=WITH_ADAPTIVE,
    )
    entropy_target: float = setting(
        0.2,
        "Mean entropy of a token, in nats, that an adaptive entropy bonus holds: of the tokens that "
        "top_entropy_quantile keeps.",
        within=NOT_NEGATIVE,
        active=WITH_ADAPTIVE,
    )
    top_entropy_quantile: float = setting(
        1.0,
        "Share of the tokens of an update whose surrogate and entropy bonus count: those of the highest entropy "
        "(arXiv 2506.01939). 1 keeps all; less takes another forward pass in each update.",
        within=Interval(at_least=0, at_most=1),
    )
    off_policy_mask_threshold: float | None = setting(
        None,
        "Largest mean of old minus new log-probs, in nats, of a completion with a negative advantage whose surrogate "
        "counts (DeepSeek-V3.2, arXiv 2512.02556). It takes another forward pass in updates after the first of a step. "
        "None sets no bound.",
        within=POSITIVE,
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
    masked_completions_in_group: bool = setting(
        True,
        "Count the rewards of masked completions in the mean and the deviation of their group, as DAPO (arXiv "
        "2503.14476, equation 9) and TRL do; False computes both from the other completions alone.",
        active=WITH_MASK,
    )


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
        "KL divergence from the reference: k1, k2, k3 and abs estimate it from the tokens that were drawn, full sums "
        "over the whole vocabulary.",
        choices=KL_KINDS,
        active=WITH_REFERENCE,
    )
    use_bias_correction_kl: bool = setting(
        True,
        "Multiply the KL divergence by the ratio of policy to old policy, so that its gradient is unbiased. kl=full, "
        "which is no estimate from drawn tokens, needs no correction and has none.",
        compared=WITH_ESTIMATE,  # whoever leaves out the KL of a recipe need not leave out its correction
    )
    ref_device: str | None = setting(
        None,
        "Where the reference is kept: cpu keeps it in host memory and copies its layers to the GPU one by one when "
        "they are needed; None keeps it on the policy's device.",
        choices=(None, "cpu"),
        active=WITH_REFERENCE,
        resume="inexact",
    )
    ref_quantization: str | None = setting(
        None,
        "Precision of the reference's linear layers: int8 takes half the memory of bfloat16, nf4 takes a quarter. None "
        "does not quantize them.",
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
        "Weight of the policy when the reference moves towards it: the reference becomes ref_model_mixup_alpha * "
        "policy + (1 - ref_model_mixup_alpha) * reference.",
        within=Interval(above=0, at_most=1),
        active=WITH_SYNC,
    )
