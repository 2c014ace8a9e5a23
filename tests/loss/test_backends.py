"""Which backend runs a loss, and what is said where one cannot; the soft-cap of the chunked backend."""

import pytest
import torch

import fastgrpo.loss.checks
import fastgrpo.loss.losses
from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernels import reference

N, D, V = 12, 8, 40


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
    monkeypatch.setattr(fastgrpo.loss.checks, "HAS_TRITON", False)
    calls(head)["linear_logprob"](backend="auto")
    with pytest.raises(ValueError, match="needs Triton"):
        calls(head)["linear_logprob"](backend="triton")


@pytest.mark.parametrize("name", ("linear_logprob", "linear_grpo_loss"))
def test_a_softcap_must_be_positive(name, head):
    with pytest.raises(ValueError, match="logit_softcap must be positive, got 0"):
        calls(head)[name](logit_softcap=0.0)


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


def test_anomaly_mode_asserts_targets_on_the_device(monkeypatch):
    """Elsewhere than on the CPU nobody looks at the targets, but in anomaly mode the device is told to."""
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: asserted.append((condition.shape, message)))
    targets = torch.zeros(N, dtype=torch.long, device="meta")
    fastgrpo.loss.checks.check_targets(targets, V)
    assert asserted == []
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        fastgrpo.loss.checks.check_targets(targets, V)
    assert asserted == [(torch.Size([]), f"targets must be in [0, {V}) on active rows")]


def test_what_anomaly_mode_asserts():
    fastgrpo.loss.checks.assert_targets(torch.tensor([0, V - 1]), V)
    for bad in (V, -1, -100):
        with pytest.raises(RuntimeError, match=rf"targets must be in \[0, {V}\) on active rows"):
            fastgrpo.loss.checks.assert_targets(torch.tensor([0, bad]), V)


@pytest.mark.parametrize("setting", ("none", "ieee", "tf32"))
def test_either_setting_of_tf32_is_read(setting):
    """torch raises where allow_tf32 is read after the newer setting was used."""
    pytest.importorskip("triton")
    launch, matmul = fastgrpo.loss.checks.launch, torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has one setting")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = setting
        assert launch.precision(torch.float32) == ("tf32" if setting == "tf32" else "ieee")
        assert launch.precision(torch.bfloat16) == "ieee"
        matmul.fp32_precision = before
        matmul.allow_tf32 = setting == "tf32"
        assert launch.precision(torch.float32) == ("tf32" if setting == "tf32" else "ieee")
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


def test_which_gpus_the_kernels_run_on(monkeypatch):
    pytest.importorskip("triton")
    launch, device = fastgrpo.loss.checks.launch, torch.device("cuda", 0)
    aligned = torch.zeros(64, 64, dtype=torch.bfloat16)
    kinds = {(7, 5): "none", (8, 0): "pointers", (8, 9): "pointers", (9, 0): "descriptors", (10, 0): "descriptors",
             (12, 0): "pointers"}  # fmt: skip
    for capability, kind in kinds.items():
        monkeypatch.setattr(launch, "capability", lambda device, capability=capability: capability)
        assert launch.runs_on(device) == (kind != "none")
        assert launch.uses_descriptors(aligned) == (kind == "descriptors")
        blocks = launch.exp_ptr_blocks(*capability, torch.bfloat16, False, True)
        if capability != (8, 0):  # 99 KiB a block on sm_86, sm_89 and sm_120
            assert (blocks.rows + blocks.cols) * blocks.depth * 2 * blocks.stages <= 99 * 1024
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not launch.runs_on(device)


def test_compact_is_checked(head):
    with pytest.raises(ValueError, match="compact must be None or 'sync', got True"):
        calls(head)["linear_grpo_loss"](compact=True)


@pytest.mark.parametrize("several_chunks", (False, True))
def test_the_softcap_of_the_chunked_backend(several_chunks, head, monkeypatch):
    if several_chunks:
        monkeypatch.setattr(fastgrpo.loss.losses.chunked, "chunk_rows", lambda vocab_size: 5)
    hidden, weight, targets, advantages = (x.double() if x.is_floating_point() else x for x in head)
    hidden.requires_grad_()
    weight.requires_grad_()
    objective = Objective(entropy_coef=0.2)
    ours = linear_grpo_loss(hidden, weight, targets, advantages, logit_softcap=2.0, objective=objective)
    weights = torch.full((N,), 1 / N, dtype=torch.float64)
    theirs, _, _ = reference.linear_grpo_loss(
        hidden, weight, targets, advantages, weights, objective, entropy_weights=0.2 * weights, logit_softcap=2.0
    )
    torch.testing.assert_close(ours.loss, theirs)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours.loss, theirs)), strict=True):
        torch.testing.assert_close(a, b)
    logps, entropy = linear_logprob(hidden, weight, targets, logit_softcap=2.0, return_entropy=True)
    true = reference.linear_logprob(hidden, weight, targets, logit_softcap=2.0, return_entropy=True)
    ours, theirs = ((a.sum() + (b * b).sum()) for a, b in ((logps, entropy), true))
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)
