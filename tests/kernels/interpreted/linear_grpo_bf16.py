"""The fused head in bf16, its dtype on a GPU. The fixture `bf16` corrects the bf16 products of Triton's interpreter."""

import pytest
import torch
from heads import check, check_grpo, random_head, run_logprob, truth, weighted

from fastgrpo import Objective, linear_grpo_loss

BF16 = torch.bfloat16
SHAPE = (384, 16, 50)  # rounding errors of fewer tokens differ by chance more than the tolerance allows


@pytest.mark.parametrize("options", [{}, {"bias": True, "temperature": "row", "softcap": 5.0, "scale": 3.0}], ids=str)
def test_logprob(options, bf16):
    head = random_head(*SHAPE, BF16, **options)
    check(run_logprob(head), head, weighted(head))


def test_chunks_and_sequence_level_ratios(bf16):
    head, objective = random_head(*SHAPE, BF16, bias=True, temperature="row"), Objective(beta=0.1)
    check_grpo(head, objective, 128)
    head = random_head(*SHAPE, BF16)
    objective = Objective(importance_sampling_level="sequence", beta=0.3, use_bias_correction_kl=True)
    check_grpo(head, objective)


@pytest.mark.parametrize("softcap", (None, 5.0), ids=("exponentials", "recomputed"))
def test_entropy_bonus(softcap, bf16):
    head, objective = random_head(*SHAPE, BF16, softcap=softcap), Objective(beta=0.1, entropy_coef=0.3)
    check_grpo(head, objective, entropy_weights=torch.full(SHAPE[:1], 0.3 / SHAPE[0]))


def test_targets_far_below_the_rest(bf16):
    """Rows past the guard are computed again, with their maximum as the anchor."""
    head = random_head(*SHAPE, BF16)
    head.hidden[::16] *= 20
    head.targets[::16] = (head.hidden.float() @ head.weight.float().T)[::16].argmin(-1)
    assert truth(head, weighted(head))["logps"].min() < -60
    check(run_logprob(head), head, weighted(head))


def test_the_public_loss_takes_bf16(bf16, batch):
    """It chooses the anchored path by the dtype. The chunked backend computes in fp32 from the same numbers."""
    hidden, weight, kwargs = batch
    results = []
    for backend in ("triton", "chunked"):
        leaves = [x.to(BF16).requires_grad_() for x in (hidden, weight)]
        out = linear_grpo_loss(*leaves, beta=0.1, backend=backend, **kwargs)
        results.append((out, [x.float() for x in torch.autograd.grad(out.loss, leaves)]))
    (ours, gradients), (theirs, others) = results
    torch.testing.assert_close(ours.logps, theirs.logps, rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients, others, strict=True):
        assert (mine - other).norm() <= 0.01 * other.norm()
