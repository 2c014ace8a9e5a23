"""TRL's GRPOTrainer with the head and the loss of this package. Everything else stays TRL's.

    from fastgrpo.integrations.trl import FusedGRPOTrainer  # replaces trl.GRPOTrainer
    trainer = patch(trainer)                                # or: an existing GRPOTrainer

TRL calls the model with `fused_lm_head=True` for log-probs and entropies, and computes its loss from them. Here the
model's forward computes them: without a gradient by `linear_logprob`, and in a step by `linear_grpo_loss`, which has
the gradient of the whole loss. TRL's `_compute_loss` then runs on values without a gradient. It computes the metrics,
updates the entropy coefficient, and adds the loss of mixtures of experts.

Factors of the surrogate in TRL (masks, importance weights) multiply the advantage here: every surrogate is linear in
the advantage on each side of 0. Only vespo uses the importance weight in its W. The token weights contain the divisors
of the sums.

Shapes: B completions, L their length with prompts, less 1, T their padded length; V vocabulary, D hidden.
"""

import functools
import math
import types
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model, send_to_device
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from fastgrpo.integrations.terms import READ, shared_log_weights, vespo_knobs
from fastgrpo.loss.inputs import check_backward_tolerance
from fastgrpo.loss.logprobs import linear_logprob, logit_scale, logit_softcap
from fastgrpo.loss.losses import linear_grpo_loss
from fastgrpo.loss.objective import Objective

try:
    from trl import GRPOTrainer
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise ImportError(
        "fastgrpo.integrations.trl needs trl >= 1.15, < 2, whose trainer gets log-probs from the model; run pip "
        f"install 'trl>=1.15,<2' ({error})"
    ) from error

__all__ = ["FusedGRPOTrainer", "patch"]

# FusedGRPOTrainer would ignore an override of these, or compute a wrong gradient.
OURS = ("_compute_loss", "_get_per_token_logps_and_entropies")
# The first losses are compared with TRL's own code, to detect a version of TRL with another formula. One is not enough:
# in the first, ratios are 1, the KL is 0, and advantages may all be 0.
COMPARED, TOLERANCE = 16, 1e-3


class FusedGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with a head and a loss that never hold the logits [N, V].

    Args:
        args: Arguments of trl.GRPOTrainer.
        backward_tolerance: See `linear_grpo_loss`.
        kwargs: Arguments of trl.GRPOTrainer.

    Raises:
        ValueError: A setting or the model is not supported; the message names it.
    """

    def __init__(self, *args: Any, backward_tolerance: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _take_over(self, backward_tolerance)

    def _compute_loss(self, model, inputs):
        outputs = []

        def scored(**model_inputs):
            outputs.append(_exact(model, functools.partial(score, self, inputs), **model_inputs))
            return outputs[-1]

        value = super()._compute_loss(scored, inputs)
        (output,) = outputs
        ours = output.loss.detach()
        if self._compared < COMPARED and not self.aux_loss_enabled:
            _compare(ours, value.detach(), inputs["advantages"], self.accelerator)
            self._compared += 1
        return value + (output.loss - ours)  # TRL's value, with its auxiliary loss, and our gradient

    def _get_per_token_logps_and_entropies(self, model, *args, compute_entropy=False, **kwargs):
        if isinstance(model, torch.nn.Module):  # not `scored` of _compute_loss
            model = functools.partial(
                _exact, model, lambda head: (None, head.score(head.labels != -100, compute_entropy))
            )
        return super()._get_per_token_logps_and_entropies(model, *args, compute_entropy=compute_entropy, **kwargs)


def _exact(model, score, **inputs):
    """Call a model with the function `score`, and return its fp32 results: FSDP casts what a module returns."""
    kept = []

    def keep(head):
        kept.append(score(head))
        return kept[-1]

    output = model(**inputs, score=keep)
    ((loss, scores),) = kept
    return replace(output, loss=loss, log_probs=scores.logps, entropy=scores.entropies)


def patch(trainer: GRPOTrainer, backward_tolerance: float = 0.0) -> FusedGRPOTrainer:
    """Replace head and loss of a TRL trainer.

    Args:
        trainer: A GRPOTrainer, before its training starts. It is changed in place.
        backward_tolerance: See `linear_grpo_loss`.

    Returns:
        The same object, now a FusedGRPOTrainer.

    Raises:
        ValueError: It is not a GRPOTrainer, has its own loss, an unsupported setting or model, or another tolerance.
    """
    kind = type(trainer)
    if not isinstance(trainer, GRPOTrainer):
        raise ValueError(f"trainer must be a trl.GRPOTrainer, got {kind.__name__}")
    if isinstance(trainer, FusedGRPOTrainer):
        if backward_tolerance not in (0.0, trainer.backward_tolerance):
            raise ValueError(f"trainer is patched already, with backward_tolerance={trainer.backward_tolerance}")
        return trainer
    for name in OURS:
        if name in vars(trainer) or getattr(kind, name) is not getattr(GRPOTrainer, name):
            raise ValueError(f"trainer must not override {name}, but {kind.__name__} does; remove the override")
    _take_over(trainer, backward_tolerance)
    bases = (FusedGRPOTrainer, kind)
    trainer.__class__ = FusedGRPOTrainer if kind is GRPOTrainer else type(f"Fused{kind.__name__}", bases, {})
    return trainer


def _take_over(trainer, backward_tolerance):
    """Validate the trainer, and attach the head to its model and reference."""
    _refuse(trainer)
    objective = replace(objective_of(trainer), entropy_coef=trainer.args.entropy_coef)  # raises if out of range
    check_backward_tolerance(backward_tolerance, objective)
    trainer._compared, trainer.backward_tolerance = 0, backward_tolerance
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            model = trainer.accelerator.unwrap_model(model)
            model = model.get_base_model() if is_peft_model(model) else model
            attach(model, trainer.temperature, trainer.args.cast_lm_head_to_fp32)


def _refuse(trainer):
    """Raise a ValueError that names an unsupported setting."""
    args, kind, model = trainer.args, trainer.loss_type, trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {}).values()
    prompts = [type(adapter).__name__ for adapter in adapters if adapter.is_prompt_learning]
    head = model.get_output_embeddings()
    own_weights = type(trainer).get_gamma_weights is not GRPOTrainer.get_gamma_weights
    by_sequence = trainer.importance_sampling_level == "sequence"
    corrected = trainer.beta != 0 and args.use_bias_correction_kl
    for refused, why in (
        (prompts, f"peft_config={', '.join(prompts)}: prompt tuning is not supported; use LoRA"),
        (args.torch_compile, "torch_compile=True: the forward pass computes the loss; leave it out"),
        (is_deepspeed_zero3_enabled(), "deepspeed: ZeRO stage 3 hides the weight of the head; use stage 2 or FSDP"),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process: start one process per GPU with torchrun"),
        (
            not head.weight.is_floating_point(),
            f"quantization_config: the head is {head.weight.dtype}; leave the head out of it",
        ),
        (
            type(head).__name__ == "TrainableTokensWrapper",
            "peft_config: trainable_token_indices of the head; use them only for the embedding",
        ),
        (kind == "vespo" and own_weights, f"{type(trainer).__name__}.get_gamma_weights: remove this override"),
        (kind not in SURROGATES, f"loss_type={kind!r}: choose one of {', '.join(SURROGATES)}"),
        (
            kind == "vespo" and by_sequence and corrected,
            "importance_sampling_level='sequence' for vespo with use_bias_correction_kl=True: leave out one of them",
        ),
    ):
        if refused:
            raise ValueError(f"fastgrpo does not support {why}")


def _compare(ours, theirs, advantages, accelerator):
    """Raise on all ranks if TRL's loss of the same log-probs differs from ours on any rank.

    If only one rank raised, the others would hang in the next all-reduce.
    """
    mine = torch.stack([ours, theirs, advantages.abs().max()]).float()
    for rank, (ours, theirs, size) in enumerate(accelerator.gather(mine).view(-1, 3).tolist()):
        tolerance = TOLERANCE * max(abs(theirs), size, 1e-3)
        if math.isfinite(theirs) and not math.isclose(ours, theirs, rel_tol=0, abs_tol=tolerance):
            raise RuntimeError(
                f"this version of TRL has another loss formula: {theirs} instead of {ours} for the same log-probs (on "
                f"rank {rank})"
            )


class Scores(NamedTuple):
    """The scores that TRL needs from the head.

    Attributes:
        logps: [B, T] or [B, L] log-probs, 0 where the label is -100.
        entropies: Entropies in nats, in the shape of logps, or None.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None


@dataclass(frozen=True)
class HeadInputs:
    """The head of a model with its input.

    Attributes:
        hidden: [B, L, D], the states that predict the labels.
        labels: [B, L] token ids, -100 for tokens without a score.
        weight: [V, D].
        bias: [V] or None.
        temperature: Temperature of the logits, including the model's own scale.
        softcap: The cap of the logits divided by the model's own scale, or None.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    softcap: float | None

    def score(self, chosen: torch.Tensor, with_entropy: bool) -> Scores:
        """Compute log-probs of the chosen tokens [B, L], and their entropies."""
        found = linear_logprob(
            self.hidden[chosen], self.weight, self.labels[chosen], bias=self.bias, logit_softcap=self.softcap,
            temperature=self.temperature, return_entropy=with_entropy,
        )  # fmt: skip
        values = found if with_entropy else (found,)
        placed = [value.new_zeros(chosen.shape).masked_scatter(chosen, value) for value in values]
        return Scores(*placed) if with_entropy else Scores(placed[0], None)


def attach(model: PreTrainedModel, temperature: float, cast_lm_head_to_fp32: bool) -> None:
    """Replace TRL's forward of a model for calls with `fused_lm_head=True`.

    TRL's `add_fused_lm_head` must have prepared the model. With `cast_lm_head_to_fp32`, the head is computed in fp32,
    also under autocast.
    """
    theirs, config = model.forward, model.config.get_text_config()
    scale, softcap = logit_scale(config), logit_softcap(config)
    if not scale > 0:
        raise ValueError(f"fastgrpo does not support a model that multiplies its logits by {scale}")
    # cap tanh(s x / cap) / T = (cap / s) tanh(x / (cap / s)) / (T / s)
    temperature, softcap = temperature / scale, None if softcap is None else softcap / scale

    @functools.wraps(type(model).forward)  # generate() checks its arguments against this signature
    def forward(self, *args, fused_lm_head=False, labels=None, score=None, **kwargs):
        if not fused_lm_head:
            return theirs(*args, labels=labels, **kwargs)
        found = self.base_model(*args, use_cache=False, **kwargs)
        layer = self.get_output_embeddings()
        weight, bias = map(_whole, (layer.weight, layer.bias))
        hidden, labels = found.last_hidden_state[:, :-1].to(weight.device), labels[:, 1:].to(weight.device)
        exact = torch.autocast(hidden.device.type, enabled=False) if cast_lm_head_to_fp32 else nullcontext()
        with exact:
            hidden = hidden.float() if cast_lm_head_to_fp32 else hidden
            head = HeadInputs(hidden, labels, weight, bias, temperature, softcap)
            loss, scores = (None, head.score(labels != -100, True)) if score is None else score(head)
        aux_loss = _aux_loss(found, config, kwargs) if kwargs.get("output_router_logits") else None
        return FusedCausalLMOutput(loss=loss, log_probs=scores.logps, entropy=scores.entropies, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


def _whole(parameter):
    """Gather a sharded parameter. Its gradient is the mean over the ranks, as FSDP reduces gradients."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


def _aux_loss(found, config, kwargs):
    """The load-balancing loss of a mixture of experts, which all models of transformers take from Mixtral's."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts, chosen = config.num_experts, config.num_experts_per_tok
    return load_balancing_loss_func(found.router_logits, experts, chosen, kwargs.get("attention_mask"))


# TRL's loss type -> a loss type of this package that has its surrogate.
SURROGATES = {
    **dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo", "luspo"), "dapo"),
    **{name: name for name in ("cispo", "sapo", "vespo")},
}


def objective_of(trainer: GRPOTrainer) -> Objective:
    """Translate TRL's settings into the surrogate and the KL of the loss."""
    args, loss_type = trainer.args, SURROGATES[trainer.loss_type]
    knobs = {"beta": trainer.beta, "use_bias_correction_kl": args.use_bias_correction_kl}
    if loss_type != "vespo":  # its ratio is always per sequence
        knobs["importance_sampling_level"] = trainer.importance_sampling_level
    if loss_type == "dapo":
        knobs |= {"epsilon": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high, "delta": args.delta}
    elif loss_type == "cispo":
        knobs["epsilon_high"] = trainer.epsilon_high
    else:
        own = {name: getattr(args, name) for name in READ[loss_type]}
        knobs |= vespo_knobs(own) if loss_type == "vespo" else own
    return Objective(loss_type=loss_type, **knobs)


def score(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor], head: HeadInputs) -> tuple[torch.Tensor, Scores]:
    """Compute TRL's loss of a micro-batch, and the scores of all completions for TRL's metrics.

    The loss excludes the loss of mixtures of experts. The scores are [B, T], without a gradient.
    """
    inputs = send_to_device(inputs, head.weight.device)
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    width = mask.shape[1]
    head = replace(head, hidden=head.hidden[:, -width:], labels=head.labels[:, -width:])
    scored, coefficient = head.labels != -100, _entropy_coefficient(trainer)
    windows = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    by_entropy = trainer.top_entropy_quantile < 1
    known = chosen = None
    if by_entropy or trainer.off_policy_mask_threshold is not None:  # masks depend on the scores
        with torch.no_grad():
            known = head.score(scored, with_entropy=True)
    if by_entropy:
        chosen = trainer.get_high_entropy_mask(known.entropies, mask, 1 - trainer.top_entropy_quantile)
    # At each call: a callback may have changed a setting of the trainer.
    objective = replace(objective_of(trainer), entropy_coef=coefficient)
    gains, old_logps = _gains(trainer, inputs, mask, known, chosen), inputs.get("old_per_token_logps")
    sampler_logps = _sampler(trainer, inputs, mask)
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
            rest = head.score(scored & ~out.active, with_entropy=True)  # these get no gradient: only a forward pass
        known = Scores(out.logps + rest.logps, out.entropies + rest.entropies)
    return out.loss, known


def _gains(trainer, inputs, mask, known, chosen):
    """Return the advantages [B, 1] or [B, T], times the factors of the surrogate."""
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
    """Return sampler log-probs [B, T] that give vespo TRL's importance weights; None for other losses."""
    ratio = inputs.get("importance_sampling_ratio")
    if trainer.loss_type != "vespo" or ratio is None:
        return None
    # TRL multiplies over the whole row. With a ratio, `inputs` has the old log-probs that the ratio was computed from.
    return inputs["old_per_token_logps"] - shared_log_weights(ratio, mask)


def _token_weights(trainer, mask, num_items, windows):
    """Return the token weights [B, T] of TRL's loss type, for one of `windows` micro-batches of an update."""
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
    """Return TRL's entropy coefficient of this micro-batch."""
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return trainer.entropy_coef
