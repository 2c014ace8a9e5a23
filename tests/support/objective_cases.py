"""Objectives by name: knobs of `Objective`."""

LOSS_TYPES = {
    "grpo": {"loss_type": "grpo"}, "bnpo": {"loss_type": "bnpo"}, "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2}, "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}  # fmt: skip
SEQUENCE = {"importance_sampling_level": "sequence"}
KINDS = ("k1", "k2", "k3", "abs")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = {"importance_sampling_clip_min": 0.8, "importance_sampling_clip_max": 1.3}
CASES = LOSS_TYPES | {
    "cispo-sequence": {**LOSS_TYPES["cispo"], **SEQUENCE}, "sapo-sequence": {**LOSS_TYPES["sapo"], **SEQUENCE},
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.5}, "delta": {"delta": 1.25, "epsilon_high": 0.1},
    "gspo-delta": {**LOSS_TYPES["gspo"], "delta": 1.1, "epsilon": 0.05},
    "sapo-temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "vespo-shape": {**LOSS_TYPES["vespo"], "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_lambda_neg": 1.5},
    "entropy": {"entropy_coef": 0.3}, "entropy-luspo-k3": {**LOSS_TYPES["luspo"], "entropy_coef": -0.2, "beta": 0.1},
    **{f"{name}-k3": {**knobs, "beta": 0.3} for name, knobs in LOSS_TYPES.items()},
    **{f"{name}-{kl}": {**LOSS_TYPES[name], "beta": 0.3, "kl": kl} for kl in KINDS for name in ("dapo", "gspo")},
}  # fmt: skip
for _name in ("cispo-k3", "luspo-k3", "vespo-k3", *(f"{name}-{kl}" for kl in KINDS for name in ("dapo", "gspo"))):
    CASES[f"{_name}-corrected"] = {**CASES[_name], "use_bias_correction_kl": True}
# Cases with sampler_logps.
SAMPLER_CASES = {
    **{f"{name}-{mode}": {**LOSS_TYPES[name], "importance_sampling_mode": mode, **BOUNDS}
       for name in ("dapo", "gspo") for mode in MODES},
    "default-bounds": {"beta": 0.3},
    "no-cap": {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": None},
    "vespo-token_truncate": {**LOSS_TYPES["vespo"], **BOUNDS},
    "vespo-token_mask": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
    "luspo-token_truncate": {**LOSS_TYPES["luspo"], "importance_sampling_mode": "token_truncate", **BOUNDS},
}  # fmt: skip
EVERY = CASES | SAMPLER_CASES
