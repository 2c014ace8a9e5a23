"""Inputs that would give a wrong loss are refused by name. Copies to a GPU."""

import math
from dataclasses import replace
from functools import partial

import oracle
import pytest
import torch

import fastgrpo.loss.dispatch
from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.loss.inputs import check_values, staged, to_device

NAN, INF, V = math.nan, math.inf, 9
META = {"device": "meta"}


def ones(**at):
    """Six ones; `at2=x` puts x at index 2."""
    values = torch.ones(6)
    for name, value in at.items():
        values[int(name[2:])] = value
    return values


def integers(*values):
    return torch.tensor(values, dtype=torch.long)


# Every loss refuses these, apart from `temperature` in grpo_loss, which has none.
REFUSED = {
    "rows": (ones() > 0, torch.tensor([0.0, 1.0]), [0, 1], integers([0, 1]), integers(0, 2, 2), integers(0, 3, 2),
             integers(-1, 3), integers(3, 6), integers(5, 4, 3, 2, 1, 0), torch.zeros(2, dtype=torch.long, **META)),
    "temperature": (0.0, -1, NAN, INF, 1e-40, "1", None, ones(at2=0.0), ones(at5=-1), ones(at2=NAN), torch.ones(1),
                    ones().requires_grad_()),
    "mask": (ones(at1=NAN), ones(at1=-1), ones() * 1j, ones().requires_grad_(), torch.ones(5)),
    "advantages": (ones(at4=NAN), ones(at0=INF), ones() * 1j, [1.0] * 6, torch.ones(5), torch.ones(3),
                   ones().requires_grad_(), torch.ones(6, **META)),
    "old_logps": (torch.zeros(6, 1), ones().requires_grad_(), torch.ones(6, **META)),
    "ref_logps": (torch.zeros(3), ones().requires_grad_(), None),
    "sampler_logps": (ones(at3=INF), ones().requires_grad_()),
    "token_weights": (ones(at3=NAN), ones().requires_grad_(), torch.zeros(3)),
    "num_items_in_batch": (-1, NAN, "9", torch.tensor(-2), torch.ones(2)),
    "cu_seqlens": (torch.tensor([0, 2.5, 6]), integers(), [0, 2, 5], [1, 6], [0, 4, 2, 6], [[0, 6]]),
    "loss_type": ("ppo",), "epsilon": (-2.0,), "backend": ("cuda",), "compact": (True,),
}  # fmt: skip


def refused(name, function, *arguments, **keywords):
    """The error begins with the argument's name, and with no tensor's contents."""
    with pytest.raises(ValueError, match=rf"\b{name}\b") as error:
        function(*arguments, **keywords)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", REFUSED)
def test_every_loss_rejects_wrong_inputs_by_name(name):
    hidden, weight, targets = torch.randn(6, 4), torch.randn(V, 4), torch.arange(6)
    for value in REFUSED[name]:
        given = {"cu_seqlens": [0, 2, 6], "old_logps": -ones(), "advantages": ones(), "ref_logps": -ones(), "beta": 0.1}
        given[name] = value
        called = "ref_logps" if value is None and name == "ref_logps" else name
        refused(called, linear_grpo_loss, hidden, weight, targets, **given)
        if name != "compact":
            refused(called, logits_grpo_loss, hidden @ weight.T, targets, **given)
        if name == "temperature":
            refused(name, linear_logprob, hidden, weight, targets, temperature=value)
        elif name != "compact":
            refused(called, grpo_loss, -ones(), **given)


HEAD = {
    "weight": (torch.randn(V, 5), torch.randn(4), torch.ones(V, 4, dtype=torch.long), torch.ones(0, 4), None,
               torch.randn(V, 4, **META)),
    "bias": (torch.randn(8), torch.ones(V, dtype=torch.long), torch.randn(V, **META)),
    "targets": (torch.arange(5), torch.rand(6), integers(0, 1, 2, 3, 4, V), integers(0, 1, 2, 3, 4, -100),
                torch.ones(6).bool(), torch.ones(6) * 1j, [0] * 6, torch.zeros(6, dtype=torch.long, **META)),
    "hidden": (torch.ones(6, 4, dtype=torch.long), torch.randn(6, 4) * 1j),
    "logit_softcap": (0.0, NAN, INF, "1"),
    "backend": ("cuda",),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAD)
def test_a_head_is_refused_by_name(name):
    for value in HEAD[name]:
        given = {"hidden": torch.randn(6, 4), "weight": torch.randn(V, 4), "targets": torch.arange(6), name: value}
        refused(name, linear_logprob, **given)
        refused(name, linear_grpo_loss, **given, advantages=torch.randn(6))


def test_log_probs_and_logits_are_refused_by_name():
    refused("logps", grpo_loss, torch.arange(6), None, ones())
    refused("logps", grpo_loss, [1.0], None, ones())
    refused("logits", logits_grpo_loss, torch.ones(6, V) * 1j, torch.arange(6), ones())
    refused("targets", logits_grpo_loss, torch.ones(6, V), torch.arange(5), ones())


def test_combinations_are_refused_by_name():
    hidden, weight, targets = torch.randn(2, 3, 4), torch.randn(V, 4), torch.arange(6)
    padded, packed = (hidden, weight, targets.view(2, 3)), (hidden.flatten(0, 1), weight, targets)
    refused("cu_seqlens", linear_grpo_loss, *padded, torch.ones(2), cu_seqlens=[0, 3, 6])
    refused("advantages", linear_grpo_loss, *padded, torch.ones(3))
    refused("tokens", linear_grpo_loss, hidden[None], weight, targets.view(1, 2, 3), torch.ones(1))
    refused("cu_seqlens", linear_grpo_loss, *packed, torch.ones(2))  # an advantage a sequence
    for knobs in ({"loss_type": "grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 8}, {"loss_type": "vespo"},
                  {"importance_sampling_level": "sequence"}, {"sampler_logps": ones()}):  # fmt: skip
        refused("cu_seqlens", linear_grpo_loss, *packed, ones(), **knobs)
    refused("entropy_weights", linear_grpo_loss, *packed, ones(), entropy_weights=ones())  # without entropy_coef
    refused("entropy_coef", grpo_loss, ones(), None, ones(), entropy_coef=0.1)
    full = {"beta": 0.3, "kl": "full"}  # needs the reference's head
    refused("linear_grpo_loss", logits_grpo_loss, torch.randn(6, V), targets, ones(), **full)
    refused("linear_grpo_loss", grpo_loss, -ones(), None, ones(), **full)
    vespo = {"loss_type": "vespo", "sampler_logps": ones(), "cu_seqlens": [0, 6]}
    refused("importance_sampling_mode", linear_grpo_loss, *packed, ones(), **vespo)


def test_a_refusal_names_the_token_and_not_the_kept_row():
    case = replace(oracle.make_case(masked=0.0), mask=torch.arange(16) >= 9)
    bad = case.advantages.index_fill(0, torch.tensor([11]), NAN)
    with pytest.raises(ValueError, match=r"advantages .* at index 11$"):
        oracle.run(replace(case, advantages=bad), linear_grpo_loss)


def test_values_on_a_gpu_are_asserted_only_in_anomaly_mode(monkeypatch):
    monkeypatch.setattr("fastgrpo.loss.inputs._on_host", lambda values: False)
    check_values(torch.tensor([0.0, INF]), "x", "be finite", torch.isfinite)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        check_values(torch.ones(3), "x", "be finite", torch.isfinite)
        with pytest.raises(RuntimeError, match="x must be finite"):
            check_values(torch.tensor([0.0, INF]), "x", "be finite", torch.isfinite)


HEAD_OF_6 = torch.randn(6, 4), torch.randn(V, 4), torch.arange(6)


def test_triton_on_the_cpu_is_refused_with_a_remedy():
    pytest.importorskip("triton")
    for call in (partial(linear_logprob, *HEAD_OF_6), partial(linear_grpo_loss, *HEAD_OF_6, ones()),
                 partial(logits_grpo_loss, torch.randn(6, V), torch.arange(6), ones()),
                 partial(grpo_loss, -ones(), None, ones())):  # fmt: skip
        with pytest.raises(ValueError, match=r"backend='chunked'.*TRITON_INTERPRET=1"):
            call(backend="triton")


def test_works_without_triton(monkeypatch):
    monkeypatch.setattr(fastgrpo.loss.dispatch, "HAS_TRITON", False)
    assert linear_logprob(*HEAD_OF_6, backend="auto").shape == (6,)
    with pytest.raises(ValueError, match="needs Triton"):
        linear_logprob(*HEAD_OF_6, backend="triton")


@pytest.mark.parametrize("value", [torch.arange(6), torch.arange(6).view(2, 3).T, torch.ones(1).expand(4)])
def test_copies_to_a_gpu_go_through_pinned_memory_and_others_do_not(monkeypatch, value):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: calls.append("pin") or x)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, device, non_blocking=False: calls.append((str(device), non_blocking)) or x
    )
    assert torch.equal(to_device(value, "cuda:0"), value) and calls == ["pin", ("cuda:0", True)]
    assert staged(value, "cpu") is value and len(calls) == 2


@pytest.mark.gpu
def test_the_pinned_block_lives_until_it_is_copied():
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(10):
        busy = busy @ busy
    copies = [to_device(torch.full((1 << 20,), float(i)), "cuda") for i in range(50)]
    assert [copy.unique().tolist() for copy in copies] == [[float(i)] for i in range(50)]
