"""Every public loss and log-prob, forward and backward, through Triton's launch path for a GPU that is not there."""

import torch
from stand_in import crossed

from fastgrpo.kernels import launch
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.losses import grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.loss.objective import IMPORTANCE_SAMPLING_MODES, KL_KINDS, LOSS_TYPES

N, D, V = 130, 128, 1000
CU_SEQLENS = torch.tensor([0, 40, 90, 130])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS = {
    "every": {}, "listed": {"rows": torch.arange(N)}, "some": {"rows": torch.arange(0, N, 2)},
    "masked": {"mask": torch.arange(N) % 3 > 0}, "compacted": {"mask": torch.arange(N) % 3 > 0, "compact": "sync"},
}  # fmt: skip
TEMPERATURES = {"one": 1.0, "each": torch.full((N,), 0.7)}
ENTROPIES = {"without": {}, "read": {"return_entropy": True}, "bonus": {"entropy_coef": 0.01}}
SEQUENCE = {"importance_sampling_level": "sequence"}
# What a loss type does not have by default but needs.
NEEDS = {"dr_grpo": {"max_completion_length": 99}, "cispo": {"epsilon_high": 5.0}, "luspo": SEQUENCE}
INPUTS = {
    "first-update": {}, "ratio": {"old_logps": torch.zeros(N)},
    "reference": {"old_logps": torch.zeros(N), "ref_logps": torch.zeros(N), "beta": 0.1},
    "two-sided": {"old_logps": torch.zeros(N), "delta": 2.0}, "sequence": {"old_logps": torch.zeros(N), **SEQUENCE},
    "sampler": {"old_logps": torch.zeros(N), "sampler_logps": torch.zeros(N), "importance_sampling_mode": "token_mask"},
}  # fmt: skip
# The kernels of a loss over given logits: in place and token by token one kernel computes loss and gradient.
FUSED = ["_logits_grpo_fwd_kernel", "_scale_rows_kernel"]
APART = ["_logits_grpo_fwd_kernel", "_policy_loss_fwd_kernel", "_logits_grpo_bwd_kernel"]


def head(biased=False, vocab=V, depth=D):
    hidden, weight = (torch.randn(rows, depth).bfloat16().requires_grad_() for rows in (N, vocab))
    bias = torch.zeros(vocab, dtype=torch.bfloat16, requires_grad=True) if biased else None
    return hidden, weight, torch.randint(vocab, (N,)), bias


@crossed(temperature=TEMPERATURES, bias=(False, True), softcap=(None, 30.0), entropy=ENTROPIES)
def test_head_of_the_loss(temperature, bias, softcap, entropy, launches):
    hidden, weight, targets, bias = head(bias)
    out = linear_grpo_loss(
        hidden, weight, targets, torch.randn(N), bias=bias, temperature=TEMPERATURES[temperature],
        logit_softcap=softcap, backend="triton", **ENTROPIES[entropy], **INPUTS["ratio"],
    )  # fmt: skip
    out.loss.backward()
    assert has_descriptors() == ("_linear_exp_fwd_kernel" in launches)


@crossed(temperature=TEMPERATURES, bias=(False, True), softcap=(None, 30.0), entropy=(False, True),
         grad=(False, True))  # fmt: skip
def test_log_probs(temperature, bias, softcap, entropy, grad, launches):
    hidden, weight, targets, bias = head(bias)
    with torch.set_grad_enabled(grad):
        out = linear_logprob(
            hidden, weight, targets, bias=bias, temperature=TEMPERATURES[temperature], logit_softcap=softcap,
            return_entropy=entropy, backend="triton",
        )  # fmt: skip
    if grad:
        sum(part.sum() for part in (out if entropy else (out,))).backward()
    assert has_descriptors() == ("_linear_exp_fwd_kernel" in launches)


@crossed(rows=ROWS, inputs=INPUTS)
def test_rows_of_the_head(rows, inputs, launches):
    hidden, weight, targets, _ = head()
    out = linear_grpo_loss(
        hidden, weight, targets, torch.randn(N), cu_seqlens=CU_SEQLENS, backend="triton", **rows_for(rows, inputs),
        **INPUTS[inputs],
    )  # fmt: skip
    out.loss.backward()
    assert has_descriptors() == ("_linear_exp_fwd_kernel" in launches)
    assert launches.count("_policy_loss_fwd_kernel") == 1


@crossed(vocab=(999, 1001, 1008), depth=(128, 136, 100), softcap=(None, 30.0))
def test_sizes_that_no_block_divides(vocab, depth, softcap, launches):
    hidden, weight, targets, _ = head(vocab=vocab, depth=depth)
    knobs = {"logit_softcap": softcap, "backend": "triton", **INPUTS["ratio"]}
    linear_grpo_loss(hidden, weight, targets, torch.randn(N), **knobs).loss.backward()
    aligned = depth * hidden.itemsize % 16 == 0  # otherwise the tensor-memory accelerator cannot read the rows
    assert (has_descriptors() and aligned) == ("_linear_exp_fwd_kernel" in launches)


@crossed(dtype=DTYPES, temperature=TEMPERATURES, rows=ROWS, inplace=(False, True), inputs=INPUTS,
         entropy=("without", "bonus"))  # fmt: skip
def test_given_logits(dtype, temperature, rows, inplace, inputs, entropy, launches):
    logits = torch.randn(N, V).to(DTYPES[dtype]).requires_grad_()
    out = logits_grpo_loss(
        logits * 1, torch.randint(V, (N,)), torch.randn(N), cu_seqlens=CU_SEQLENS, inplace=inplace, backend="triton",
        temperature=TEMPERATURES[temperature], **rows_for(rows, inputs), **INPUTS[inputs], **ENTROPIES[entropy],
    )  # fmt: skip
    out.loss.backward()
    assert launches == (FUSED if inplace and inputs != "sequence" and dtype != "fp16" else APART)


@crossed(loss_type=LOSS_TYPES, kl=[kind for kind in KL_KINDS if kind != "full"], corrected=(False, True))
def test_objectives(loss_type, kl, corrected, launches):
    logps = torch.zeros(N, requires_grad=True)
    out = grpo_loss(
        logps, torch.zeros(N), torch.randn(N), ref_logps=torch.zeros(N), cu_seqlens=CU_SEQLENS, num_items_in_batch=N,
        loss_type=loss_type, kl=kl, beta=0.1, use_bias_correction_kl=corrected, backend="triton",
        **NEEDS.get(loss_type, {}),
    )  # fmt: skip
    out.loss.backward()
    assert launches == ["_policy_loss_fwd_kernel"]


@crossed(mode=IMPORTANCE_SAMPLING_MODES, level=("token", "sequence"))
def test_importance_weights(mode, level, launches):
    logps, knobs = torch.zeros(N, requires_grad=True), {"cu_seqlens": CU_SEQLENS, "backend": "triton"}
    knobs |= {"importance_sampling_mode": mode, "importance_sampling_level": level, "sampler_logps": torch.zeros(N)}
    grpo_loss(logps, torch.zeros(N), torch.randn(N), **knobs).loss.backward()
    assert launches == ["_policy_loss_fwd_kernel"]


def has_descriptors():
    return launch.capability(None)[0] in launch.DESCRIPTOR_MAJORS


def rows_for(rows, inputs):
    """Return which rows are kept. An objective that looks at whole sequences must get all of their tokens."""
    if inputs == "sequence" and rows == "some":
        return {"rows": torch.arange(90)}
    return ROWS[rows]
