"""Every objective that TRL or Liger has too: values and gradients of their own code, on the CPU in fp32."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from objective_cases import CASES, SAMPLER_CASES
from oracle import assert_close, padded_case, run

from fastgrpo import Objective, linear_grpo_loss
from fastgrpo.kernels import reference


def trl_importance(p, objective):
    """The ratio as TRL 1.16 forms it in _generate_and_score_completions: [B, T] or [B, 1]."""
    diff = (p.old_logps - p.sampler_logps) * p.mask
    if objective.importance_sampling_mode.startswith("sequence"):
        diff = diff.sum(-1, keepdim=True)
    low, high = objective.importance_sampling_clip_min, objective.importance_sampling_clip_max
    ratio = diff.exp()
    if objective.importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    outside = (ratio < (-torch.inf if low is None else low)) | (ratio > (torch.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


def run_trl(p, knobs):
    """GRPOTrainer._compute_loss itself, on a stand-in that holds what it reads."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed").GRPOTrainer
    objective, sampler = Objective(**knobs), p.sampler_logps is not None
    hidden, weight, bias = p.head().values()
    shape = p.targets.shape

    def logps_and_entropies(*args, **kwargs):
        logps, entropy = reference.linear_logprob(
            hidden.flatten(0, 1), weight, p.targets.flatten(), bias=bias, temperature=p.temperature, return_entropy=True
        )
        return logps.view(shape), entropy.view(shape), None

    objective_args = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")
    objective_args += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=logps_and_entropies,
        get_gamma_weights=trainer.get_gamma_weights,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(steps_per_generation=1, **{name: getattr(objective, name) for name in objective_args}),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=sampler,
        vllm_importance_sampling_correction=sampler, loss_type=objective.loss_type, beta=objective.beta,
        importance_sampling_level=objective.importance_sampling_level, epsilon_low=objective.epsilon,
        epsilon_high=objective.epsilon_high, max_completion_length=objective.max_completion_length,
        entropy_coef=objective.entropy_coef, use_adaptive_entropy=False,
        _entropy_bonus_enabled=objective.entropy_coef != 0, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    nothing = torch.zeros(shape[0], 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": p.targets, "completion_mask": p.mask.long(),
        "advantages": p.advantages, "num_items_in_batch": p.mask.sum(), "ref_per_token_logps": p.ref_logps,
    }  # fmt: skip
    if p.old_logps is not None:
        inputs["old_per_token_logps"] = p.old_logps
    if sampler:
        inputs["importance_sampling_ratio"] = trl_importance(p, objective)
    loss = trainer._compute_loss(stand_in, None, inputs)
    loss.backward()
    return loss.detach(), {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


def run_liger(p, knobs):
    """LigerFusedLinearGRPOLoss on the CPU, its plain path."""
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", reason="Liger is not installed")
    objective = Objective(**knobs)
    names = ("beta", "loss_type", "max_completion_length", "importance_sampling_level", "sapo_temperature_pos")
    names += ("sapo_temperature_neg", "delta", "use_bias_correction_kl", "vespo_k_pos", "vespo_lambda_pos")
    names += ("vespo_k_neg", "vespo_lambda_neg", "epsilon_high")
    module = liger.LigerFusedLinearGRPOLoss(
        compiled=False, use_ref_model=objective.beta != 0, chunk_size=2, temperature=p.temperature,
        epsilon_low=objective.epsilon, **{name: getattr(objective, name) for name in names},
    )  # fmt: skip
    hidden, weight, bias = p.head().values()
    loss, _ = module(
        hidden, weight, p.targets, p.mask.float(), p.advantages, bias=bias, ref_per_token_logps=p.ref_logps,
        old_per_token_logps=p.old_logps,
        vllm_is_ratio=None if p.sampler_logps is None else trl_importance(p, objective),
    )  # fmt: skip
    loss.backward()
    return loss.detach(), {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


def check_against(others, p, knobs):
    loss, gradients = others(p, knobs)
    out, own = run(p, linear_grpo_loss, **knobs)
    assert abs(out.loss - loss) <= 3e-6 * max(abs(loss), 1)  # its terms are larger, of both signs
    assert_close(own, gradients, 3e-6)


def batch(name="", old=True, **more):
    case = padded_case(dtype=torch.float32, old=old, **more)
    return case if name in SAMPLER_CASES else replace(case, sampler_logps=None)


EVERY = CASES | SAMPLER_CASES
RUNS = [(name, old) for name in EVERY for old in (True, False) if old or name in CASES]


@pytest.mark.parametrize(("name", "old"), RUNS)
def test_equals_trl(name, old):
    check_against(run_trl, batch(name, old), EVERY[name])


def in_liger(name):
    """Whether Liger has the case and computes it as the paper says."""
    knobs = EVERY[name]
    sequence = knobs.get("importance_sampling_level") == "sequence"
    padded_luspo = knobs.get("loss_type") == "luspo" and (knobs.get("beta") or name in SAMPLER_CASES)
    soft_sequence = sequence and knobs.get("loss_type") in ("cispo", "sapo")
    return not (padded_luspo or soft_sequence or knobs.get("entropy_coef"))


@pytest.mark.parametrize(("name", "old"), [run for run in RUNS if in_liger(run[0])])
def test_equals_liger(name, old):
    check_against(run_liger, batch(name, old), EVERY[name])


@pytest.mark.parametrize("name", ["luspo-k3", "luspo-corrected"])
def test_luspo_with_a_kl_equals_liger_without_padding_alone(name):
    """Liger multiplies by the length, then averages over the padded width and what lies in the padding."""
    check_against(run_liger, batch(lengths=(7, 7, 7, 7)), CASES[name])
    theirs, trls = (others(batch(), CASES[name])[0] for others in (run_liger, run_trl))
    assert abs(theirs - trls) > 1e-2 * abs(trls)
