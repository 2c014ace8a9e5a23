"""TRL's GRPOTrainer with the head and the loss of this package. Everything else stays TRL's.

    from fastgrpo.integrations.trl import FusedGRPOTrainer  # takes the place of trl.GRPOTrainer
    trainer = patch(trainer)                                # or: a GRPOTrainer that is there already

TRL calls the model with `fused_lm_head=True` for log-probs and entropies, and takes its loss of these. Here the model's
forward (trl_head.py) makes them: without gradient by `linear_logprob`, and in a step by `linear_grpo_loss`
(trl_loss.py), whose gradient is that of the whole loss. TRL's own `_compute_loss` then runs on these numbers, which
carry no gradient. It makes the metrics, moves the entropy coefficient and adds the loss of mixtures of experts.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from fastgrpo.integrations.trl_head import attach
from fastgrpo.integrations.trl_loss import SURROGATES, objective_of, score
from fastgrpo.loss.checks import check_backward_tolerance

# A class that has these of its own would lose them here, or have its loss without the gradient that belongs to it.
OURS = ("_compute_loss", "_get_per_token_logps_and_entropies")
# The first losses are compared with TRL's own code, which differs by more than the tolerance where a version of TRL has
# another formula. One is not enough: in the very first, ratios are 1, the KL is 0, and advantages may all be 0.
COMPARED, TOLERANCE = 16, 1e-3


class FusedGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer, whose head and loss never hold the logits [N, V].

    Args:
        args: Those of trl.GRPOTrainer.
        backward_tolerance: See `linear_grpo_loss`.
        kwargs: Those of trl.GRPOTrainer.

    Raises:
        ValueError: A setting or the model cannot be served; the text names it.
    """

    def __init__(self, *args: Any, backward_tolerance: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _take_over(self, backward_tolerance)

    def _compute_loss(self, model, inputs):
        outputs = []

        def scored(**model_inputs):
            outputs.append(model(**model_inputs, score=functools.partial(score, self, inputs)))
            return outputs[-1]

        value = super()._compute_loss(scored, inputs)
        (output,) = outputs
        ours = output.loss.detach()
        if self._compared < COMPARED and not self.aux_loss_enabled:
            _compare(ours, value.detach(), inputs["advantages"], self.accelerator)
            self._compared += 1
        return value + (output.loss - ours)  # TRL's value, which has the auxiliary loss, and the gradient of ours

    def _get_per_token_logps_and_entropies(self, model, *args, compute_entropy=False, **kwargs):
        asked = functools.partial(model, with_entropy=compute_entropy)
        return super()._get_per_token_logps_and_entropies(asked, *args, compute_entropy=compute_entropy, **kwargs)


def patch(trainer: GRPOTrainer, backward_tolerance: float = 0.0) -> FusedGRPOTrainer:
    """Give a trainer of TRL the head and the loss of this package.

    Args:
        trainer: A GRPOTrainer, before its training starts. It is changed in place.
        backward_tolerance: See `linear_grpo_loss`.

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
            raise ValueError(f"trainer must leave {name} to TRL, and {kind.__name__} has its own; remove that one")
    _take_over(trainer, backward_tolerance)
    bases = (FusedGRPOTrainer, kind)
    trainer.__class__ = FusedGRPOTrainer if kind is GRPOTrainer else type(f"Fused{kind.__name__}", bases, {})
    return trainer


def _take_over(trainer, backward_tolerance):
    """Check what the trainer wants, and attach the head to its model and to its reference."""
    _refuse(trainer)
    objective = replace(objective_of(trainer), entropy_coef=trainer.args.entropy_coef)  # refuses numbers out of range
    check_backward_tolerance(backward_tolerance, objective)
    trainer._compared, trainer.backward_tolerance = 0, backward_tolerance
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            model = trainer.accelerator.unwrap_model(model)
            model = model.get_base_model() if is_peft_model(model) else model
            attach(model, trainer.temperature, trainer.args.cast_lm_head_to_fp32)


def _refuse(trainer):
    """Raise a ValueError that names what cannot be served."""
    args, kind, model = trainer.args, trainer.loss_type, trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {}).values()
    prompts = [type(adapter).__name__ for adapter in adapters if adapter.is_prompt_learning]
    head = model.get_output_embeddings()
    own_weights = type(trainer).get_gamma_weights is not GRPOTrainer.get_gamma_weights
    by_sequence = trainer.importance_sampling_level == "sequence"
    corrected = trainer.beta != 0 and args.use_bias_correction_kl
    for refused, why in (
        (prompts, f"peft_config={', '.join(prompts)}: prompt tuning is not served; use LoRA"),
        (args.torch_compile, "torch_compile=True: the loss reads each batch inside of the forward; leave it out"),
        (is_deepspeed_zero3_enabled(), "deepspeed: ZeRO stage 3 hides the weight of the head; use stage 2 or FSDP"),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process: start one for each by torchrun or accelerate launch"),
        (
            not head.weight.is_floating_point(),
            f"quantization_config: the head is {head.weight.dtype}; leave the head out of it",
        ),
        (
            type(head).__name__ == "TrainableTokensWrapper",
            "peft_config: trainable_token_indices of the head; train them in the embedding alone",
        ),
        (kind == "vespo" and own_weights, f"{type(trainer).__name__}.get_gamma_weights: leave vespo's weights to TRL"),
        (kind not in SURROGATES, f"loss_type={kind!r}: choose one of {', '.join(SURROGATES)}"),
        (
            kind == "cispo" and not trainer.epsilon_high > 0,
            f"epsilon_high={trainer.epsilon_high}: it is the cap on the ratio of cispo, and must be positive",
        ),
        (
            kind == "vespo" and by_sequence and corrected,
            "importance_sampling_level='sequence' for vespo with use_bias_correction_kl=True: leave out one of them",
        ),
    ):
        if refused:
            raise ValueError(f"fastgrpo cannot serve {why}")


def _compare(ours, theirs, advantages, accelerator):
    """Raise on all ranks where TRL's code, on the same log-probs of one of them, has another loss than ours.

    A rank that stopped alone would leave the others waiting for it in the next sum of gradients.
    """
    mine = torch.stack([ours, theirs, advantages.abs().max()]).float()
    for rank, (ours, theirs, size) in enumerate(accelerator.gather(mine).view(-1, 3).tolist()):
        tolerance = TOLERANCE * max(abs(theirs), size, 1e-3)
        if math.isfinite(theirs) and not math.isclose(ours, theirs, rel_tol=0, abs_tol=tolerance):
            raise RuntimeError(
                f"this version of TRL has another loss than fastgrpo knows: {theirs} of the same log-probs, and not "
                f"{ours} (on rank {rank})"
            )
