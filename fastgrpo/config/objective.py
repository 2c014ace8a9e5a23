"""Settings of the learning signal: advantages, the loss, and the reference.

Many of them are also fields of `fastgrpo.loss.Objective`, under the same names. Their choices and ranges are declared
there.
"""

from typing import Annotated, Literal

from pydantic import Field

from fastgrpo.config.fields import (
    Count,
    NotNegative,
    Positive,
    Several,
    Share,
    Size,
    settings_class,
)

# A magnitude that fp32 holds. Reward functions are held to it, too: fp64 then holds the squares of weighted rewards.
LARGEST_REWARD = 3.4e38


@settings_class
class AdvantageConfig:
    """How the rewards of a group become advantages."""

    reward_weights: Several[Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]] = ()
    """Weights of the reward functions, one for each. If none is given, every weight is 1."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What a reward is divided by after its mean was subtracted: group is the standard deviation of its group, batch
    that of the whole batch, and none divides by nothing."""
    advantage_baseline: Literal["group", "leave_one_out"] = "group"
    """What is subtracted from a reward: group is the mean of its group, leave_one_out the mean of the other rewards of
    the group (RLOO)."""
    advantage_clip: Positive | None = None
    """Bound on the magnitude of an advantage. None sets no bound."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards are combined: sum_then_normalize standardizes their sum, normalize_then_sum standardizes each
    of them within its group before they are summed (GDPO)."""
    process_rewards: Literal["outcome", "token"] = "outcome"
    """What the step rewards that functions log become: token turns them into advantages of tokens (DeepSeekMath, arXiv
    2402.03300, section 4.1.3), which are added to the advantages by the other functions; outcome does not read them,
    and the reward that the function returns counts."""
    soft_punish_cache: Size = 0
    """Number of tokens before max_completion_length over which an additional reward falls from 0 to -1 (DAPO's soft
    overlong punishment); 0 turns it off."""


@settings_class
class ObjectiveConfig:
    """Which loss is minimized."""

    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"] = "dapo"
    """Surrogate and aggregation of the loss; docs/objectives.md has the formulas."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the ratio of policy to old policy: token gives each token its own ratio, sequence gives all tokens of a
    completion the geometric mean of their ratios (GSPO)."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        None
    )
    """Correction for top_k, top_p, min_p and repetition_penalty, which make the sampler differ from the policy: the
    loss without its KL is multiplied by the ratio of policy to sampler, of each token or of the whole sequence. A ratio
    outside of its bounds is moved to the nearest bound by the truncate modes and set to 0 by the mask modes. None
    corrects nothing."""
    importance_sampling_clip_max: Positive | None = 3.0
    """Upper bound of the ratio of policy to sampler. None sets no bound."""
    importance_sampling_clip_min: NotNegative | None = None
    """Lower bound of the ratio of policy to sampler. None sets no bound."""
    epsilon: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clipping range: losses with clipping keep the ratio of policy to old policy at 1 - epsilon or above."""
    epsilon_high: NotNegative | None = None
    """Upper clipping range: losses with clipping keep the ratio of policy to old policy at 1 + epsilon_high or below.
    None uses epsilon. cispo caps the ratio at epsilon_high itself, and needs a value of at least 1."""
    delta: Positive | None = None
    """Upper bound on the ratio where it is not clipped (two-sided clipping, arXiv 2505.07291). None sets no bound."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; 0 turns it off."""
    use_adaptive_entropy: bool = False
    """Let the coefficient of the entropy bonus follow the entropy (Skywork-OR1, arXiv 2505.22312): it begins at
    entropy_coef, moves by entropy_coef_delta after each update, up where the entropy was at or below entropy_target and
    down elsewhere, and is applied only after an update at or below it."""
    entropy_coef_min: float = 0.0
    """Smallest coefficient of an adaptive entropy bonus."""
    entropy_coef_max: float = 1.0
    """Largest coefficient of an adaptive entropy bonus."""
    entropy_coef_delta: NotNegative = 0.005
    """Number by which an update moves the coefficient of an adaptive entropy bonus."""
    entropy_target: NotNegative = 0.2
    """Mean entropy of a token, in nats, that an adaptive entropy bonus holds: of the tokens that top_entropy_quantile
    keeps."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the tokens of an update whose surrogate and entropy bonus count: those of the highest entropy (arXiv
    2506.01939). 1 keeps all; less takes another forward pass in each update."""
    off_policy_mask_threshold: Positive | None = None
    """Largest mean of old minus new log-probs, in nats, of a completion with a negative advantage whose surrogate
    counts (DeepSeek-V3.2, arXiv 2512.02556). It takes another forward pass in updates after the first of a step. None
    sets no bound."""
    sapo_temperature_pos: Positive = 1.0
    """Temperature of SAPO's gate for tokens with a positive advantage."""
    sapo_temperature_neg: Positive = 1.05
    """Temperature of SAPO's gate for tokens with a negative advantage."""
    vespo_k_pos: NotNegative = 2.0
    """Power of VESPO's sequence weight for completions with a positive advantage."""
    vespo_lambda_pos: Positive = 3.0
    """Rate at which VESPO's sequence weight decays for completions with a positive advantage."""
    vespo_k_neg: NotNegative = 3.0
    """Power of VESPO's sequence weight for completions with a negative advantage."""
    vespo_lambda_neg: Positive = 2.0
    """Rate at which VESPO's sequence weight decays for completions with a negative advantage."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss."""
    masked_completions_in_group: bool = True
    """Count the rewards of masked completions in the mean and the deviation of their group, as DAPO (arXiv 2503.14476,
    equation 9) and TRL do; False computes both from the other completions alone."""


@settings_class
class ReferenceConfig:
    """How the policy is held near a reference."""

    beta: NotNegative = 0.0
    """Coefficient of the KL divergence from the reference; at 0 no reference is held in memory."""
    kl: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """KL divergence from the reference: k1, k2, k3 and abs estimate it from the tokens that were drawn, full sums over
    the whole vocabulary."""
    use_bias_correction_kl: bool = True
    """Multiply the KL divergence by the ratio of policy to old policy, so that its gradient is unbiased. kl=full, which
    is no estimate from drawn tokens, needs no correction and has none."""
    ref_device: Literal["cpu"] | None = None
    """Where the reference is kept: cpu keeps it in host memory and copies its layers to the GPU one by one when they
    are needed; None keeps it on the policy's device."""
    ref_quantization: Literal["int8", "nf4"] | None = None
    """Precision of the reference's linear layers: int8 takes half the memory of bfloat16, nf4 takes a quarter. None
    does not quantize them."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656)."""
    ref_model_sync_steps: Count = 512
    """Number of steps between two moves of the reference towards the policy."""
    ref_model_mixup_alpha: Share = 0.6
    """Weight of the policy when the reference moves towards it: the reference becomes ref_model_mixup_alpha * policy +
    (1 - ref_model_mixup_alpha) * reference."""
