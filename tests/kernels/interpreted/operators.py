"""torch.library.opcheck of every operator: what it writes, and what its fake implementation says of its results."""

import pytest
import torch

from fastgrpo.kernel_checks import cases
from fastgrpo.kernels import head as heads
from fastgrpo.kernels import logits
from fastgrpo.kernels.objectives import kernel_knobs

N, D, V = 20, 16, 70


def calls():
    """Return (operator, arguments) by name, each operator in its usual form and with whatever it may leave out."""
    leaves, given = cases.random_head(N, D, V, torch.float32, bias=True, temperature="row")
    hidden, weight, bias = (leaf.detach() for leaf in leaves.values())
    targets, temperatures = given["targets"], given["temperature"]
    full = (hidden, weight, bias, targets, 1.0, temperatures, 5.0)
    bare = (hidden, weight, None, targets, 0.7, None, None)
    g, h = torch.randn(2, N)
    rows, exps = heads.linear_logprob_fwd(*bare, True, True, False, 8192, None)

    def gradients():
        return heads.empty_gradients(N, weight, (True, True, True))

    z = hidden @ weight.T
    tokens = [given[name] for name in ("old_logps", "ref_logps", "advantages", "token_weights")]
    knobs = kernel_knobs(cases.DAPO)
    places = torch.arange(N + 5) - 5
    taller = torch.cat([z[:5], z])
    stats = logits.logits_stats(z, None, targets, 0.7, None)
    return {
        "linear_logprob_fwd": (heads.linear_logprob_fwd, (*bare, True, True, True, 8192, None)),
        "linear_logprob_fwd, chunks": (heads.linear_logprob_fwd, (*full, False, True, False, 16, None)),
        "linear_logprob_bwd": (heads.linear_logprob_bwd, (*full, rows, g, h, *gradients(), 16, None)),
        "linear_logprob_bwd, frozen": (heads.linear_logprob_bwd, (*bare, rows, g, None, None, None, None, 8192, None)),
        "head_products": (heads.head_products, (exps, g, hidden, weight, *gradients(), 0, None)),
        "head_entropy_bwd": (heads.head_entropy_bwd, (exps.log2(), targets, rows, g, h, torch.empty_like(exps))),
        "policy_loss_rows": (logits.policy_loss_rows, (rows[0], tokens[0], None, *tokens[1:], None, None, *knobs)),
        "logits_stats": (logits.logits_stats, (taller, places, targets, 1.0, temperatures)),
        "logits_grpo_": (logits.logits_grpo_, (z, None, targets, 0.7, None, *tokens, None, None, *knobs)),
        "logits_bwd": (logits.logits_bwd, (z, None, targets, 0.7, None, stats, g, h, torch.empty_like(z))),
        "scale_rows_": (logits.scale_rows_, (z, torch.tensor(2.0))),
    }  # fmt: skip


CALLS = calls() if heads.launch.INTERPRET else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    operator, arguments = CALLS[name]
    torch.library.opcheck(operator, arguments)


def test_every_operator_is_checked():
    checked = {operator._qualname for operator, _ in CALLS.values()}
    registered = {f"fastgrpo::{name}" for module in (heads, logits) for name, value in vars(module).items()
                  if isinstance(value, torch.library.CustomOpDef)}  # fmt: skip
    assert checked == registered and len(checked) == 9
