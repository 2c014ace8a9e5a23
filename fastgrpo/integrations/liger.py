"""The GRPO losses of Liger-Kernel 0.8.5 under its names: `LigerFusedLinearGRPOLoss` and `triton_grpo_loss`.

A trainer for Liger only changes its imports. Signatures and results are Liger's; docs/integrations.md lists the cases
in which Liger's results differ from the formulas. Liger itself is not imported.

The class uses `linear_grpo_loss`, and the function `logits_grpo_loss`. The function returns the loss of each token,
or their weighted sum. The forward pass keeps only vectors over tokens, and the backward pass reads the logits again.
For the gradient dloss [B, T] of the token losses, the gradient of the logits equals that of `logits_grpo_loss` with
dloss as `token_weights`.

Shapes: B sequences, T tokens each (padded), V vocabulary, D hidden. The function gets T + 1 rows of logits per
sequence, as a model returns them. It ignores the last row: tokens get one more column, which is masked.
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fastgrpo.integrations.terms import READ, shared_log_weights, vespo_knobs
from fastgrpo.kernels.objectives import Tokens, compute_dtype, first_order, policy_loss_fwd, vespo_phi
from fastgrpo.loss.inputs import TokenInputs, keep_rows
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.losses import linear_grpo_loss, logits_grpo_loss
from fastgrpo.loss.objective import LOSS_TYPES, Objective

__all__ = ["LigerFusedLinearGRPOLoss", "triton_grpo_loss"]

Tensor = torch.Tensor


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """The GRPO loss of a language-model head, with the interface of Liger-Kernel 0.8.5.

    The settings are attributes, as in Liger, and can be set between calls.

    Args:
        beta: Coefficient of the KL to the reference (k3).
        compiled: No effect: there is nothing to compile.
        use_ref_model: Use a reference. If False, the KL is 0.
        chunk_size: No effect: chunks are chosen by memory.
        epsilon_low: The ratio is clipped to at least 1 - epsilon_low.
        epsilon_high: The ratio is clipped to at most 1 + epsilon_high; for cispo the cap on the ratio itself.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
        max_completion_length: The constant length that dr_grpo divides by, in tokens.
        importance_sampling_level: "token" or "sequence", also for cispo and sapo.
        sapo_temperature_pos: Temperature of SAPO's gate for tokens with a positive advantage.
        sapo_temperature_neg: Temperature of SAPO's gate for all other tokens.
        temperature: Temperature of the softmax.
        delta: Upper bound on the unclipped ratio, or None. Cispo, sapo and vespo ignore it.
        use_bias_correction_kl: Multiply the KL by the ratio.
        vespo_k_pos: k of VESPO's weight for tokens with advantage >= 0.
        vespo_lambda_pos: lambda of VESPO's weight for tokens with advantage >= 0.
        vespo_k_neg: k of VESPO's weight for tokens with a negative advantage.
        vespo_lambda_neg: lambda of VESPO's weight for tokens with a negative advantage.

    Attributes:
        backward_tolerance: See `linear_grpo_loss`. Liger has no such argument, so set the attribute.

    Raises:
        ValueError: `Objective` refuses the value of a setting.
    """

    backward_tolerance = 0.0

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ):  # fmt: skip
        super().__init__()
        self.beta, self.use_ref_model, self.temperature = beta, use_ref_model, temperature
        self.compiled, self.chunk_size = compiled, chunk_size
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.max_completion_length = loss_type, max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.use_bias_correction_kl = use_bias_correction_kl
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self._objective()  # raises for unsupported settings

    def _objective(self):
        clips = LOSS_TYPES.get(self.loss_type, ("clip",))[0] == "clip"
        return objective_of(
            self.loss_type, self.epsilon_high, epsilon=self.epsilon_low, delta=self.delta if clips else None,
            beta=self.beta if self.use_ref_model else 0.0, max_completion_length=self.max_completion_length,
            importance_sampling_level=self.importance_sampling_level,
            use_bias_correction_kl=self.use_bias_correction_kl,
            sapo_temperature_pos=self.sapo_temperature_pos, sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos, vespo_lambda_pos=self.vespo_lambda_pos, vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
        )  # fmt: skip

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Compute the loss.

        Args:
            _input: [B, T, D] hidden states that predict the tokens.
            lin_weight: [V, D], the head.
            selected_token_ids: [B, T] integers.
            attention_mask: [B, T], 0 for masked tokens.
            advantages: [B] or [B, T].
            bias: [V] or None.
            ref_per_token_logps: [B, T] log-probs under the reference, or None.
            old_per_token_logps: [B, T] log-probs under the policy that drew the tokens, or None.
            ref_input: [B, T, D] hidden states of the reference, used without ref_per_token_logps.
            ref_weight: [V, D], the reference's head.
            ref_bias: [V] or None.
            vllm_is_ratio: [B, T], [B, 1] or [B] importance weights (old policy / sampler), or None.
            num_items_in_batch: Tokens of the whole step on all processes, or None.

        Returns:
            The loss, and means over the tokens of this call: (kl, clip_ratio), or (clip_ratio,) if beta is 0.

        Raises:
            ValueError: As `linear_grpo_loss`, or the reference is not given and beta is not 0.
        """
        mask, objective = attention_mask != 0, self._objective()
        if objective.beta == 0:
            ref_logps = None
        elif ref_per_token_logps is not None:
            if ref_input is not None:
                warnings.warn(
                    "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.", stacklevel=2
                )
            ref_logps = ref_per_token_logps.detach()
        elif ref_input is None or ref_weight is None:
            raise ValueError(
                f"beta={self.beta} and use_ref_model=True need ref_per_token_logps, or ref_input and ref_weight; pass "
                "them, or use_ref_model=False"
            )
        else:
            with torch.no_grad():
                ref_logps = linear_logprob(
                    ref_input, ref_weight, selected_token_ids.masked_fill(~mask, 0), bias=ref_bias,
                    temperature=self.temperature,
                )  # fmt: skip
        terms = translate(objective, advantages, mask, old_per_token_logps, vllm_is_ratio)
        out = linear_grpo_loss(
            _input, lin_weight, selected_token_ids, terms.advantages, mask=mask, old_logps=terms.old_logps,
            ref_logps=ref_logps, sampler_logps=terms.sampler_logps, temperature=self.temperature, bias=bias,
            num_items_in_batch=step_tokens(objective, mask, num_items_in_batch), objective=terms.objective,
            backward_tolerance=self.backward_tolerance,
        )  # fmt: skip
        tokens = mask.sum().clamp(min=1)
        share = out.metrics["active_tokens"] / tokens  # our means are over the tokens that carry gradient
        clipped = (out.metrics["clip_ratio/low_mean"] + out.metrics["clip_ratio/high_mean"]) * share
        if self.beta == 0.0:
            return out.loss, (clipped,)
        return out.loss, (out.metrics["kl"] * share, clipped)


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: float | Tensor | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, Tensor | None, Tensor] | tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Compute the GRPO loss of logits, per token or reduced, with the interface of Liger-Kernel 0.8.5.

    Args:
        logits: [B, T + 1, V] floating point, before the temperature.
        old_logp: [B, T] log-probs under the policy that drew the tokens; None uses the current ones.
        ref_logp: [B, T] log-probs under the reference, required if beta is not 0.
        completion_ids: [B, T] integers.
        advantages: [B] or [B, T].
        completion_mask: [B, T], 0 for masked tokens; None masks none.
        temperature: Temperature of the softmax.
        beta: Coefficient of the KL to the reference (k3).
        eps_low: The ratio is clipped to at least 1 - eps_low.
        eps_high: The ratio is clipped to at most 1 + eps_high; for cispo the cap on the ratio itself.
        inplace: Overwrite the logits with their gradient, which saves a tensor of their size.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
        max_completion_length: The constant length that dr_grpo divides by; None is T.
        importance_sampling_level: "token" or "sequence", also for cispo and sapo.
        reduce: Sum the token losses with the weights of the loss type.
        sapo_temperature_pos: Temperature of SAPO's gate for tokens with a positive advantage.
        sapo_temperature_neg: Temperature of SAPO's gate for all other tokens.
        vllm_is_ratio: [B, T], [B, 1] or [B] importance weights (old policy / sampler), or None.
        delta: Upper bound on the unclipped ratio, or None.
        use_bias_correction_kl: Multiply the KL by the ratio.
        num_items_in_batch: Tokens of the whole step on all processes. None counts the tokens of this call on all.
        vespo_k_pos: k of VESPO's weight for tokens with advantage >= 0.
        vespo_lambda_pos: lambda of VESPO's weight for tokens with advantage >= 0.
        vespo_k_neg: k of VESPO's weight for tokens with a negative advantage.
        vespo_lambda_neg: lambda of VESPO's weight for tokens with a negative advantage.

    Returns:
        With `reduce`, the loss and a list of means over tokens: [kl, clip_ratio], or [clip_ratio] if beta is 0.
        Otherwise [B, T] each, 0 for masked tokens: the loss, which has a gradient; the KL, or None if beta is 0; and 1
        if the ratio is clipped, else 0.

    Raises:
        ValueError: A shape does not fit, or a setting is refused by `Objective` or `logits_grpo_loss`.
    """
    if (
        completion_ids.ndim != 2
        or logits.ndim != 3
        or logits.shape[:2] != (len(completion_ids), completion_ids.shape[1] + 1)
    ):
        raise ValueError(
            f"logits must be [B, T + 1, V] for completion_ids [B, T], got {tuple(logits.shape)} for "
            f"{tuple(completion_ids.shape)}"
        )
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    objective = objective_of(
        loss_type, eps_high, epsilon=eps_low, delta=delta, beta=beta,
        max_completion_length=completion_ids.shape[1] if max_completion_length is None else max_completion_length,
        importance_sampling_level=importance_sampling_level, use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
    )  # fmt: skip
    terms = translate(objective, advantages, mask, old_logp, vllm_is_ratio)
    loss, kl, clipped = TokenLosses.apply(logits, completion_ids, mask, ref_logp, temperature, terms, inplace)
    if not reduce:
        return loss, kl if beta != 0.0 else None, clipped
    items = step_tokens(objective, mask, num_items_in_batch)
    weights = objective.token_weights(mask, None, items, loss.dtype)
    tokens = mask.sum().clamp(min=1)
    metrics = [value.sum() / tokens for value in (kl, clipped)]
    return (loss * weights).sum(), metrics if beta != 0.0 else metrics[1:]


class TokenLosses(torch.autograd.Function):
    """Returns loss, KL and clipping of each token [B, T], of which the loss is differentiable by the logits."""

    @staticmethod
    def forward(ctx, logits, completion_ids, mask, ref_logp, temperature, terms, inplace):
        ctx.set_materialize_grads(False)
        inputs = _inputs(completion_ids, mask, ref_logp, temperature, terms)
        logps = _loss(logits.detach(), inputs, terms).logps.flatten()
        kept = keep_rows(inputs, terms.objective, compact=False, dtype=compute_dtype(logits))
        logps = logps if kept.index is None else logps[kept.index]
        loss, _, metrics = policy_loss_fwd(logps, kept, terms.objective)
        clipped = (metrics["clipped_low"] | metrics["clipped_high"]).to(loss.dtype)
        ctx.save_for_backward(logits)
        ctx.inputs, ctx.terms, ctx.inplace = inputs, terms, inplace

        def spread(values):
            values = values if kept.index is None else torch.zeros_like(values).index_copy_(0, kept.index, values)
            return values.view(inputs.mask.shape)[:, :-1].contiguous()

        loss, kl, clipped = map(spread, (loss, metrics["kl"], clipped))
        ctx.mark_non_differentiable(kl, clipped)
        return loss, kl, clipped

    @staticmethod
    @first_order("triton_grpo_loss")
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * 7
        (logits,) = ctx.saved_tensors
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            out = _loss(leaf, ctx.inputs._replace(token_weights=_wider(dloss)), ctx.terms, inplace=ctx.inplace)
            (grad,) = torch.autograd.grad(out.loss, leaf)
        return grad, *(None,) * 6


def _wider(values):
    """Add a column of zeros to [B, T]; None passes."""
    return None if values is None else torch.nn.functional.pad(values, (0, 1))


def _inputs(completion_ids, mask, ref_logp, temperature, terms):
    """Return the token inputs of the losses, [B, T + 1], all with weight 1."""
    advantages = terms.advantages if terms.advantages.ndim == 2 else terms.advantages[:, None].expand(mask.shape)
    mask = _wider(mask)
    return TokenInputs(
        _wider(completion_ids), _wider(advantages), mask, old_logps=_wider(terms.old_logps),
        ref_logps=None if ref_logp is None else _wider(ref_logp.detach()), sampler_logps=_wider(terms.sampler_logps),
        token_weights=mask.to(advantages.dtype), temperature=temperature,
    )  # fmt: skip


def _loss(logits, inputs, terms, inplace=False):
    fields = {name: value for name, value in inputs._asdict().items() if value is not None}
    return logits_grpo_loss(
        logits, fields.pop("targets"), fields.pop("advantages"), **fields, inplace=inplace, objective=terms.objective
    )


class Terms(NamedTuple):
    """A batch of Liger, translated.

    Attributes:
        objective: The objective to compute.
        advantages: [B] or [B, T], which carry the importance weights against the sampler.
        old_logps: [B, T] or None.
        sampler_logps: [B, T], only for vespo, or None.
    """

    objective: Objective
    advantages: Tensor
    old_logps: Tensor | None
    sampler_logps: Tensor | None = None


def objective_of(loss_type: str, epsilon_high: float, **knobs: Any) -> Objective:
    """Translate Liger's settings into an objective. Unused settings may have any value, as in Liger."""
    surrogate = LOSS_TYPES.get(loss_type, ("clip",))[0]
    knobs["epsilon_high"] = epsilon_high
    unread = {name for names in READ.values() for name in names} - {*READ[surrogate]}
    knobs = {name: value for name, value in knobs.items() if name not in unread}
    if loss_type == "vespo":
        knobs |= vespo_knobs({name: knobs[name] for name in READ["vespo"] if name in knobs})
    return Objective(loss_type=loss_type, **knobs)


def translate(
    objective: Objective, advantages: Tensor, mask: Tensor, old_logps: Tensor | None, ratio: Tensor | None
) -> Terms:
    """Translate a batch of Liger.

    The importance weight I of a token is at least 0, and every surrogate but vespo's is linear in the advantage on each
    side of 0, so I s(A) = s(I A). `advantages` are [B] or [B, T]. `ratio` is I: [B, T], or [B, 1] or [B] for
    one weight per sequence, or None; another shape raises ValueError.
    """
    advantages = advantages.detach().to(compute_dtype(advantages))
    old_logps = None if old_logps is None else old_logps.detach().to(compute_dtype(old_logps))
    if ratio is not None:
        ratio = ratio.detach()[:, None] if ratio.ndim == 1 else ratio.detach()
        if ratio.shape not in (mask.shape, (len(mask), 1)):
            raise ValueError(
                f"vllm_is_ratio must be [B], [B, 1] or [B, T]={tuple(mask.shape)}, got {tuple(ratio.shape)}"
            )
        advantages = (advantages[:, None] if advantages.ndim == 1 else advantages).expand(mask.shape)
        if objective.surrogate == "vespo":
            return _vespo(objective, advantages, mask, old_logps, ratio)
        advantages = advantages * ratio
    return Terms(objective, advantages, old_logps)


def _vespo(objective, advantages, mask, old_logps, ratio):
    """Return the sampler log-probs that put VESPO's importance weights into W, the product over the unmasked tokens."""
    ratio = ratio.masked_fill(~mask, 1) if ratio.shape == mask.shape else ratio
    log_ratio = shared_log_weights(ratio, mask).expand(mask.shape)
    if old_logps is not None:
        return Terms(objective, advantages, old_logps, sampler_logps=old_logps - log_ratio)
    # Without old log-probs W is known: -phi(W) A logp is CISPO's loss for the advantages phi(W) A, its ratio being 1.
    importance = log_ratio.masked_fill(~mask, 0).exp().flatten()
    lengths = torch.full((len(mask),), mask.shape[1], device=mask.device)
    tokens = Tokens(torch.zeros_like(importance), advantages.flatten(), importance, lengths)
    phi = vespo_phi(tokens, objective).view(mask.shape)
    return Terms(replace(objective, loss_type="cispo", epsilon_high=1.0), advantages * phi, None)


def step_tokens(objective: Objective, mask: Tensor, num_items_in_batch: float | Tensor | None) -> float | Tensor | None:
    """Count the tokens of the step as in Liger, divided by the number of processes.

    `num_items_in_batch` counts all processes and micro-batches; None counts this call on all processes. If the weights
    do not use this count, no process communicates.
    """
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if ranks else 1
    if processes == 1 or LOSS_TYPES[objective.loss_type][1] != "step_tokens":
        return num_items_in_batch
    if num_items_in_batch is None:
        num_items_in_batch = mask.sum().float()
        torch.distributed.all_reduce(num_items_in_batch)
    return num_items_in_batch / processes
