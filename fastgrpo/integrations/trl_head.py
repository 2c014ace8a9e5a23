"""The forward that TRL's trainer calls for log-probs, on the fused head of this package.

TRL calls a model with `fused_lm_head=True` and labels, and gets log-probs and entropies of the labels. `attach` puts a
forward of that kind in the place of TRL's. It computes the states of the labels and hands them, with the head, to a
function of the caller, or scores them by `linear_logprob`. Neither holds the logits [N, V] in memory.

Shapes: B completions, L their length with prompts, less 1, T that of the longest completion; V vocabulary, D hidden.
"""

import functools
import types
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fastgrpo.loss import linear_logprob

try:
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise ImportError(
        "fastgrpo.integrations.trl needs trl >= 1.15, < 2, whose trainer asks the model for log-probs; install it by "
        f"pip install 'trl>=1.15,<2' ({error})"
    ) from error


class Scores(NamedTuple):
    """What TRL asks of the head.

    Attributes:
        logps: [B, T] or [B, L] log-probs, 0 where the label is -100.
        entropies: The same of the entropies in nats, or None.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None


@dataclass(frozen=True)
class Head:
    """The head of a model with the states that it reads.

    Attributes:
        hidden: [B, L, D], the states that predict the labels.
        labels: [B, L] token ids, -100 where TRL scores none.
        weight: [V, D].
        bias: [V] or None.
        temperature: That of the logits, with the model's own scale of them in it.
        softcap: The cap of the logits under that scale, or None.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    softcap: float | None

    def score(self, chosen: torch.Tensor, with_entropy: bool) -> Scores:
        """Compute log-probs of the chosen tokens, and their entropies.

        Args:
            chosen: [B, L] bool.
            with_entropy: Whether to compute entropies.
        """
        found = linear_logprob(
            self.hidden[chosen], self.weight, self.labels[chosen], bias=self.bias, logit_softcap=self.softcap,
            temperature=self.temperature, return_entropy=with_entropy,
        )  # fmt: skip
        values = found if with_entropy else (found,)
        placed = [value.new_zeros(chosen.shape).masked_scatter(chosen, value) for value in values]
        return Scores(*placed) if with_entropy else Scores(placed[0], None)


def attach(model: PreTrainedModel, temperature: float, cast_lm_head_to_fp32: bool) -> None:
    """Replace the forward that TRL gave a model, for calls with `fused_lm_head=True`. All others stay TRL's.

    Args:
        model: A causal language model after `add_fused_lm_head` of TRL.
        temperature: Temperature of the logits.
        cast_lm_head_to_fp32: Whether the head computes in fp32, also under autocast.
    """
    theirs, config = model.forward, model.config.get_text_config()
    scale, softcap = _logit_scale(config), getattr(config, "final_logit_softcapping", None)
    if not scale > 0:
        raise ValueError(f"fastgrpo cannot serve a model that multiplies its logits by {scale}")
    # cap tanh(s x / cap) / T = (cap / s) tanh(x / (cap / s)) / (T / s)
    temperature, softcap = temperature / scale, None if softcap is None else softcap / scale

    @functools.wraps(type(model).forward)  # generate() checks its arguments against this signature
    def forward(self, *args, fused_lm_head=False, labels=None, score=None, with_entropy=True, **kwargs):
        if not fused_lm_head:
            return theirs(*args, labels=labels, **kwargs)
        found = self.base_model(*args, use_cache=False, **kwargs)
        layer = self.get_output_embeddings()
        weight, bias = (p.full_tensor() if isinstance(p, DTensor) else p for p in (layer.weight, layer.bias))
        hidden, labels = found.last_hidden_state[:, :-1].to(weight.device), labels[:, 1:].to(weight.device)
        exact = torch.autocast(hidden.device.type, enabled=False) if cast_lm_head_to_fp32 else nullcontext()
        with exact:
            hidden = hidden.float() if cast_lm_head_to_fp32 else hidden
            head = Head(hidden, labels, weight, bias, temperature, softcap)
            loss, scores = (None, head.score(labels != -100, with_entropy)) if score is None else score(head)
        aux_loss = _aux_loss(found, config, kwargs) if kwargs.get("output_router_logits") else None
        return FusedCausalLMOutput(loss=loss, log_probs=scores.logps, entropy=scores.entropies, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


def _logit_scale(config):
    """What a model multiplies its logits by, before the soft-cap."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse Glimmer; Falcon-H1
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    scaling = getattr(config, "logits_scaling", None)  # Granite divides by it, and HyperCLOVA X multiplies
    return 1.0 if scaling is None else scaling if config.model_type == "hyperclovax" else 1 / scaling


def _aux_loss(found, config, kwargs):
    """The load-balancing loss of a mixture of experts, which all models of transformers take from Mixtral's."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts, chosen = config.num_experts, config.num_experts_per_tok
    return load_balancing_loss_func(found.router_logits, experts, chosen, kwargs.get("attention_mask"))
