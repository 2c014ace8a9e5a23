"""Batches to try the losses on, and their truth: kernels/reference.py on full logits, differentiated by autograd."""

import math
from collections import Counter
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgrpo import Objective
from fastgrpo.kernel_checks.cases import gradients
from fastgrpo.kernels import head_torch, reference
from fastgrpo.kernels.objectives import PolicyRows

CHUNKS = pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])
HEAD = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Case:
    """A batch: packed with hidden [N, D], [N] a token and cu_seqlens [S+1], or padded with hidden [B, T, D], [B, T]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor  # per token, or per sequence
    mask: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampler_logps: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0

    def head(self):
        tensors = {name: getattr(self, name) for name in HEAD}
        return {name: x.detach().clone().requires_grad_() for name, x in tensors.items() if x is not None}

    def rest(self):
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in HEAD}

    def per_token(self):
        found = {name: x for name, x in self.rest().items() if getattr(x, "shape", None) == self.targets.shape}
        return {name: x for name, x in found.items() if name != "cu_seqlens"}

    def to(self, dtype):
        return replace(self, **{name: x.detach().to(dtype) for name, x in self.head().items()})

    def starts(self):
        """cu_seqlens, of the padded layout too."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        rows, width = self.mask.shape
        return torch.arange(rows + 1) * width

    def poisoned(self):
        """NaN and -100 where the mask is off: these places must never be read."""
        off = ~self.mask
        changed = {name: x.masked_fill(off, torch.nan) for name, x in self.per_token().items() if x.is_floating_point()}
        hidden = self.hidden.masked_fill(off[..., None], torch.nan)
        return replace(self, hidden=hidden, **changed, targets=self.targets.masked_fill(off, -100))


def make_case(lengths=(5, 1, 7, 3), vocab=11, dim=6, dtype=torch.float64, old=True, ref=True, sampler=False, bias=False,
              per_token_temperature=False, masked=0.25):  # fmt: skip
    """Draw a packed batch: logits of deviation about 1.5; old and ref near enough for both sides of the clip."""
    total = sum(lengths)
    number = {"dtype": torch.float64 if dtype == torch.float64 else torch.float32}
    hidden = torch.randn(total, dim, dtype=dtype)
    weight = torch.randn(vocab, dim, dtype=dtype) * 1.5 / dim**0.5
    targets = torch.randint(vocab, (total,))
    the_bias = torch.randn(vocab, dtype=dtype) if bias else None
    temperature = torch.rand(total, **number) + 0.6 if per_token_temperature else 0.8
    logps = reference.linear_logprob(hidden, weight, targets, bias=the_bias, temperature=temperature)
    mask = torch.rand(total) >= masked
    mask[:1] = True
    advantages = torch.randn(total, **number)
    old_logps, ref_logps = (logps + scale * torch.randn(total, **number) for scale in (0.4, 0.5))
    return Case(
        hidden, weight, targets, advantages, mask, torch.tensor([0, *lengths]).cumsum(0), old_logps if old else None,
        ref_logps if ref else None, old_logps + 0.2 * torch.randn(total, **number) if sampler else None, the_bias,
        temperature,
    )  # fmt: skip


def padded_case(lengths=(7, 4, 6, 0, 5, 2), width=7, **knobs):
    """Draw a padded batch with an advantage a sequence, the third of which is 0."""
    knobs = {"vocab": 23, "bias": True, "masked": 0, "sampler": True, **knobs}
    case = make_case((width,) * len(lengths), **knobs)
    shape = len(lengths), width
    changed = {name: x.view(shape) for name, x in case.per_token().items()}
    changed["mask"] = torch.arange(width) < torch.tensor(lengths)[:, None]
    advantages = torch.tensor([1.3, -0.7, 0.0, 0.9, -1.1, 0.4], dtype=case.advantages.dtype)
    changed |= {"advantages": advantages[: len(lengths)], "hidden": case.hidden.view(*shape, -1)}
    return replace(case, cu_seqlens=None, **changed)


def token_weights(objective, mask, starts, items=None):
    """The weights w_n [N] in fp64 from Python's floats, by the table of docs/objectives.md."""
    counts = [int(part.sum()) for part in mask.flatten().split(starts.diff().tolist())]
    sequences, here = len(counts), max(sum(counts), 1)
    step = here if items is None else max(items, 1)
    by_type = {
        "grpo": [1 / (sequences * max(count, 1)) for count in counts],
        "bnpo": [1 / here] * sequences,
        "dapo": [1 / step] * sequences,
        "dr_grpo": [1 / (sequences * (objective.max_completion_length or 1))] * sequences,
        "luspo": [1 / sequences] * sequences,
    }
    by_type |= {"sapo": by_type["grpo"], "cispo": by_type["dapo"], "vespo": by_type["dapo"]}
    weights = torch.tensor(by_type[objective.loss_type], dtype=torch.float64).repeat_interleave(starts.diff())
    return weights * mask.flatten(), objective.entropy_coef / step * mask.flatten().double()


def truth_of(leaves, targets, scalar, *, temperature=1.0, softcap=None):
    """Compute log-probs and entropy by the reference, the loss that `scalar` makes of them, and its gradients."""
    logps, entropy = reference.linear_logprob(
        leaves["hidden"], leaves["weight"], targets, bias=leaves.get("bias"), logit_softcap=softcap,
        temperature=temperature, return_entropy=True,
    )  # fmt: skip
    loss = scalar(logps, entropy)
    return {"logps": logps.detach(), "entropy": entropy.detach(), "loss": loss.detach(), **gradients(loss, leaves)}


def truth(
    case, *, rows=None, num_items_in_batch=None, weights=None, grad_output=1.0, dtype=None, softcap=None, **knobs
):
    """(loss, logps [M], metrics, gradients {hidden, weight, bias}), in `dtype`, of tokens in the mask, or of `rows`."""
    objective, starts = Objective(**knobs), case.starts()
    keep = case.mask.flatten().nonzero()[:, 0] if rows is None else rows
    w, e = token_weights(objective, case.mask, starts, num_items_in_batch)
    advantages = case.advantages
    if advantages.shape != case.targets.shape:
        advantages = advantages.repeat_interleave(starts.diff())
    per_token = {name: getattr(case, name) for name in ("targets", "old_logps", "ref_logps", "sampler_logps")}
    per_token |= {"temperature": case.temperature, "advantages": advantages}
    per_token |= {"weights": w if weights is None else weights * case.mask}
    per_token |= {"entropy_weights": e if objective.entropy_coef else None}
    kept = {name: x.flatten()[keep] if isinstance(x, torch.Tensor) else x for name, x in per_token.items()}
    chosen = PolicyRows(index=keep, lengths=torch.searchsorted(keep, starts).diff(), **kept)
    leaves = (case if dtype is None else case.to(dtype)).head()
    flat = leaves["hidden"].flatten(0, -2)

    def policy_loss(logps):  # in the dtype of the log-probs
        given = chosen.old_logps, chosen.ref_logps, chosen.advantages, chosen.weights, chosen.sampler_logps
        old, ref, advantages, weights, sampler = (None if x is None else x.to(logps.dtype) for x in given)
        return reference.policy_loss(logps, old, ref, advantages, weights, objective, chosen.lengths, sampler)

    def scalar(logps, entropy):
        loss, bonus = policy_loss(logps)[0], chosen.entropy_weights
        return loss if bonus is None else loss - (bonus.to(logps.dtype) * entropy).sum()  # - sum_n e_n H_n

    temperature = chosen.temperature
    found = truth_of(leaves | {"hidden": flat[keep]}, chosen.targets, scalar, temperature=temperature, softcap=softcap)
    hidden = torch.zeros_like(flat).index_copy_(0, keep, found["hidden"]).view_as(leaves["hidden"])
    grads = {name: grad_output * ({**found, "hidden": hidden}[name]).detach() for name in leaves}
    return found["loss"], found["logps"], policy_loss(found["logps"])[1], grads


def run(case, loss, grad_output=1.0, **knobs):
    """(output, gradients) of a public loss on the case."""
    head = case.head()
    output = loss(**head, **case.rest(), **knobs)
    output.loss.backward(torch.tensor(grad_output, dtype=output.loss.dtype))
    return output, {name: tensor.grad for name, tensor in head.items()}


def assert_close(actual, expected, tolerance):
    """Relative to the largest entry of what is expected; by name for dicts."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(actual[name], value, tolerance)
        return
    assert actual.shape == expected.shape
    if actual.numel():
        scale = expected.abs().max().clamp(min=1e-30)
        assert ((actual - expected).abs().max() / scale).item() <= tolerance, (actual, expected)


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
        monkeypatch.setattr(head_torch, "chunk_rows", lambda *_: rows)


class Products(TorchDispatchMode):
    """Records the products run inside it: shapes (n, k, m), or (batch, n, k, m), and the operands' and output's dtype.

    `casts` counts by shape the tensors that were copied to a dtype with more bytes.
    """

    NAMES = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear")

    def __init__(self):
        super().__init__()
        self.shapes, self.dtypes, self.casts = [], set(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in self.NAMES:
            left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            self.shapes.append((*left.shape, right.shape[-1]))
            self.dtypes.add((left.dtype, result.dtype))
        elif name == "_to_copy" and result.itemsize > args[0].itemsize:
            self.casts[tuple(result.shape)] += 1
        return result

    def __len__(self):
        return len(self.shapes)
