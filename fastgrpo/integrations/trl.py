"""TRL's GRPOTrainer with the head and the loss of this package. Everything else stays TRL's.

    from fastgrpo.integrations.trl import FusedGRPOTrainer  # takes the place of trl.GRPOTrainer
    trainer = patch(trainer)                                # or: a GRPOTrainer that is there already

TRL calls the model with `fused_lm_head=True` for log-probs and entropies, and takes the loss of these. Here the model's
forward (`attach`) makes them: without gradient by `linear_logprob`, and in a training step by `linear_grpo_loss`, whose
gradient is that of the whole loss. TRL's own `_compute_loss` then runs on these numbers, which carry no gradient. It
makes the metrics, moves the entropy coefficient and adds the auxiliary loss of mixtures of experts.

What TRL multiplies the surrogate of a token with (masks, importance weights) multiplies its advantage here: every
surrogate of TRL is proportional to the advantage, as long as the sign stays. Vespo alone has the importance weight
inside. Shapes: B completions, T their padded length, L the length with prompts, less 1; V vocabulary, D hidden.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from fastgrpo.integrations.trl_head import Scores, attach
from fastgrpo.kernels.objectives import LOG_RATIO_MAX, LOG_WEIGHT_MIN
from fastgrpo.loss import Objective, linear_grpo_loss

# TRL's loss type -> a loss type of this package that has its surrogate. The weights of the tokens are made here.
SURROGATES = {
    **dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo", "luspo"), "dapo"),
    **{name: name for name in ("cispo", "sapo", "vespo")},
}
VESPO_LAMBDA_MIN = 1e-4  # TRL holds vespo's lambda above it
# The methods of TRL that run with another head and loss here: a class that has its own would lose them or be wrong.
OURS = ("_compute_loss", "_get_per_token_logps_and_entropies")
TOLERANCE = 1e-3  # of the first loss, against TRL's own code: a version of TRL with another formula differs by more


class FusedGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer, whose head and loss never hold the logits [N, V].

    The arguments are those of trl.GRPOTrainer.

    Raises:
        ValueError: A setting or the model cannot be served; the text names it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _take_over(self)

    def _compute_loss(self, model, inputs):
        outputs = []

        def scored(**model_inputs):
            outputs.append(model(**model_inputs, score=functools.partial(_score, self, inputs)))
            return outputs[-1]

        value = super()._compute_loss(scored, inputs)
        (output,) = outputs
        ours = output.loss.detach()
        if not self._compared and not self.aux_loss_enabled:
            _compare(ours, value, inputs)
            self._compared = True
        return value + (output.loss - ours)  # TRL's value, which has the auxiliary loss, and the gradient of ours

    def _get_per_token_logps_and_entropies(self, model, *args, compute_entropy=False, **kwargs):
        asked = functools.partial(model, with_entropy=compute_entropy)
        return super()._get_per_token_logps_and_entropies(asked, *args, compute_entropy=compute_entropy, **kwargs)


def patch(trainer: GRPOTrainer) -> FusedGRPOTrainer:
    """Give a trainer of TRL the head and the loss of this package.

    Args:
        trainer: A GRPOTrainer, before its training starts. It is changed in place.

    Returns:
        The same object, which is a FusedGRPOTrainer now.

    Raises:
        ValueError: It is no GRPOTrainer, has a loss of its own, or has a setting or model that cannot be served.
    """
    kind = type(trainer)
    if not isinstance(trainer, GRPOTrainer):
        raise ValueError(f"trainer must be a trl.GRPOTrainer, got {kind.__name__}")
    if isinstance(trainer, FusedGRPOTrainer):
        return trainer
    for name in OURS:
        if getattr(kind, name) is not getattr(GRPOTrainer, name):
            raise ValueError(f"trainer must leave {name} as TRL has it, and {kind.__name__} has its own; remove that one")
    _take_over(trainer)
    name = f"Fused{kind.__name__}"
    trainer.__class__ = FusedGRPOTrainer if kind is GRPOTrainer else type(name, (FusedGRPOTrainer, kind), {})
    return trainer


def _take_over(trainer):
    """Check what the trainer wants, and attach the head to its model and to its reference."""
    _refuse(trainer)
    trainer._objective, trainer._compared = _objective_of(trainer), False
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            model = trainer.accelerator.unwrap_model(model)
            model = model.get_base_model() if is_peft_model(model) else model
            attach(model, trainer.temperature, trainer.args.cast_lm_head_to_fp32)


def _refuse(trainer):
    """Raise a ValueError that names what cannot be served."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {}).values()
    prompts = [type(adapter).__name__ for adapter in adapters if adapter.is_prompt_learning]
    weight = model.get_output_embeddings().weight
    corrected = trainer.beta != 0 and args.use_bias_correction_kl
    for refused, reason in (
        (prompts, f"peft_config={', '.join(prompts)}: prompt tuning is not served; use LoRA"),
        (args.torch_compile, "torch_compile=True: the loss reads each batch inside of the forward; leave it out"),
        (is_deepspeed_zero3_enabled(), "deepspeed: ZeRO stage 3 hides the weight of the head; use stage 2 or FSDP"),
        (not weight.is_floating_point(), f"quantization_config: the head has {weight.dtype} weights; leave it out of it"),
        (
            trainer.loss_type not in SURROGATES,
            f"loss_type={trainer.loss_type!r}: choose one of {', '.join(SURROGATES)}",
        ),
        (
            trainer.loss_type == "cispo" and not trainer.epsilon_high > 0,
            f"epsilon_high={trainer.epsilon_high}: it is the cap on the ratio of cispo, and must be positive",
        ),
        (
            trainer.loss_type == "vespo" and trainer.importance_sampling_level == "sequence" and corrected,
            "importance_sampling_level='sequence' with loss_type='vespo' and use_bias_correction_kl=True; leave out one",
        ),
    ):
        if refused:
            raise ValueError(f"fastgrpo cannot serve {reason}")


def _objective_of(trainer):
    """The surrogate and the KL of TRL's settings. The token weights and the entropy bonus join in `_score`."""
    args, loss_type = trainer.args, SURROGATES[trainer.loss_type]
    knobs = {"importance_sampling_level": trainer.importance_sampling_level}
    if loss_type == "dapo":
        knobs |= {"epsilon": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high, "delta": args.delta}
    elif loss_type == "cispo":
        knobs |= {"epsilon_high": max(trainer.epsilon_high, 1)}  # a lower cap is in the advantages: `_score`
    elif loss_type == "sapo":
        knobs |= {name: getattr(args, name) for name in ("sapo_temperature_pos", "sapo_temperature_neg")}
    else:  # vespo has no ratio but that of the sequence. Its importance weights come as log-probs of the sampler.
        knobs = {"vespo_k_pos": args.vespo_k_pos, "vespo_k_neg": args.vespo_k_neg}
        knobs |= {name: max(getattr(args, name), VESPO_LAMBDA_MIN) for name in ("vespo_lambda_pos", "vespo_lambda_neg")}
        knobs |= {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": None}
    return Objective(loss_type=loss_type, beta=trainer.beta, use_bias_correction_kl=args.use_bias_correction_kl, **knobs)


def _score(trainer, inputs, head):
    """Compute TRL's loss of a micro-batch, and the scores that TRL's metrics need: those of all completions."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # [B, T]
    width = mask.shape[1]
    head = replace(head, hidden=head.hidden[:, -width:], labels=head.labels[:, -width:])
    scored, old = head.labels != -100, inputs.get("old_per_token_logps")
    coefficient, objective = _entropy_coefficient(trainer), trainer._objective
    windows = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    bonus_apart = coefficient != 0 and trainer.top_entropy_quantile < 1  # that of some tokens alone
    advantages, known, chosen = inputs["advantages"], None, None
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    gains = advantages
    if trainer.top_entropy_quantile < 1 or trainer.off_policy_mask_threshold is not None:
        with torch.set_grad_enabled(bonus_apart and torch.is_grad_enabled()):
            known = head.score(scored, with_entropy=True)
    if trainer.off_policy_mask_threshold is not None:
        sampler = inputs.get("sampling_per_token_logps", known.logps if old is None else old)
        gains = gains * trainer.get_off_policy_mask(
            advantages, known.logps, sampler, mask, trainer.off_policy_mask_threshold
        )  # fmt: skip
    if trainer.top_entropy_quantile < 1:
        chosen = trainer.get_high_entropy_mask(known.entropies.detach(), mask, 1 - trainer.top_entropy_quantile)
        gains = gains * chosen
    sampler = None
    if trainer.loss_type == "vespo":
        if (ratio := inputs.get("importance_sampling_ratio")) is not None:
            # TRL sums log I over the whole row. Shared by its tokens, it has the same sum here.
            total = ratio.log().clamp(LOG_WEIGHT_MIN, LOG_RATIO_MAX).sum(-1, keepdim=True)
            sampler = old - total / mask.sum(-1, keepdim=True).clamp(min=1)
    elif trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        gains = gains * inputs["importance_sampling_ratio"]
    if trainer.loss_type == "cispo" and (cap := trainer.epsilon_high) < 1:
        gains = gains * cap  # min(r, c) A = min(r / c, 1) c A
        if old is not None:
            old = old + math.log(cap)
            objective = replace(objective, beta=objective.beta * (cap if objective.use_bias_correction_kl else 1))
    if coefficient != 0 and not bonus_apart:
        objective = replace(objective, entropy_coef=coefficient)
    out = linear_grpo_loss(
        head.hidden, head.weight, head.labels, gains.expand(mask.shape), mask=mask, old_logps=old,
        ref_logps=inputs["ref_per_token_logps"] if trainer.beta != 0 else None, sampler_logps=sampler,
        token_weights=_token_weights(trainer, mask, inputs["num_items_in_batch"], windows),
        num_items_in_batch=mask.sum().clamp(min=1) * windows, temperature=head.temperature, bias=head.bias,
        logit_softcap=head.softcap, return_entropy=known is None, compact="sync", objective=objective,
    )  # fmt: skip
    loss = out.loss
    if bonus_apart:
        effective = mask * chosen
        loss = loss - coefficient * (known.entropies * effective).sum() / effective.sum().clamp(min=1) / windows
    if known is None:
        with torch.no_grad():
            rest = head.score(scored & ~out.active, with_entropy=True)  # no gradient flows to them: one product
        known = Scores(out.logps + rest.logps, out.entropies + rest.entropies)
    return loss, Scores(known.logps.detach(), known.entropies.detach())


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


def _compare(ours, theirs, inputs):
    """Raise where TRL's code, on the same log-probs, has another loss: this version of TRL has another formula."""
    ours, theirs = ours.item(), theirs.detach().item()
    scale = max(abs(theirs), inputs["advantages"].abs().max().item(), 1e-3)
    if not math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE * scale) and math.isfinite(theirs):
        raise RuntimeError(
            f"this version of TRL has another loss than fastgrpo knows: {theirs} of the same log-probs, and not {ours}"
        )
