"""What a loss returns: metrics over the active rows, and one field that carries gradient."""

import oracle
import pytest
import torch
from objective_cases import BOUNDS, assert_close, problem, run

from fastgrpo import GRPOLossOutput, grpo_loss, linear_grpo_loss
from fastgrpo.kernels import reference


def test_entropy_metric_is_the_mean_over_active_rows():
    case = oracle.make_case()
    output, _ = oracle.run(case, linear_grpo_loss, return_entropy=True)
    _, entropy = reference.linear_logprob(
        case.hidden, case.weight, case.targets, temperature=case.temperature, return_entropy=True
    )
    assert output.metrics["entropy"].item() == pytest.approx(entropy[case.mask].mean().item())
    assert_close(output.entropies, entropy.where(case.mask, 0), 1e-5)
    assert oracle.run(case, linear_grpo_loss)[0].entropies is None


def test_only_the_loss_carries_gradient():
    case = oracle.make_case(masked=0.0)
    logps = torch.randn(16, requires_grad=True)
    for output in (
        linear_grpo_loss(**case.head(), **case.rest(), beta=0.1, return_entropy=True),
        grpo_loss(logps, None, case.advantages, ref_logps=case.ref_logps, beta=0.1),
    ):
        assert isinstance(output, GRPOLossOutput) and output.loss.requires_grad
        assert not output.logps.requires_grad and not output.active.requires_grad
        assert not any(value.requires_grad for value in output.metrics.values())


def test_sampler_metrics_and_unknown_log_probs():
    p = problem()
    p.sampler_logps[0, 0] = torch.nan
    knobs = {"importance_sampling_mode": "token_truncate", **BOUNDS}
    out, _ = run(p, knobs, sampler=True)
    gap = (p.old_logps - p.sampler_logps)[out.active]
    weights = gap.nan_to_num(0).exp().clamp(0.8, 1.3)
    for name, expected in (("min", weights.min()), ("mean", weights.mean()), ("max", weights.max())):
        assert_close(out.metrics[f"sampling/importance_sampling_ratio/{name}"], expected, 1e-12)
    assert_close(out.metrics["sampling/sampling_logp_difference/mean"], gap.abs().nanmean(), 1e-12)
    assert_close(out.metrics["sampling/sampling_logp_difference/max"], gap.abs().nan_to_num(0).max(), 1e-12)
