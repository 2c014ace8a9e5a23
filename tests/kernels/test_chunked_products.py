"""How many matrix products the chunked path runs, forward and backward, and over which rows."""

from dataclasses import replace

import oracle
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastgrpo import linear_grpo_loss, linear_logprob


def products(case, frozen=(), **knobs):
    head = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
    with oracle.Products() as count:
        loss = linear_grpo_loss(**head, **case.rest(), **knobs).loss
        forward = len(count)
        if loss.requires_grad:
            loss.backward()
    assert all((tensor.grad is None) == (name in frozen) for name, tensor in head.items())
    return forward, len(count)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("hidden", "weight"), 1), (("hidden", "weight", "bias"), 1)],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, tuple) else str(value),
)
def test_products_of_one_chunk(frozen, expected):
    """One in the forward; the gradients' products in the backward."""
    assert products(oracle.float32_case(bias=True), frozen) == (1, expected)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("hidden", "weight"), 1), (("hidden", "weight", "bias"), 1)],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, tuple) else str(value),
)
def test_products_of_four_chunks(monkeypatch, frozen, expected):
    """The same number a chunk, all in the forward."""
    oracle.set_chunk(monkeypatch, 4)
    assert products(oracle.float32_case(bias=True), frozen) == (4 * expected, 4 * expected)


@pytest.mark.parametrize("entropy", [False, True])
def test_products_do_not_grow_with_the_objective(entropy):
    knobs = {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "delta": 2.0}
    assert products(oracle.float32_case(), return_entropy=entropy, **knobs) == (1, 3)


def test_a_sequence_longer_than_a_chunk_costs_one_forward_more(monkeypatch):
    oracle.set_chunk(monkeypatch, 4)
    case = oracle.float32_case()
    assert products(case, importance_sampling_level="sequence") == (4 + 12, 4 + 12)
    oracle.set_chunk(monkeypatch, 7)  # as long as the longest: chunks of 6, 7 and 3 rows
    assert products(case, importance_sampling_level="sequence") == (9, 9)


@oracle.CHUNKS
def test_no_grad_does_no_gradient_work(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.float32_case(bias=True)
    with oracle.Products() as count, torch.no_grad():
        output = linear_grpo_loss(**case.head(), **case.rest())
        linear_logprob(**case.head(), targets=case.targets)
    assert not output.loss.requires_grad
    assert [shape[0] for shape in count.shapes] == ([16] if chunk is None else [4] * 4) * 2


def test_inference_mode():
    case = oracle.float32_case()
    with torch.inference_mode():
        output = linear_grpo_loss(**case.head(), **case.rest())
    assert output.loss.item() == oracle.run(case, linear_grpo_loss)[0].loss.item()


def test_products_of_linear_logprob():
    """The backward recomputes the logits: 4 products, 3 with one operand frozen."""
    case = oracle.float32_case()
    for frozen, expected in (((), 4), (("weight",), 3), (("hidden",), 3)):
        head = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
        with oracle.Products() as count:
            logps = linear_logprob(**head, targets=case.targets)
            assert len(count) == 1
            logps.sum().backward()
        assert len(count) == expected


@oracle.CHUNKS
def test_inactive_rows_are_never_projected(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = replace(oracle.make_case(dtype=torch.float32), mask=torch.arange(16) % 3 != 0)
    active = 10
    with oracle.Products() as count:
        oracle.run(case, linear_grpo_loss)
    vocab = 11
    forward = [shape for shape in count.shapes if shape[0] != vocab and shape[2] == vocab]
    dweight = [shape for shape in count.shapes if shape[0] == vocab]
    assert sum(rows for rows, _, _ in forward) == active
    assert sum(rows for _, rows, _ in dweight) == active


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inside_a_checkpoint_gradient_products_run_once(dtype):
    """One forward, one recomputed, two gradient products: 4. The first pass does no gradient work that is lost."""
    case = oracle.make_case(dtype=dtype, masked=0.0)
    expected, gradients = oracle.run(case, linear_grpo_loss)
    head = case.head()
    with oracle.Products() as count:
        loss = checkpoint(
            lambda hidden, weight: linear_grpo_loss(hidden, weight, **case.rest()).loss, *head.values(),
            use_reentrant=False,
        )  # fmt: skip
        loss.backward()
    assert len(count) == 4
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(tensor.grad, gradients[name]) for name, tensor in head.items())


def test_inside_a_checkpoint_in_chunks(monkeypatch):
    oracle.set_chunk(monkeypatch, 4)
    case = oracle.float32_case()
    expected, gradients = oracle.run(case, linear_grpo_loss)
    head = case.head()
    loss = checkpoint(
        lambda hidden, weight: linear_grpo_loss(hidden, weight, **case.rest()).loss, *head.values(),
        use_reentrant=False,
    )  # fmt: skip
    loss.backward()
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(tensor.grad, gradients[name]) for name, tensor in head.items())
