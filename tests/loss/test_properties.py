"""Properties of the losses on random batches in fp64: layouts, rows and micro-batches never change a result."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import EVERY, SAMPLER_CASES
from oracle import assert_close, make_case, run, token_weights, truth

from fastgrpo import Objective, grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernels import head_torch

EXACT = 1e-10  # terms of both signs may cancel
NAMES = [*sorted(EVERY), *[name for name in sorted(EVERY) if name.startswith("entropy")] * 8]  # few have a bonus


def chunks(rows):
    return patch.object(head_torch, "chunk_rows", lambda *_: rows)


@st.composite
def batches(draw):
    """(packed batch, knobs): 1 to 5 sequences of 0 to 6 tokens, any objective, with and without old log-probs."""
    name = draw(st.sampled_from(NAMES))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    case = make_case(
        lengths, old=draw(st.booleans()), sampler=name in SAMPLER_CASES, bias=draw(st.booleans()),
        per_token_temperature=draw(st.booleans()), masked=draw(st.sampled_from([0.0, 0.3, 0.8])),
    )  # fmt: skip
    advantages = torch.randn(len(lengths)).double() * (torch.rand(len(lengths)) > 0.2)
    if draw(st.booleans()) or len(lengths) == sum(lengths):  # [S] of S = N values would be read as one a token
        advantages = advantages.repeat_interleave(case.cu_seqlens.diff())
    return replace(case, advantages=advantages), EVERY[name]


def padded(case, fill):
    """The same batch padded to its longest sequence; what lies in the padding is `fill`."""
    lengths = case.cu_seqlens.diff()
    inside = torch.arange(max(int(lengths.max()), 1)) < lengths[:, None]

    def spread(x):
        value = 0 if not x.is_floating_point() else fill
        return torch.full((*inside.shape, *x.shape[1:]), value, dtype=x.dtype).masked_scatter(
            inside.view(*inside.shape, *(1,) * (x.ndim - 1)), x
        )

    per_token = {name: spread(x) for name, x in case.per_token().items()}
    return replace(case, hidden=spread(case.hidden), cu_seqlens=None, **per_token), inside


@settings(max_examples=100)
@given(batches(), st.sampled_from([1, 4, 100]), st.sampled_from([0.0, torch.nan]))
def test_padded_equals_packed(batch, rows, fill):
    case, knobs = batch
    wide, inside = padded(case, fill)
    with chunks(rows):
        packed, gradients = run(case, linear_grpo_loss, **knobs)
        out, own = run(wide, linear_grpo_loss, **knobs)
    assert_close(out.loss.detach(), packed.loss.detach(), EXACT)
    assert_close(out.logps[inside], packed.logps, EXACT)
    assert torch.equal(out.active[inside], packed.active) and not out.active[~inside].any()
    assert_close(own["hidden"][inside], gradients["hidden"], EXACT)
    assert (own["hidden"][~inside] == 0).all()
    assert_close(own["weight"], gradients["weight"], EXACT)
    assert_close(out.metrics, packed.metrics, EXACT)


@settings(max_examples=150)
@given(batches(), st.sampled_from([1, 4, 100]), st.data())
def test_any_selection_of_rows_equals_the_reference_over_these_rows(batch, chunk, data):
    case, knobs = batch
    objective, starts = Objective(**knobs), case.cu_seqlens
    sequences = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    if objective.couples_tokens(case.sampler_logps is not None):
        chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(starts) - 1, max_size=len(starts) - 1)))
        keep = case.mask & chosen[sequences]
    else:
        keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences))))
        keep = keep.bool()
    rows = keep.nonzero()[:, 0]
    spoilt = replace(case, mask=keep).poisoned()  # nothing else is read
    with chunks(chunk):
        out, own = run(replace(spoilt, mask=case.mask), linear_grpo_loss, rows=rows, **knobs)
    if not len(rows):
        assert out.loss == 0 and all((gradient == 0).all() for gradient in own.values()) and not out.active.any()
        return
    loss, logps, metrics, gradients = truth(case, rows=rows, **knobs)
    assert_close(out.loss.detach(), loss, EXACT)
    assert_close(own, gradients, EXACT)
    assert_close(out.logps[keep], logps, EXACT)
    assert torch.equal(out.active, keep) and (out.logps[~keep] == 0).all()
    found, expected = ({name: of[name].double() for name in metrics} for of in (out.metrics, metrics))
    assert_close(found, expected, 1e-6)


@settings(max_examples=100)
@given(batches(), st.sampled_from([1, 4, 100]), st.data())
def test_any_split_into_micro_batches_sums_to_the_whole(batch, chunk, data):
    case, knobs = batch
    objective, starts = Objective(**knobs), case.cu_seqlens
    cuts = data.draw(st.sets(st.integers(1, len(starts) - 1)))
    bounds = [0, *sorted(cuts - {len(starts) - 1}), len(starts) - 1]
    items = max(int(case.mask.sum()), 1)
    weights, _ = token_weights(objective, case.mask, starts)
    by_count = objective.loss_type in ("dapo", "cispo", "vespo") and data.draw(st.booleans())
    loss = data.draw(st.sampled_from([linear_grpo_loss, logits_grpo_loss, grpo_loss]))
    if loss is grpo_loss and objective.entropy_coef:
        loss = logits_grpo_loss
    whole, parts = losses(case, loss, knobs, slice(0, len(starts) - 1)), []
    with chunks(chunk):
        for first, last in pairwise(bounds):
            tokens = slice(int(starts[first]), int(starts[last]))
            more = {"num_items_in_batch": items}
            more |= {} if by_count else {"token_weights": weights[tokens]}
            parts.append(losses(case, loss, {**knobs, **more}, slice(first, last)))
    assert_close(sum(part[0] for part in parts), whole[0], EXACT)
    for i, gradient in enumerate(whole[1]):
        own = [part[1][i] for part in parts]
        assert_close(torch.cat(own) if i == 0 else sum(own), gradient, EXACT)


def losses(case, loss, knobs, sequences):
    """The loss of some sequences, and its gradients: of the hidden states, logits or log-probs, then of the weight."""
    starts = case.cu_seqlens
    first, last = int(starts[sequences.start]), int(starts[sequences.stop])
    per_token = {name: x[first:last] for name, x in case.per_token().items()}
    rest = {"temperature": case.temperature, "advantages": case.advantages[sequences], **per_token}
    rest["cu_seqlens"] = starts[sequences.start : sequences.stop + 1] - first
    head = case.head()
    hidden = head["hidden"][first:last].detach().requires_grad_()
    if loss is linear_grpo_loss:
        out = loss(hidden, head["weight"], bias=head.get("bias"), **rest, **knobs)
        return out.loss.detach(), torch.autograd.grad(out.loss, (hidden, head["weight"]))
    logits = (hidden @ head["weight"].T + head.get("bias", 0)).detach()
    if loss is grpo_loss:
        del rest["temperature"]
        logits = logits.log_softmax(-1).gather(-1, rest.pop("targets")[:, None])[:, 0]
        rest = {"old_logps": None, **rest}
    leaf = logits.requires_grad_()
    out = loss(leaf, **rest, **knobs)
    return out.loss.detach(), torch.autograd.grad(out.loss, (leaf,))
