"""TRL's loss of a micro-batch, computed by `linear_grpo_loss` inside of the model's forward.

What TRL multiplies the surrogate of a token by (masks, importance weights) multiplies its advantage here: every
surrogate of TRL is proportional to the advantage as long as its sign stays. Vespo alone has the importance weight
inside. What TRL divides the sums by is in the weights of the tokens.

Shapes: B completions, T their padded length.
"""

from dataclasses import replace

import torch
from accelerate.utils import send_to_device
from trl import GRPOTrainer

from fastgrpo.integrations.terms import READ, cap_below_1, shared_log_weights, vespo_knobs
from fastgrpo.integrations.trl_head import Head, Scores
from fastgrpo.loss import Objective, linear_grpo_loss

# TRL's loss type -> a loss type of this package that has its surrogate.
SURROGATES = {
    **dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo", "luspo"), "dapo"),
    **{name: name for name in ("cispo", "sapo", "vespo")},
}


def objective_of(trainer: GRPOTrainer) -> Objective:
    """Translate TRL's settings into the surrogate and the KL of the loss."""
    args, loss_type = trainer.args, SURROGATES[trainer.loss_type]
    knobs = {"beta": trainer.beta, "use_bias_correction_kl": args.use_bias_correction_kl}
    if loss_type != "vespo":  # which has no ratio but that of the sequence
        knobs["importance_sampling_level"] = trainer.importance_sampling_level
    if loss_type == "dapo":
        knobs |= {"epsilon": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high, "delta": args.delta}
    elif loss_type == "cispo":
        knobs["epsilon_high"] = max(trainer.epsilon_high, 1)  # `score` knows lower caps
    else:
        own = {name: getattr(args, name) for name in READ[loss_type]}
        knobs |= vespo_knobs(own) if loss_type == "vespo" else own
    return Objective(loss_type=loss_type, **knobs)


def score(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor], head: Head) -> tuple[torch.Tensor, Scores]:
    """Compute TRL's loss of a micro-batch, and the scores of all completions, of which TRL makes its metrics.

    Returns:
        The loss, without that of mixtures of experts, and the scores [B, T], without gradient.
    """
    inputs = send_to_device(inputs, head.weight.device)
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    width = mask.shape[1]
    head = replace(head, hidden=head.hidden[:, -width:], labels=head.labels[:, -width:])
    scored, coefficient = head.labels != -100, _entropy_coefficient(trainer)
    windows = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    some_alone = trainer.top_entropy_quantile < 1
    known = chosen = None
    if some_alone or trainer.off_policy_mask_threshold is not None:  # what is masked depends on the scores
        with torch.no_grad():
            known = head.score(scored, with_entropy=True)
    if some_alone:
        chosen = trainer.get_high_entropy_mask(known.entropies, mask, 1 - trainer.top_entropy_quantile)
    # Anew each time: a callback may have changed a setting of the trainer.
    objective = replace(objective_of(trainer), entropy_coef=coefficient)
    gains, old_logps = _gains(trainer, inputs, mask, known, chosen), inputs.get("old_per_token_logps")
    sampler_logps = _sampler(trainer, inputs, mask)
    if trainer.loss_type == "cispo" and trainer.epsilon_high < 1:
        objective, gains, old_logps = cap_below_1(trainer.epsilon_high, objective, gains, old_logps)
    counted = mask if chosen is None else mask * chosen  # the bonus is a mean over these tokens
    out = linear_grpo_loss(
        head.hidden, head.weight, head.labels, gains.expand(mask.shape), mask=mask, old_logps=old_logps,
        ref_logps=inputs["ref_per_token_logps"] if trainer.beta != 0 else None, sampler_logps=sampler_logps,
        token_weights=_token_weights(trainer, mask, inputs["num_items_in_batch"], windows),
        entropy_weights=counted / (counted.sum().clamp(min=1) * windows) if coefficient != 0 else None,
        temperature=head.temperature, bias=head.bias, logit_softcap=head.softcap, return_entropy=known is None,
        compact="sync", objective=objective, backward_tolerance=trainer.backward_tolerance,
    )  # fmt: skip
    if known is None:
        with torch.no_grad():
            rest = head.score(scored & ~out.active, with_entropy=True)  # no gradient flows to them: one product
        known = Scores(out.logps + rest.logps, out.entropies + rest.entropies)
    return out.loss, known


def _gains(trainer, inputs, mask, known, chosen):
    """The advantages [B, 1] or [B, T], times what the surrogate is multiplied by."""
    advantages = inputs["advantages"]
    gains = advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    if trainer.off_policy_mask_threshold is not None:
        sampler = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps", known.logps))
        threshold = trainer.off_policy_mask_threshold
        gains = gains * trainer.get_off_policy_mask(advantages, known.logps, sampler, mask, threshold)
    if chosen is not None:
        gains = gains * chosen
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction and trainer.loss_type != "vespo":
        gains = gains * inputs["importance_sampling_ratio"]
    return gains


def _sampler(trainer, inputs, mask):
    """Log-probs of a sampler [B, T] that give vespo TRL's importance weights; None for all others."""
    ratio = inputs.get("importance_sampling_ratio")
    if trainer.loss_type != "vespo" or ratio is None:
        return None
    # TRL's product is over the whole row. Where there is a ratio, it has the old log-probs that the ratio is made of.
    return inputs["old_per_token_logps"] - shared_log_weights(ratio, mask)


def _token_weights(trainer, mask, num_items, windows):
    """The weight of each token [B, T] as TRL's loss type has it, for one of `windows` micro-batches of an update."""
    kind = trainer.loss_type
    if kind in ("grpo", "sapo"):
        divisor = mask.sum(-1, keepdim=True).clamp(min=1) * len(mask) * windows
    elif kind == "bnpo":
        divisor = mask.sum().clamp(min=1) * windows
    elif kind == "dr_grpo":
        divisor = len(mask) * trainer.max_completion_length * windows
    elif kind == "luspo":
        divisor = len(mask) * windows
    else:  # num_items counts all processes and the whole rollout, of which an update takes `windows` parts
        divisor = num_items.clamp(min=1) / trainer.accelerator.num_processes
        divisor = divisor * windows / trainer.args.steps_per_generation if trainer.model.training else divisor
    return mask / divisor


def _entropy_coefficient(trainer):
    """The coefficient that TRL gives the entropy of this micro-batch."""
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return trainer.entropy_coef
