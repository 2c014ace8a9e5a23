"""Every objective: the chunked closed form against plain autograd, and against what TRL and Liger compute."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from fastgrpo.kernels import chunked, reference

from fastgrpo import Objective, grpo_loss, linear_grpo_loss

LOSS_TYPES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
SEQUENCE = {"importance_sampling_level": "sequence"}
# Cases that TRL has too: the knobs are its knobs.
CASES = LOSS_TYPES | {
    "dapo-sequence": {**LOSS_TYPES["dapo"], **SEQUENCE},
    "cispo-sequence": {**LOSS_TYPES["cispo"], **SEQUENCE},
    "sapo-sequence": {**LOSS_TYPES["sapo"], **SEQUENCE},
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.5},
    "delta": {"delta": 1.25, "epsilon_high": 0.1},
    "gspo-delta": {**LOSS_TYPES["gspo"], "delta": 1.1, "epsilon": 0.05},
    "sapo-temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "vespo-shape": {**LOSS_TYPES["vespo"], "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_lambda_neg": 1.5},
    "entropy": {"entropy_coef": 0.3},
    "entropy-luspo-k3": {**LOSS_TYPES["luspo"], "entropy_coef": -0.2, "beta": 0.1},
    **{f"{name}-k3": {**knobs, "beta": 0.3} for name, knobs in LOSS_TYPES.items()},
    **{
        f"{name}-corrected": {**LOSS_TYPES[name], "beta": 0.3, "use_bias_correction_kl": True}
        for name in ("dapo", "cispo", "gspo", "luspo", "vespo")
    },
}
OWN_CASES = {
    f"{kl}{'-corrected' * corrected}-{name}": {
        **LOSS_TYPES[name], "beta": 0.3, "kl": kl, "use_bias_correction_kl": corrected
    }
    for kl in ("k1", "k2", "abs")
    for corrected in (False, True)
    for name in ("dapo", "gspo")
}  # fmt: skip
# Cases with sampler_logps.
BOUNDS = {"importance_sampling_clip_min": 0.8, "importance_sampling_clip_max": 1.3}
SAMPLER_CASES = {
    **{
        f"{name}-{mode}": {**LOSS_TYPES[name], "importance_sampling_mode": mode, **BOUNDS}
        for name in ("dapo", "gspo", "cispo", "sapo")
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "default-bounds": {"beta": 0.3},
    "no-cap": {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": None},
    "vespo-token_truncate": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate", **BOUNDS},
    "vespo-token_mask": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
    "luspo-token_truncate": {**LOSS_TYPES["luspo"], "importance_sampling_mode": "token_truncate", **BOUNDS},
}
V, D = 23, 6


def problem(dtype=torch.float64, lengths=(7, 4, 6, 0, 5, 2), seed=0, width=7):
    """A ragged padded batch: everything [B, width]; the third advantage is 0, the fourth sequence is masked out."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    b = len(lengths)
    p = SimpleNamespace(
        hidden=noise(b, width, D),
        weight=noise(V, D),
        bias=noise(V),
        targets=torch.randint(V, (b, width), generator=generator),
        advantages=torch.tensor([1.3, -0.7, 0.0, 0.9, -1.1, 0.4], dtype=dtype)[:b],
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        temperature=0.7,
    )
    logps = reference.linear_logprob(
        p.hidden.flatten(0, 1), p.weight, p.targets.flatten(), bias=p.bias, temperature=p.temperature
    ).view(b, width)
    p.old_logps, p.ref_logps = logps + noise(b, width, scale=0.3), logps + noise(b, width, scale=0.5)
    p.sampler_logps = p.old_logps + noise(b, width, scale=0.2)
    return p


def leaves(p):
    return [t.detach().clone().requires_grad_() for t in (p.hidden, p.weight, p.bias)]


def run(p, knobs, *, old=True, sampler=False, **kwargs):
    """Our fused loss and its gradients of hidden, weight, bias."""
    hidden, weight, bias = leaves(p)
    out = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, mask=p.mask, bias=bias, temperature=p.temperature,
        old_logps=p.old_logps if old else None, ref_logps=p.ref_logps if knobs.get("beta") else None,
        sampler_logps=p.sampler_logps if sampler else None, **knobs, **kwargs,
    )  # fmt: skip
    out.loss.backward()
    return out, [hidden.grad, weight.grad, bias.grad]


def run_reference(p, knobs, *, old=True, sampler=False, rows=None):
    """The specification over the masked-in tokens (or `rows`), by autograd."""
    objective = Objective(**knobs)
    mask = p.mask.flatten()
    rows = mask.nonzero()[:, 0] if rows is None else rows.flatten().nonzero()[:, 0]
    starts = torch.arange(p.mask.shape[0] + 1) * p.mask.shape[1]
    per_token = p.advantages[:, None].expand(p.mask.shape)
    hidden, weight, bias = leaves(p)
    loss, logps, metrics = reference.linear_grpo_loss(
        hidden.flatten(0, 1)[rows], weight, p.targets.flatten()[rows], per_token.flatten()[rows],
        objective.token_weights(mask, starts).to(p.hidden.dtype)[rows], objective, bias=bias,
        old_logps=p.old_logps.flatten()[rows] if old else None, ref_logps=p.ref_logps.flatten()[rows],
        sampler_logps=p.sampler_logps.flatten()[rows] if sampler else None,
        lengths=torch.searchsorted(rows, starts).diff(),
        entropy_weights=objective.entropy_weights(mask).to(p.hidden.dtype)[rows] if objective.entropy_coef else None,
        temperature=p.temperature,
    )  # fmt: skip
    loss.backward()
    return loss, logps, metrics, [hidden.grad, weight.grad, bias.grad]


def assert_close(actual, expected, tolerance):
    """Relative to the largest entry of what is expected."""
    scale = expected.abs().max().clamp(min=1e-30)
    assert ((actual - expected).abs().max() / scale).item() <= tolerance, (actual, expected)


def poisoned(p):
    """The same batch with NaN and -100 wherever the mask is off: these places must never be read."""
    hole = ~p.mask
    tensors = {name: getattr(p, name).masked_fill(hole, torch.nan) for name in ("old_logps", "ref_logps")}
    tensors["sampler_logps"] = p.sampler_logps.masked_fill(hole, torch.nan)
    hidden = p.hidden.masked_fill(hole[..., None], torch.nan)
    return SimpleNamespace(**{**vars(p), **tensors, "hidden": hidden, "targets": p.targets.masked_fill(hole, -100)})


def check_against_reference(monkeypatch, knobs, old, sampler):
    p = problem()
    loss, logps, _, grads = run_reference(p, knobs, old=old, sampler=sampler)
    # one chunk; chunks that end with sequences; sequences longer than a chunk
    for size in (100, 9, 3):
        monkeypatch.setattr(chunked, "chunk_rows", lambda _, size=size: size)
        out, own = run(poisoned(p), knobs, old=old, sampler=sampler)
        assert_close(out.loss, loss, 1e-10)
        for actual, expected in zip(own, grads, strict=True):
            assert_close(actual, expected, 1e-10)
        expected = torch.zeros_like(out.logps).masked_scatter(p.mask, logps)
        assert_close(out.logps, expected.masked_fill(~out.active, 0), 1e-10)
        if size == 100:
            metrics = run_reference(p, knobs, old=old, sampler=sampler, rows=out.active)[2]
        for name, expected in metrics.items():
            assert_close(out.metrics[name], expected, 1e-6 if "clip_ratio" in name else 1e-10)


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", CASES | OWN_CASES)
def test_equals_the_reference(monkeypatch, name, old):
    check_against_reference(monkeypatch, (CASES | OWN_CASES)[name], old, sampler=False)


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", SAMPLER_CASES)
def test_equals_the_reference_with_a_sampler(monkeypatch, name, old):
    check_against_reference(monkeypatch, SAMPLER_CASES[name], old, sampler=True)


@pytest.mark.parametrize("name", ["dapo", "gspo", "delta", "sapo", "sapo-sequence", "luspo-corrected", "k1-gspo"])
def test_gradcheck(name):
    p = problem(lengths=(4, 3, 2), width=4)
    knobs = (CASES | OWN_CASES)[name]
    ref = p.ref_logps if knobs.get("beta") else None

    def loss(logps):
        return grpo_loss(logps, p.old_logps, p.advantages, mask=p.mask, ref_logps=ref, **knobs).loss

    logps = (p.old_logps + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(loss, logps, eps=1e-7, atol=1e-7, rtol=1e-6)


def test_gradients_of_the_entropy_bonus_by_finite_differences():
    p = problem(lengths=(3, 2), width=3)

    def loss(hidden, weight):
        knobs = {"entropy_coef": 0.5, "old_logps": p.old_logps, "mask": p.mask}
        return linear_grpo_loss(hidden, weight, p.targets % 5, p.advantages, **knobs).loss

    hidden, weight = p.hidden.requires_grad_(), p.weight[:5].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (hidden, weight), eps=1e-6, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_first_update_has_ratio_exactly_one(name):
    out, _ = run(problem(torch.float32), LOSS_TYPES[name], old=False)
    assert out.metrics["ratio/max"] == 1 and out.metrics["ratio/mean"] == 1
    assert out.metrics["clip_ratio/low_mean"] == 0 and out.metrics["clip_ratio/high_mean"] == 0


def test_on_policy_vespo_and_cispo_are_reinforce():
    p = problem()
    losses = [run(p, LOSS_TYPES[name], old=False)[0] for name in ("vespo", "cispo")]
    weights = p.mask / p.mask.sum().float()
    expected = -(weights * p.advantages[:, None] * losses[0].logps).sum()
    for out in losses:
        assert_close(out.loss, expected, 1e-12)


@pytest.mark.parametrize("name", CASES | SAMPLER_CASES)
def test_packed_equals_padded(name):
    knobs, sampler = (CASES | SAMPLER_CASES)[name], name in SAMPLER_CASES
    p = problem()
    padded, (dh, dw, _) = run(p, knobs, sampler=sampler)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), p.mask.sum(1).cumsum(0)])
    fields = ("hidden", "targets", "old_logps", "ref_logps", "sampler_logps", "mask")
    packed = SimpleNamespace(**{**vars(p), **{field: getattr(p, field)[p.mask] for field in fields}})
    out, (packed_dh, packed_dw, _) = run(packed, knobs, sampler=sampler, cu_seqlens=cu_seqlens)
    assert_close(out.loss, padded.loss, 1e-12)
    assert_close(packed_dh, dh[p.mask], 1e-12)
    assert_close(packed_dw, dw, 1e-12)
    # rows given by hand: the same rows, the same result
    by_hand, (_, dw_by_hand, _) = run(p, knobs, sampler=sampler, rows=padded.active.flatten().nonzero()[:, 0])
    assert by_hand.loss == padded.loss and torch.equal(dw_by_hand, dw)


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo", "entropy", "vespo-token_mask"])
def test_micro_batches_sum_to_the_whole(name):
    knobs, sampler = (CASES | SAMPLER_CASES)[name], name in SAMPLER_CASES
    p = problem()
    whole, grads = run(p, knobs, sampler=sampler)
    parts = []
    for part in (slice(0, 2), slice(2, None)):
        fields = ("hidden", "targets", "advantages", "mask", "old_logps", "ref_logps", "sampler_logps")
        micro = SimpleNamespace(**{**vars(p), **{field: getattr(p, field)[part] for field in fields}})
        parts.append(run(micro, knobs, sampler=sampler, num_items_in_batch=p.mask.sum()))
    assert_close(sum(out.loss for out, _ in parts), whole.loss, 1e-12)
    assert_close(torch.cat([dh for _, (dh, _, _) in parts]), grads[0], 1e-12)
    assert_close(sum(dw for _, (_, dw, _) in parts), grads[1], 1e-12)


def test_entropy_bonus_keeps_rows_without_advantage_and_its_normalizer_is_the_mask():
    p = problem()
    p.advantages.zero_()
    out, _ = run(p, {"loss_type": "grpo", "entropy_coef": 0.5})
    assert torch.equal(out.active, p.mask)
    assert_close(out.loss, -0.5 * out.metrics["entropy"], 1e-7)  # weights are fp32
    assert out.metrics["policy_loss"] == 0


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


def test_a_sampler_that_agrees_changes_nothing():
    p = problem()
    p.sampler_logps = p.old_logps
    for name in ("dapo", "gspo", "vespo"):
        with_sampler, grads = run(p, LOSS_TYPES[name], sampler=True)
        without, expected = run(p, LOSS_TYPES[name])
        assert with_sampler.loss == without.loss and torch.equal(grads[0], expected[0])


def test_objective_by_record_and_by_name():
    p = problem()
    knobs = CASES["gspo-k3"]
    by_name = run(p, knobs)[0]
    by_record = linear_grpo_loss(
        p.hidden, p.weight, p.targets, p.advantages, mask=p.mask, bias=p.bias, temperature=p.temperature,
        old_logps=p.old_logps, ref_logps=p.ref_logps, objective=Objective(**knobs),
    )  # fmt: skip
    assert by_record.loss == by_name.loss.detach()
    with pytest.raises(ValueError, match="beta are fields of objective"):
        linear_grpo_loss(p.hidden, p.weight, p.targets, p.advantages, objective=Objective(), beta=0.1)
    with pytest.raises(TypeError, match="epsilon_hihg"):
        linear_grpo_loss(p.hidden, p.weight, p.targets, p.advantages, epsilon_hihg=0.1)


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"loss_type": "luspo"}, "luspo.*importance_sampling_level='sequence'"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo.*importance_sampling_level='token'"),
        ({"loss_type": "cispo"}, "cispo needs epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "cispo needs epsilon_high"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be positive"),
        ({"loss_type": "vespo", "vespo_lambda_pos": 0.0}, "vespo_lambda_pos must be positive"),
        ({"vespo_k_neg": -1.0}, "vespo_k_neg must be at least 0"),
        ({"kl": "k4"}, "kl must be one of"),
        ({"importance_sampling_mode": "tis"}, "importance_sampling_mode must be one of"),
        ({"importance_sampling_clip_min": 3.0}, "importance_sampling_clip_min"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be finite"),
    ],
)
def test_refuses_what_would_be_wrong(knobs, message):
    with pytest.raises(ValueError, match=message):
        Objective(**knobs)


def test_refuses_calls_that_would_be_wrong():
    p = problem()
    with pytest.raises(ValueError, match=r"vespo.*'token_truncate' or 'token_mask'"):
        run(p, {"loss_type": "vespo"}, sampler=True)
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs the logits"):
        grpo_loss(p.old_logps, None, p.advantages, entropy_coef=0.1)
    p.sampler_logps.requires_grad_()
    with pytest.raises(ValueError, match="sampler_logps must not require grad"):
        run(p, {}, sampler=True)
    flat = p.hidden.flatten(0, 1), p.weight, p.targets.flatten(), p.old_logps.flatten()
    for knobs in ({"loss_type": "vespo"}, {"sampler_logps": p.old_logps.flatten()}):
        with pytest.raises(ValueError, match="cu_seqlens is needed"):
            linear_grpo_loss(*flat, **knobs)


# What others compute.


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


def run_trl(p, knobs, *, old=True, sampler=False):
    """GRPOTrainer._compute_loss itself, on a stand-in that holds what it reads."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed").GRPOTrainer
    objective = Objective(**knobs)
    hidden, weight, bias = leaves(p)
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
    if old:
        inputs["old_per_token_logps"] = p.old_logps
    if sampler:
        inputs["importance_sampling_ratio"] = trl_importance(p, objective)
    loss = trainer._compute_loss(stand_in, None, inputs)
    loss.backward()
    return loss.detach(), [hidden.grad, weight.grad, bias.grad]


def run_liger(p, knobs, *, old=True, sampler=False):
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
    hidden, weight, bias = leaves(p)
    loss, _ = module(
        hidden, weight, p.targets, p.mask.float(), p.advantages, bias=bias, ref_per_token_logps=p.ref_logps,
        old_per_token_logps=p.old_logps if old else None,
        vllm_is_ratio=trl_importance(p, objective) if sampler else None,
    )  # fmt: skip
    loss.backward()
    return loss.detach(), [hidden.grad, weight.grad, bias.grad]


def check_against(others, p, knobs, old, sampler=False):
    loss, grads = others(p, knobs, old=old, sampler=sampler)
    out, own = run(p, knobs, old=old, sampler=sampler)
    assert abs(out.loss - loss) <= 3e-6 * max(abs(loss), 1)  # its terms are larger, of both signs
    for actual, expected in zip(own, grads, strict=True):
        assert_close(actual, expected, 3e-6)


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", CASES)
def test_equals_trl(name, old):
    check_against(run_trl, problem(torch.float32), CASES[name], old)


@pytest.mark.parametrize("name", SAMPLER_CASES)
def test_equals_trl_with_a_sampler(name):
    check_against(run_trl, problem(torch.float32), SAMPLER_CASES[name], old=True, sampler=True)


def in_liger(name, knobs):
    """Whether Liger has the case and computes it as the paper says."""
    sequence = knobs.get("importance_sampling_level") == "sequence"
    padded_luspo = knobs.get("loss_type") == "luspo" and (knobs.get("beta") or name in SAMPLER_CASES)
    soft_sequence = sequence and knobs.get("loss_type") in ("cispo", "sapo")
    return not (padded_luspo or soft_sequence or knobs.get("entropy_coef"))


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", [name for name, knobs in CASES.items() if in_liger(name, knobs)])
def test_equals_liger(name, old):
    check_against(run_liger, problem(torch.float32), CASES[name], old)


@pytest.mark.parametrize("name", [name for name, knobs in SAMPLER_CASES.items() if in_liger(name, knobs)])
def test_equals_liger_with_a_sampler(name):
    check_against(run_liger, problem(torch.float32), SAMPLER_CASES[name], old=True, sampler=True)


@pytest.mark.parametrize("name", ["luspo-k3", "luspo-corrected"])
def test_luspo_with_a_kl_equals_liger_without_padding_alone(name):
    """Liger multiplies by the length, then averages over the padded width and what lies in the padding."""
    full = problem(torch.float32, lengths=(7, 7, 7, 7))
    check_against(run_liger, full, CASES[name], old=True)
    ragged = problem(torch.float32)
    theirs, _ = run_liger(ragged, CASES[name])
    trls, _ = run_trl(ragged, CASES[name])
    ours, _ = run(ragged, CASES[name])
    assert_close(ours.loss, trls, 1e-6)
    assert abs(theirs - trls) > 1e-2 * abs(trls)
