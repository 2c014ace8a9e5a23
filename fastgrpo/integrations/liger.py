"""`LigerFusedLinearGRPOLoss` with the signature and the results of Liger-Kernel 0.8.5, computed by `linear_grpo_loss`.

A trainer written to Liger changes its import alone. `triton_grpo_loss`, which takes logits, is in liger_triton.py, and
liger_terms.py says for both what Liger's arguments are in our terms. docs/integrations.md lists where Liger's own
results differ from the formulas of the objectives. Liger itself is not imported.

Shapes: B sequences, T tokens of each (padded), V vocabulary, D hidden.
"""

import warnings

import torch

from fastgrpo.integrations.liger_terms import objective_of, step_tokens, translate
from fastgrpo.integrations.liger_triton import triton_grpo_loss
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.losses import linear_grpo_loss
from fastgrpo.loss.objective import LOSS_TYPES

__all__ = ["LigerFusedLinearGRPOLoss", "triton_grpo_loss"]

Tensor = torch.Tensor


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """The GRPO loss of a language-model head, as Liger-Kernel 0.8.5 has it under this name.

    The settings are attributes, as they are Liger's, and may be set between calls.

    Args:
        beta: Coefficient of the KL to the reference (k3).
        compiled: Read by nothing here: there is nothing to compile.
        use_ref_model: Whether there is a reference. Without one the KL is 0.
        chunk_size: Read by nothing here: chunks are chosen by the memory that they take.
        epsilon_low: The ratio is clipped to at least 1 - epsilon_low.
        epsilon_high: The ratio is clipped to at most 1 + epsilon_high; for cispo the cap on the ratio itself.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
        max_completion_length: The constant length that dr_grpo divides by, in tokens.
        importance_sampling_level: "token" or "sequence". Cispo and sapo take the ratio of a sequence here too.
        sapo_temperature_pos: Temperature of SAPO's gate for tokens with a positive advantage.
        sapo_temperature_neg: Temperature of SAPO's gate for all other tokens.
        temperature: Temperature of the softmax.
        delta: Upper bound on the unclipped ratio, or None. Cispo, sapo and vespo clip nothing and do not read it.
        use_bias_correction_kl: Whether the KL is multiplied by the ratio.
        vespo_k_pos: k of VESPO's weight for tokens with advantage >= 0.
        vespo_lambda_pos: lambda of VESPO's weight for tokens with advantage >= 0.
        vespo_k_neg: k of VESPO's weight for tokens with a negative advantage.
        vespo_lambda_neg: lambda of VESPO's weight for tokens with a negative advantage.

    Attributes:
        backward_tolerance: See `linear_grpo_loss`. Liger has no such setting, so that it is set on the instance.

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
        self._objective()  # refuses what cannot be computed

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
            _input: [B, T, D], the states that predict the tokens.
            lin_weight: [V, D], the head.
            selected_token_ids: [B, T] integers.
            attention_mask: [B, T], 0 where a token does not count.
            advantages: [B]; [B, T] is taken too.
            bias: [V] or None.
            ref_per_token_logps: [B, T] log-probs under the reference, or None.
            old_per_token_logps: [B, T] log-probs under the policy that drew the tokens, or None.
            ref_input: [B, T, D], the reference's states, where its log-probs are not given.
            ref_weight: [V, D], the reference's head.
            ref_bias: [V] or None.
            vllm_is_ratio: [B, T], [B, 1] or [B]: weight of the surrogate against the sampler, or None.
            num_items_in_batch: Tokens of the whole step on all processes, or None.

        Returns:
            The loss, and the means over the tokens of this call: (kl, clip_ratio), or (clip_ratio,) where beta is 0.

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
        terms = translate(objective, self.epsilon_high, advantages, mask, old_per_token_logps, vllm_is_ratio)
        out = linear_grpo_loss(
            _input, lin_weight, selected_token_ids, terms.advantages, mask=mask, old_logps=terms.old_logps,
            ref_logps=ref_logps, sampler_logps=terms.sampler_logps, temperature=self.temperature, bias=bias,
            num_items_in_batch=step_tokens(objective, mask, num_items_in_batch), objective=terms.objective,
            backward_tolerance=self.backward_tolerance,
        )  # fmt: skip
        tokens = mask.sum().clamp(min=1)
        share = out.metrics["active_tokens"] / tokens  # our means are over the tokens that carry gradient
        clipped = (out.metrics["clip_ratio/low_mean"] + out.metrics["clip_ratio/high_mean"]) * share
        if terms.all_clipped:
            clipped = ((terms.advantages if terms.advantages.ndim == 2 else terms.advantages[:, None]) > 0) & mask
            clipped = clipped.sum() / tokens
        if self.beta == 0.0:
            return out.loss, (clipped,)
        return out.loss, (out.metrics["kl"] * share * terms.kl_scale, clipped)
