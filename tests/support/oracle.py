"""The truth of the losses, for every test of them, and packed batches to try the losses on.

The truth is kernels/reference.py on full logits, differentiated by autograd: `truth_of` of heads.py. The tests of the
Triton kernels (heads.py) and of the objectives (objective_cases.py) have the same one.

Shapes: N tokens, M kept tokens, V vocabulary, D hidden, S sequences.
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import product

import pytest
import torch
from heads import policy_loss, scalar_of, truth_of
from torch.utils._python_dispatch import TorchDispatchMode

from fastgrpo import Objective
from fastgrpo.kernels import head_torch, reference
from fastgrpo.kernels.objectives import PolicyRows, compute_dtype

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear")
CHUNKS = pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])
KNOBS = {"none": {"beta": 0.0}, "k1": {"kl": "k1"}, "k2": {"kl": "k2"}, "k3": {"kl": "k3"}}
OBJECTIVES = [
    pytest.param({"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, **KNOBS[kl],
                  "max_completion_length": 8 if loss_type == "dr_grpo" else None},
                 id=f"{loss_type}-{level}-{kl}")
    for loss_type, level, kl in product(("grpo", "bnpo", "dapo", "dr_grpo"), ("token", "sequence"), KNOBS)
]  # fmt: skip


def kept_truth(leaves, rows, objective, grad_output=1.0):
    """(loss, logps [M], metrics, gradients) of the kept tokens (a PolicyRows) of the leaves, hidden [N, D] whole."""
    kept = leaves | {"hidden": leaves["hidden"][rows.index]}
    found = truth_of(kept, rows.targets, scalar_of(rows, objective), temperature=rows.temperature)
    found |= {name: grad_output * found[name] for name in leaves}
    hidden = torch.zeros_like(leaves["hidden"]).index_copy_(0, rows.index, found["hidden"])
    gradients = {name: found[name] for name in leaves} | {"hidden": hidden}
    return found["loss"], found["logps"], policy_loss(found["logps"], rows, objective)[1], gradients


@dataclass(frozen=True)
class Case:
    """A packed batch. hidden [N, D], weight [V, D], bias [V] or None; per token [N]; cu_seqlens [S+1]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0

    def head(self):
        """The arguments that carry gradient, as fresh leaves."""
        return {
            name: getattr(self, name).detach().clone().requires_grad_()
            for name in ("hidden", "weight", "bias")
            if getattr(self, name) is not None
        }

    def rest(self):
        """All other arguments of linear_grpo_loss."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("hidden", "weight", "bias")}

    def to(self, dtype):
        """The floating-point tensors of the head in another dtype; per-token numbers stay as they are."""
        return replace(self, **{name: getattr(self, name).detach().to(dtype) for name in self.head()})


def make_case(lengths=(5, 1, 7, 3), vocab=11, dim=6, dtype=torch.float64, old=True, ref=True, bias=False,
              per_token_temperature=False, masked=0.25):  # fmt: skip
    """Random logits of deviation about 1.5; old and ref near enough for both sides of the clip to be met."""
    total = sum(lengths)
    number = {"dtype": torch.float64 if dtype == torch.float64 else torch.float32}
    hidden = torch.randn(total, dim, dtype=dtype)
    weight = torch.randn(vocab, dim, dtype=dtype) * 1.5 / dim**0.5
    targets = torch.randint(vocab, (total,))
    the_bias = torch.randn(vocab, dtype=dtype) if bias else None
    temperature = torch.rand(total, **number) + 0.6 if per_token_temperature else 0.8
    logps = reference.linear_logprob(hidden, weight, targets, bias=the_bias, temperature=temperature)
    mask = torch.rand(total) >= masked
    mask[0] = True
    return Case(
        hidden,
        weight,
        targets,
        torch.randn(total, **number),
        mask,
        torch.tensor([0, *lengths]).cumsum(0),
        (logps + 0.4 * torch.randn(total, **number)) if old else None,
        (logps + 0.5 * torch.randn(total, **number)) if ref else None,
        the_bias,
        temperature,
    )


def truth(case, *, num_items_in_batch=None, token_weights=None, grad_output=1.0, dtype=None, **knobs):
    """(loss, logps [M], metrics, gradients {hidden, weight, bias}) of the tokens in the mask.

    dtype: compute there, from the same (already rounded) inputs; gradients come in that dtype too.
    """
    objective = Objective(**knobs)
    keep = case.mask.nonzero()[:, 0]
    weights = token_weights
    if weights is None:
        exact = compute_dtype(case.hidden)
        weights = objective.token_weights(case.mask, case.cu_seqlens, num_items_in_batch, exact)
    case = case if dtype is None else case.to(dtype)
    per_token = {
        "targets": case.targets, "advantages": case.advantages, "weights": weights, "old_logps": case.old_logps,
        "ref_logps": case.ref_logps, "temperature": case.temperature,
    }  # fmt: skip
    kept = {name: x[keep] if isinstance(x, torch.Tensor) else x for name, x in per_token.items()}
    rows = PolicyRows(index=keep, lengths=torch.searchsorted(keep, case.cu_seqlens).diff(), **kept)
    return kept_truth(case.head(), rows, objective, grad_output)


def run(case, loss, grad_output=1.0, **knobs):
    """(output, gradients) of a public loss on the case."""
    head = case.head()
    output = loss(**head, **case.rest(), **knobs)
    output.loss.backward(torch.tensor(grad_output, dtype=output.loss.dtype))
    return output, {name: tensor.grad for name, tensor in head.items()}


def hand_case():
    """Logits (ln 2, 0, 0) and (0, ln 3, 0): probabilities (1/2, 1/4, 1/4) and (1/5, 3/5, 1/5)."""
    hidden = torch.tensor([[math.log(2), 0.0], [0.0, math.log(3)]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    return hidden, weight, torch.tensor([0, 2])


def float32_case(**knobs):
    return make_case(dtype=torch.float32, masked=0.0, **knobs)


def set_chunk(monkeypatch, rows):
    """Chunks of this many rows, whatever the vocabulary; None leaves one chunk for every test's size."""
    if rows is not None:
        monkeypatch.setattr(head_torch, "chunk_rows", lambda vocab_size: rows)


class Products(TorchDispatchMode):
    """Records the shapes (n, k, m) of every matrix product run inside it, in order."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            self.shapes.append((left.shape[0], left.shape[1], right.shape[-1]))
        return func(*args, **(kwargs or {}))

    def __len__(self):
        return len(self.shapes)


class LargestTensor(TorchDispatchMode):
    """Records the number of bytes of the largest storage that any operation inside it returned."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return result
