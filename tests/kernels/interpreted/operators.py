"""torch.library.opcheck of every operator: what it writes, and what its fake implementation says of its results.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import pytest
import torch
from heads import random_head

from fastgrpo import Objective
from fastgrpo.kernels import head as heads
from fastgrpo.kernels import logits
from fastgrpo.kernels.objectives import kernel_knobs

N, D, V = 20, 16, 70


def calls():
    """Return (operator, arguments) by name, each operator in its usual form and with whatever it may leave out."""
    head = random_head(N, D, V, bias=True, temperature="row", softcap=5.0)
    full = (head.hidden, head.weight, head.bias, head.targets, 1.0, head.temperature, 5.0)
    bare = (head.hidden, head.weight, None, head.targets, 0.7, None, None)
    g, h = head.grad_logps, head.grad_entropy
    rows, exps = heads.linear_logprob_fwd(*bare, True, True, 8192, None)

    def gradients():
        return heads.empty_gradients(N, head.weight, (True, True, True))

    z = head.hidden @ head.weight.T
    tokens = (head.old_logps, head.ref_logps, head.advantages, head.weights)
    knobs = kernel_knobs(Objective(beta=0.1))
    places = torch.arange(N + 5) - 5
    taller = torch.cat([z[:5], z])
    stats = logits.logits_stats(z, None, head.targets, 0.7, None)
    return {
        "linear_logprob_fwd": (heads.linear_logprob_fwd, (*bare, True, False, 8192, None)),
        "linear_logprob_fwd, chunks": (heads.linear_logprob_fwd, (*full, False, True, 16, None)),
        "linear_logprob_bwd": (heads.linear_logprob_bwd, (*full, rows, g, h, *gradients(), 16, None)),
        "linear_logprob_bwd, frozen": (heads.linear_logprob_bwd, (*bare, rows, g, None, None, None, None, 8192, None)),
        "head_products": (heads.head_products, (exps, g, head.hidden, head.weight, *gradients(), 0, None)),
        "head_entropy_bwd": (heads.head_entropy_bwd, (exps, head.targets, rows, g, h, torch.empty_like(exps))),
        "policy_loss_rows": (logits.policy_loss_rows, (rows[0], tokens[0], None, *tokens[1:], None, None, *knobs)),
        "logits_stats": (logits.logits_stats, (taller, places, head.targets, 1.0, head.temperature)),
        "logits_grpo_": (logits.logits_grpo_, (z, None, head.targets, 0.7, None, *tokens, None, None, *knobs)),
        "logits_bwd": (logits.logits_bwd, (z, None, head.targets, 0.7, None, stats, g, h, torch.empty_like(z))),
        "scale_rows_": (logits.scale_rows_, (z, torch.tensor(2.0))),
    }  # fmt: skip


CALLS = calls() if heads.launch.INTERPRET else {}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    operator, arguments = CALLS[name]
    torch.library.opcheck(operator, arguments)


def test_every_operator_is_checked():
    checked = {operator._qualname for operator, _ in CALLS.values()}
    registered = {f"fastgrpo::{name}" for module in (heads, logits) for name, value in vars(module).items()
                  if isinstance(value, torch.library.CustomOpDef)}  # fmt: skip
    assert checked == registered and len(checked) == 9
