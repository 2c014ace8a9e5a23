"""The path by chunks of rows: how exact it is, what memory it takes, and how many matrix products it runs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from oracle import CHUNKS, Products, float32_case, make_case, run, set_chunk, truth, truth_of

from benchmarks.compare import compare
from fastgrpo import Objective, linear_grpo_loss, linear_logprob
from fastgrpo.kernel_checks import cases
from fastgrpo.kernel_checks.cases import error
from fastgrpo.kernel_checks.runner import Line
from fastgrpo.kernels import head_torch
from fastgrpo.kernels.head_torch import Vocabulary
from fastgrpo.kernels.objectives import PolicyRows

SEQUENCE = {"importance_sampling_level": "sequence"}


def test_a_target_outside_the_vocabulary_gives_nan():
    logps, _ = head_torch.softmax_(torch.randn(3, 5), torch.tensor([-100, 5, 4]), Vocabulary(0, 5, 5, None))
    assert logps.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("rows", [1, 4, 9], ids=lambda rows: f"{rows} rows a block")
def test_logits_of_a_16_bit_head_are_those_of_its_weights_in_fp32(monkeypatch, rows):
    """A sum is rounded to fp32 alone: a product with 16-bit output would be off by up to 2^-8 of itself."""
    hidden, weight = torch.randn(6, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    monkeypatch.setattr(head_torch, "CAST_BYTES", 4 * 4 * rows)
    logits = head_torch.linear_fp32(hidden, weight)
    assert logits.dtype == torch.float32
    terms = hidden.double()[:, None] * weight.double()
    assert ((logits - terms.sum(-1)).abs() <= 4 * torch.finfo(torch.float32).eps * terms.abs().sum(-1)).all()
    assert not (logits == (hidden @ weight.T).float()).all()


@CHUNKS
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_softcap_bias_temperatures_and_entropy_equal_the_reference_in_fp64(monkeypatch, softcap, chunk):
    set_chunk(monkeypatch, chunk)
    case = make_case(bias=True, per_token_temperature=True)

    def scalar(logps, entropy):
        return logps @ case.advantages + entropy @ case.old_logps

    expected = truth_of(case.head(), case.targets, scalar, temperature=case.temperature, softcap=softcap)
    head, how = case.head(), {"temperature": case.temperature, "logit_softcap": softcap, "return_entropy": True}
    logps, entropy = linear_logprob(**head, targets=case.targets, **how)
    found = {"logps": logps, "entropy": entropy, "loss": scalar(logps, entropy)}
    found |= dict(zip(head, torch.autograd.grad(found["loss"], list(head.values())), strict=True))
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value, rtol=1e-12, atol=1e-12)

    loss, _, _, expected = truth(case, softcap=softcap, beta=0.1)
    output, gradients = run(case, linear_grpo_loss, logit_softcap=softcap, beta=0.1)
    torch.testing.assert_close((output.loss, gradients), (loss, expected), rtol=1e-12, atol=1e-12)


@CHUNKS
@pytest.mark.parametrize("grad_output", [1.0, 0.37, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_worse_than_plain_pytorch(monkeypatch, dtype, grad_output, chunk):
    """grad_output 0.37 stands for gradient accumulation; 65536 is the first loss scale of torch's GradScaler."""
    set_chunk(monkeypatch, chunk and 16)
    case, how = make_case((20, 31, 13), 301, 32, dtype, bias=True), {"grad_output": grad_output, "beta": 0.1}
    exact_loss, exact_logps, _, exact = truth(case, dtype=torch.float64, **how)
    plain_loss, plain_logps, _, plain = truth(case, **how)
    output, actual = run(case, linear_grpo_loss, **how)

    def largest(logps):
        return (logps.double() - exact_logps).abs().max().item()

    assert largest(output.logps[case.mask]) <= 1.1 * largest(plain_logps) + 1e-5
    assert abs(output.loss - exact_loss) <= 1.1 * abs(plain_loss - exact_loss) + 1e-5
    for name, slack in (("hidden", 1.1), ("weight", 1.5), ("bias", 1.5)):
        assert actual[name].dtype == dtype
        mine, theirs = error("gradient", actual[name], exact[name]), error("gradient", plain[name], exact[name])
        assert mine <= slack * theirs + 1e-5, f"d{name}: error {mine:.2e}, plain PyTorch's {theirs:.2e}"


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{"objective": cases.BONUS}, cases.EVERYTHING], ids=["entropy", "everything"])
def test_products_of_16_bit_operands_as_on_a_gpu_err_like_plain_pytorch(monkeypatch, dtype, options, chunk):
    set_chunk(monkeypatch, chunk and 200)
    monkeypatch.setattr(head_torch, "operand_dtype", lambda hidden, weight: hidden.dtype)
    trial = cases.fused_loss("cpu", dtype, sizes={"cpu": (512, 32, 500)}, **options)
    line = Line("", "cpu", trial.judge(trial.ours()))
    assert line.reason is None, line.errors


@CHUNKS
@pytest.mark.parametrize("tolerance", [0.0, 0.2])
def test_fp16_operands_lose_no_gradient_to_a_small_loss(monkeypatch, chunk, tolerance):
    """A loss of 2^-20 with a grad_output of 2^20: dz is below the least fp16 number, and no bit of a gradient moves."""
    set_chunk(monkeypatch, chunk)
    monkeypatch.setattr(head_torch, "operand_dtype", lambda hidden, weight: hidden.dtype)
    case, small = float32_case(bias=True).to(torch.float16), 2.0**-20
    weights = torch.rand(len(case.targets))
    knobs = {"compact": "sync", "backward_tolerance": tolerance}
    _, expected = run(case, linear_grpo_loss, token_weights=weights, **knobs)
    _, found = run(case, linear_grpo_loss, 1 / small, token_weights=weights * small, **knobs)
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0 and torch.equal(found[name], gradient), name


@pytest.mark.parametrize("softcap, full_kl", [(None, False), (5.0, False), (None, True)])
def test_a_gpu_multiplies_16_bit_operands_and_casts_no_weight(monkeypatch, softcap, full_kl):
    monkeypatch.setattr(head_torch, "no_autocast", lambda tensor: nullcontext())  # torch knows none for this device
    n, vocab, objective = 5000, 300, Objective(beta=0.1 * full_kl, kl="full" if full_kl else "k3")
    hidden, weight, other = (torch.empty(rows, 64, dtype=torch.bfloat16, device="meta") for rows in (n, vocab, vocab))
    values = torch.empty(n, device="meta")
    rows = PolicyRows(index=None, targets=values.long(), temperature=1.0, advantages=values, weights=values,
                      old_logps=values, ref_logps=None, lengths=None)  # fmt: skip
    head = head_torch.ReferenceHead(hidden, other, None) if full_kl else None
    leaves, size = (hidden.requires_grad_(), weight.requires_grad_()), head_torch.chunk_rows(vocab, weight.device)
    with Products() as count:
        loss = head_torch.LinearGRPO.apply(*leaves, None, rows, objective, size, (True, True, False), False,
                                           Vocabulary(0, vocab, vocab, None), softcap, head)[0]  # fmt: skip
        torch.autograd.grad(loss, leaves)
    assert size == 2048 and len(count) == 3 * (3 + full_kl)
    assert count.dtypes == {(torch.bfloat16, torch.float32)} and not count.casts[vocab, 64]


def test_dw_over_64_chunks_as_good_as_over_one(monkeypatch):
    case = make_case((256, 256), 64, 16, torch.bfloat16, masked=0.0)
    *_, exact = truth(case, dtype=torch.float64)
    _, one = run(case, linear_grpo_loss)
    set_chunk(monkeypatch, 8)
    _, many = run(case, linear_grpo_loss)
    for name in ("hidden", "weight"):
        assert error("gradient", many[name], exact[name]) <= 1.02 * error("gradient", one[name], exact[name]) + 1e-6


def extreme_case(kind):
    """Logits of spread about 1.5 around extremes that overflow or underflow a careless exponential."""
    case = make_case((12,), vocab=40, dim=8, dtype=torch.float32, old=False, ref=False, masked=0.0)
    hidden, weight = case.hidden.clone(), case.weight.clone()
    hidden[:, 0] = 1.0
    targets = case.targets % 39 + 1
    if kind.startswith("all"):
        weight[:, 0] += {"all below -87": -120, "all above 88": 120}[kind]
        assert ((hidden @ weight.T).abs() > 87).all()
    elif kind == "least likely target":
        weight *= 12
        targets = (hidden @ weight.T).argmin(-1)
    else:
        weight[0, 0] += 60
        targets = torch.zeros_like(targets) if kind == "the target 60 nats above" else targets
    return replace(case, hidden=hidden, weight=weight, targets=targets, temperature=1.0)


@CHUNKS
@pytest.mark.parametrize("kind", ["all below -87", "all above 88", "the target 60 nats above",
                                  "another 60 nats above", "least likely target"])  # fmt: skip
def test_extreme_logits(monkeypatch, kind, chunk):
    """The truth by log1p in fp64: logp = -log1p(sum of e^(z - z_target) over the others), and 1 - p = S / (1 + S)."""
    set_chunk(monkeypatch, chunk)
    case = extreme_case(kind)
    hidden, weight, targets = case.hidden.double(), case.weight.double(), case.targets[:, None]
    odds = hidden @ weight.T
    odds = (odds - odds.gather(-1, targets)).exp().scatter(-1, targets, 0.0)
    others = odds.sum(-1, keepdim=True)
    slope = (-odds / (1 + others)).scatter(-1, targets, others / (1 + others))  # dlogp/dz
    slope *= -case.advantages.double()[:, None] / 12  # dloss/dlogp at ratio 1
    exact = {"logps": -torch.log1p(others)[:, 0], "hidden": slope @ weight, "weight": slope.T @ hidden}
    _, plain_logps, _, plain = truth(case)
    output, actual = run(case, linear_grpo_loss, return_entropy=True)
    assert output.loss.isfinite() and output.metrics["entropy"].isfinite()
    found, plain = {"logps": output.logps, **actual}, {"logps": plain_logps, **plain}
    for name, slack in (("logps", 1.1), ("hidden", 1.1), ("weight", 1.5)):
        limit = slack * (plain[name].double() - exact[name]).abs().max() + 1e-5
        assert (found[name].double() - exact[name]).abs().max() <= limit, name
    head = case.head()
    logps, entropy = linear_logprob(**head, targets=case.targets, return_entropy=True)
    entropy.sum().backward()
    assert torch.equal(logps, output.logps) and head["weight"].grad.isfinite().all() and (entropy > -1e-5).all()


@pytest.mark.parametrize("softcap, chunks", [(None, 1), (5.0, 2)])
def test_one_chunk_is_alive_at_a_time(monkeypatch, softcap, chunks):
    """Beyond inputs and gradients: the logits of one chunk, the slope of a soft-cap, and what is small beside them."""
    chunk, vocab = 8, 8192
    set_chunk(monkeypatch, chunk)
    case = make_case((16,) * 4, vocab, 4, torch.float32, masked=0.0)
    head = case.head()

    def loss(**knobs):
        output = linear_grpo_loss(**head, **case.rest(), logit_softcap=softcap, **knobs)
        return torch.autograd.grad(output.loss, list(head.values()))

    def logps():
        return linear_logprob(**head, targets=case.targets, logit_softcap=softcap)

    calls = {"loss": loss, "longer sequences": lambda: loss(**SEQUENCE), "scored": torch.no_grad()(logps)}
    calls["logps"] = lambda: torch.autograd.grad(logps().sum(), list(head.values()))
    # dW may be held twice: it is scaled by grad_output out of place.
    for name, result in compare(calls, 1).items():
        assert result["peak_bytes"] <= (chunks + 0.1) * 4 * chunk * vocab + case.weight.nbytes, name


def products(case, frozen=(), **knobs):
    """The numbers of products, forward and in all. A frozen input changes no other gradient."""
    _, whole = run(case, linear_grpo_loss, **knobs)
    head = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
    with Products() as count:
        loss = linear_grpo_loss(**head, **case.rest(), **knobs).loss
        forward = len(count)
        if loss.requires_grad:
            loss.backward()
    for name, tensor in head.items():
        assert tensor.grad is None if name in frozen else torch.equal(tensor.grad, whole[name])
    return forward, len(count)


FROZEN = {(): 3, ("weight",): 2, ("hidden",): 2, ("hidden", "weight"): 1, ("hidden", "weight", "bias"): 1}


@pytest.mark.parametrize(("frozen", "expected"), FROZEN.items())
def test_every_product_runs_once(monkeypatch, frozen, expected):
    """One chunk: one in the forward, the gradients' in the backward. Four chunks: as many a chunk, in the forward."""
    case = float32_case(bias=True)
    assert products(case, frozen) == (1, expected)
    leaves = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
    with Products() as count:
        logps = linear_logprob(**leaves, targets=case.targets)
        if logps.requires_grad:  # the backward recomputes the logits
            logps.sum().backward()
    assert len(count) == (1 if expected == 1 and "bias" in frozen else expected + 1)
    set_chunk(monkeypatch, 4)
    assert products(case, frozen) == (4 * expected, 4 * expected)


def test_products_grow_with_no_objective_but_with_sequences_longer_than_a_chunk(monkeypatch):
    case = float32_case()
    knobs = {"loss_type": "grpo", "beta": 0.1, "delta": 2.0, "return_entropy": True, **SEQUENCE}
    assert products(case, **knobs) == (1, 3)
    set_chunk(monkeypatch, 4)
    assert products(case, **SEQUENCE) == (4 + 12, 4 + 12)
    set_chunk(monkeypatch, 7)  # as long as the longest: chunks of 6, 7 and 3 rows
    assert products(case, **SEQUENCE) == (9, 9)


@CHUNKS
def test_no_grad_runs_no_gradient_products(monkeypatch, chunk):
    set_chunk(monkeypatch, chunk)
    case = float32_case(bias=True)
    expected = run(case, linear_grpo_loss)[0].loss.item()
    for context in (torch.no_grad, torch.inference_mode):
        with Products() as count, context():
            output = linear_grpo_loss(**case.head(), **case.rest())
            linear_logprob(**case.head(), targets=case.targets)
        assert not output.loss.requires_grad and output.loss.item() == expected
        assert [shape[0] for shape in count.shapes] == ([16] if chunk is None else [4] * 4) * 2


@CHUNKS
def test_inactive_rows_are_never_projected(monkeypatch, chunk):
    set_chunk(monkeypatch, chunk)
    case = replace(make_case(dtype=torch.float32), mask=torch.arange(16) % 3 != 0)
    with Products() as count:
        run(case, linear_grpo_loss)
    active, vocab = 10, 11
    assert sum(shape[0] for shape in count.shapes if shape[0] != vocab and shape[2] == vocab) == active
    assert sum(rows for first, rows, _ in count.shapes if first == vocab) == active
