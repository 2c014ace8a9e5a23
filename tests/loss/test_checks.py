"""What the losses refuse, in which words, and which backend runs them."""

import math

import pytest
import torch

import fastgrpo.loss.dispatch
from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss

N, D, V = 12, 8, 40


def good():
    return {
        "hidden": torch.randn(6, 4),
        "weight": torch.randn(9, 4),
        "targets": torch.randint(9, (6,)),
        "advantages": torch.randn(6),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.randn(9, 5)}, r"weight must have the shape \[V, D\]=\(9, 4\), got \(9, 5\)"),
        ({"weight": torch.randn(4)}, r"weight must have the shape \[V, D\]"),
        ({"bias": torch.randn(8)}, r"bias must have the shape \[V\]=\(9,\), got \(8,\)"),
        ({"targets": torch.randint(9, (5,))}, r"targets must have the shape \(6,\), got \(5,\)"),
        ({"targets": torch.rand(6)}, "targets must be integers, got torch.float32"),
        ({"hidden": torch.ones(6, 4, dtype=torch.long)}, "hidden must be floating point, got torch.int64"),
        ({"weight": torch.ones(9, 4, dtype=torch.long)}, "weight must be floating point, got torch.int64"),
        (
            {"targets": torch.tensor([0, 1, 2, 3, 4, 9])},
            r"targets must be in \[0, 9\) on active rows, got 9 at index 5",
        ),
        (
            {"targets": torch.tensor([0, 1, 2, 3, 4, -100])},
            r"targets must be in \[0, 9\) on active rows, got -100 at index 5",
        ),
        ({"targets": torch.ones(6).bool()}, "targets must be integers, got torch.bool"),
        ({"targets": torch.ones(6) * 1j}, "targets must be integers, got torch.complex64"),
        ({"targets": [0] * 6}, "targets must be a tensor, got list"),
        ({"hidden": torch.randn(6, 4) * 1j}, "hidden must be floating point, got torch.complex64"),
        ({"weight": torch.ones(0, 4)}, "weight must hold at least one row, got none"),
        ({"weight": None}, "weight must be a tensor, got NoneType"),
        ({"bias": torch.ones(9, dtype=torch.long)}, "bias must be floating point, got torch.int64"),
        ({"advantages": torch.randn(5)}, r"advantages must be per token \(6,\).*got \(5,\)"),
        ({"advantages": torch.randn(2)}, "one value per sequence needs cu_seqlens"),
        ({"advantages": torch.randn(3), "cu_seqlens": [0, 2, 6]}, r"advantages must be per token \(6,\)"),
        ({"mask": torch.ones(5)}, r"mask must have the shape \(6,\), got \(5,\)"),
        ({"old_logps": torch.zeros(6, 1)}, r"old_logps must have the shape \(6,\), got \(6, 1\)"),
        ({"ref_logps": torch.zeros(3), "beta": 0.1}, r"ref_logps must have the shape \(6,\), got \(3,\)"),
        ({"token_weights": torch.zeros(3)}, r"token_weights must have the shape \(6,\), got \(3,\)"),
        ({"temperature": torch.ones(1)}, r"temperature must have the shape \(6,\), got \(1,\)"),
        ({"beta": 0.1}, "beta=0.1 needs ref_logps"),
        ({"old_logps": torch.zeros(6, requires_grad=True)}, "old_logps must not require grad"),
        ({"ref_logps": torch.zeros(6, requires_grad=True), "beta": 0.1}, "ref_logps must not require grad"),
        ({"advantages": torch.zeros(6, requires_grad=True)}, "advantages must not require grad"),
        ({"loss_type": "grpo"}, "cu_seqlens is needed by loss_type='grpo'"),
        ({"loss_type": "dr_grpo", "max_completion_length": 8}, "cu_seqlens is needed by loss_type='dr_grpo'"),
        ({"importance_sampling_level": "sequence"}, "cu_seqlens is needed by.*'sequence'"),
        ({"cu_seqlens": [0, 2, 5]}, "cu_seqlens must rise from 0 to N=6, got 5 at index 2"),
        ({"cu_seqlens": [1, 6]}, "cu_seqlens must rise from 0 to N=6, got 1 at index 0"),
        ({"cu_seqlens": [0, 4, 2, 6]}, "cu_seqlens must rise from 0 to N=6, got 4 at index 1"),
        ({"cu_seqlens": [[0, 6]]}, r"cu_seqlens must be \[S\+1\], got shape \(1, 2\)"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"epsilon": 2.0}, r"epsilon must be in \[0, 1\)"),
        ({"backend": "cuda"}, "backend must be one of auto, chunked, triton, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        linear_grpo_loss(**{**good(), **change})
    if not {"hidden", "weight", "targets", "bias", "temperature"} & set(change):
        arguments = {"old_logps": None, "advantages": torch.randn(6), **change}
        with pytest.raises(ValueError, match=message):
            grpo_loss(torch.randn(6), **arguments)


def test_errors_of_the_padded_layout():
    arguments = {"hidden": torch.randn(2, 3, 4), "weight": torch.randn(9, 4), "targets": torch.randint(9, (2, 3))}
    with pytest.raises(ValueError, match="cu_seqlens goes with the packed layout"):
        linear_grpo_loss(**arguments, advantages=torch.randn(2), cu_seqlens=[0, 3, 6])
    with pytest.raises(ValueError, match=r"advantages must be per token \(2, 3\) or per sequence, got \(3,\)"):
        linear_grpo_loss(**arguments, advantages=torch.randn(3))
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\] or packed \[N\], got \(1, 2, 3\)"):
        linear_grpo_loss(torch.randn(1, 2, 3, 4), torch.randn(9, 4), torch.randint(9, (1, 2, 3)), torch.randn(1))


def test_backend_auto_says_what_it_chose(caplog):
    fastgrpo.loss.dispatch._log_choice.cache_clear()
    with caplog.at_level("INFO", "fastgrpo.loss.dispatch"):
        for _ in range(2):
            linear_grpo_loss(**good())
    assert [record.message for record in caplog.records] == ["backend='auto' runs the chunked path"]


@pytest.fixture
def head():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
    return hidden, weight, torch.randint(V, (N,), generator=g), torch.randn(N, generator=g)


def calls(head):
    hidden, weight, targets, advantages = head
    return {
        "linear_logprob": lambda **kw: linear_logprob(hidden, weight, targets, **kw),
        "linear_grpo_loss": lambda **kw: linear_grpo_loss(hidden, weight, targets, advantages, **kw),
        "logits_grpo_loss": lambda **kw: logits_grpo_loss(hidden @ weight.T, targets, advantages, **kw),
        "grpo_loss": lambda **kw: grpo_loss(advantages - 5, None, advantages, **kw),
    }


@pytest.mark.parametrize("name", ("linear_logprob", "linear_grpo_loss", "logits_grpo_loss", "grpo_loss"))
def test_triton_on_the_cpu_is_refused_with_a_remedy(name, head):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="backend='chunked', or set TRITON_INTERPRET=1"):
        calls(head)[name](backend="triton")


def test_an_unknown_backend_is_named(head):
    with pytest.raises(ValueError, match="backend must be one of auto, chunked, triton, got 'cuda'"):
        calls(head)["linear_logprob"](backend="cuda")


def test_without_triton(head, monkeypatch):
    monkeypatch.setattr(fastgrpo.loss.dispatch, "HAS_TRITON", False)
    calls(head)["linear_logprob"](backend="auto")
    with pytest.raises(ValueError, match="needs Triton"):
        calls(head)["linear_logprob"](backend="triton")


@pytest.mark.parametrize("name", ("linear_logprob", "linear_grpo_loss"))
@pytest.mark.parametrize(
    ("cap", "message"),
    [
        (0.0, "be positive, got 0"),
        (math.nan, "be finite, got nan"),
        (math.inf, "be finite, got inf"),
        ("1", "be a number, got '1'"),
    ],
)
def test_a_softcap_must_be_positive_and_finite(name, head, cap, message):
    with pytest.raises(ValueError, match=f"^logit_softcap must {message}"):
        calls(head)[name](logit_softcap=cap)


def test_tensors_on_two_devices_are_named(head):
    """A kernel would read the other device's addresses as its own."""
    hidden, weight, targets, advantages = head
    with pytest.raises(ValueError, match="weight must be on cpu like hidden, got meta"):
        linear_logprob(hidden, weight.to("meta"), targets)
    with pytest.raises(ValueError, match="bias must be on cpu like hidden, got meta"):
        linear_logprob(hidden, weight, targets, bias=weight[:, 0].to("meta"))
    with pytest.raises(ValueError, match="targets must be on cpu like hidden, got meta"):
        linear_grpo_loss(hidden, weight, targets.to("meta"), advantages)
    with pytest.raises(ValueError, match="advantages must be on cpu like the tokens, got meta"):
        linear_grpo_loss(hidden, weight, targets, advantages.to("meta"))
    with pytest.raises(ValueError, match="old_logps must be on cpu like the tokens, got meta"):
        grpo_loss(advantages, advantages.to("meta"), advantages)


def test_compact_is_checked(head):
    with pytest.raises(ValueError, match="compact must be None or 'sync', got True"):
        calls(head)["linear_grpo_loss"](compact=True)


def test_log_probs_and_logits_must_be_floating_point(head):
    _, _, targets, advantages = head
    with pytest.raises(ValueError, match=r"logps must be floating point, got torch.int64"):
        grpo_loss(targets, None, advantages)
    with pytest.raises(ValueError, match="logps must be a tensor, got list"):
        grpo_loss([1.0], None, advantages)
    with pytest.raises(ValueError, match=r"logits must be floating point, got torch.complex64"):
        logits_grpo_loss(torch.ones(N, V) * 1j, targets, advantages)
