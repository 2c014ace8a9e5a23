"""The path by chunks of rows: what it computes, how often, in how much memory, and how exactly."""

import math
import shutil
from dataclasses import replace
from itertools import pairwise

import oracle
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.compare import compare
from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import chunked, policy_rows, reference

CHUNKS = pytest.mark.parametrize("chunk", [None, 4], ids=["one-chunk", "chunks"])


def test_uninitialised_memory_is_nan():
    """What the rest of this file relies on to see a read before a write."""
    assert torch.empty(100).isnan().all() and torch.ones(3).new_empty(100).isnan().all()


# ------------------------------------------------------------------------------------------------------------ chunks


@pytest.mark.parametrize(("vocab", "rows"), [(32_768, 512), (151_936, 128), (128, 131_072), (10**6, 128)])
def test_chunk_rows(vocab, rows):
    """64 MiB of fp32 logits, and no fewer than 128 rows."""
    assert chunked.chunk_rows(vocab) == rows


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 16, 100])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "old-none"])
def test_ragged_sequences_in_chunks_of_any_size(monkeypatch, chunk, level, old):
    """N = 16 is no multiple of most; the sequence of 7 rows is longer than a chunk, or as long, or shorter."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((0, 5, 1, 0, 7, 3, 0), old=old, masked=0.1)
    knobs = {"importance_sampling_level": level, "loss_type": "grpo", "beta": 0.1}
    loss, logps, metrics, gradients = oracle.truth(case, **knobs)
    output, actual = oracle.run(case, linear_grpo_loss, **knobs)
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(output.logps[case.mask], logps)
    torch.testing.assert_close(actual, gradients)
    assert output.metrics["ratio/mean"].item() == pytest.approx(metrics["ratio/mean"].item())
    logps, entropy = linear_logprob(case.hidden, case.weight, case.targets, return_entropy=True)
    expected = reference.linear_logprob(case.hidden, case.weight, case.targets, return_entropy=True)
    torch.testing.assert_close((logps, entropy), expected)


@pytest.mark.parametrize("lengths", [(5, 1, 7, 3), (0, 7, 0, 0, 7, 0), (1,) * 9, (7, 7), (0,), (3, 4, 7, 1, 6)])
def test_chunks_end_where_sequences_end(lengths):
    parts = policy_rows.sequence_slices(lengths, 7)
    rows = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert parts[0][0].start == parts[0][1].start == 0
    assert (parts[-1][0].stop, parts[-1][1].stop) == (rows[-1], len(lengths))
    for (part, sequences), (following, next_sequences) in pairwise(parts):
        assert part.stop == following.start and sequences.stop == next_sequences.start
    for part, sequences in parts:
        assert (part.start, part.stop) == (rows[sequences.start], rows[sequences.stop])
        assert part.stop - part.start <= 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [3, 4, 11, 12, 13], ids=lambda vocab: f"V={vocab}")
@CHUNKS
def test_vocabulary_no_multiple_of_the_cast_block(monkeypatch, dtype, vocab, chunk):
    """A half-precision weight is cast block by block: no phantom logit beyond V, none left out."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(vocab=vocab, dtype=dtype, bias=True)
    whole, gradients = oracle.run(case, linear_grpo_loss)
    monkeypatch.setattr(chunked, "CAST_ROWS", 4)
    output, actual = oracle.run(case, linear_grpo_loss)
    torch.testing.assert_close(output.logps, whole.logps, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual, gradients)
    torch.testing.assert_close(
        linear_logprob(case.hidden, case.weight, case.targets),
        reference.linear_logprob(case.hidden, case.weight, case.targets),
    )


# --------------------------------------------------------------------------------------------------- counting products


def float32_case(**knobs):
    return oracle.make_case(dtype=torch.float32, masked=0.0, **knobs)


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
    assert products(float32_case(bias=True), frozen) == (1, expected)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("hidden", "weight"), 1), (("hidden", "weight", "bias"), 1)],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, tuple) else str(value),
)
def test_products_of_four_chunks(monkeypatch, frozen, expected):
    """The same number a chunk, all in the forward."""
    oracle.set_chunk(monkeypatch, 4)
    assert products(float32_case(bias=True), frozen) == (4 * expected, 4 * expected)


@pytest.mark.parametrize("entropy", [False, True])
def test_products_do_not_grow_with_the_objective(entropy):
    knobs = {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "delta": 2.0}
    assert products(float32_case(), return_entropy=entropy, **knobs) == (1, 3)


def test_a_sequence_longer_than_a_chunk_costs_one_forward_more(monkeypatch):
    oracle.set_chunk(monkeypatch, 4)
    case = float32_case()
    assert products(case, importance_sampling_level="sequence") == (4 + 12, 4 + 12)
    oracle.set_chunk(monkeypatch, 7)  # as long as the longest: chunks of 6, 7 and 3 rows
    assert products(case, importance_sampling_level="sequence") == (9, 9)


@CHUNKS
def test_no_grad_does_no_gradient_work(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = float32_case(bias=True)
    with oracle.Products() as count, torch.no_grad():
        output = linear_grpo_loss(**case.head(), **case.rest())
        linear_logprob(**case.head(), targets=case.targets)
    assert not output.loss.requires_grad
    assert [shape[0] for shape in count.shapes] == ([16] if chunk is None else [4] * 4) * 2


def test_inference_mode():
    case = float32_case()
    with torch.inference_mode():
        output = linear_grpo_loss(**case.head(), **case.rest())
    assert output.loss.item() == oracle.run(case, linear_grpo_loss)[0].loss.item()


def test_products_of_linear_logprob():
    """The backward recomputes the logits: 4 products, 3 with one operand frozen."""
    case = float32_case()
    for frozen, expected in (((), 4), (("weight",), 3), (("hidden",), 3)):
        head = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
        with oracle.Products() as count:
            logps = linear_logprob(**head, targets=case.targets)
            assert len(count) == 1
            logps.sum().backward()
        assert len(count) == expected


@CHUNKS
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
    case = float32_case()
    expected, gradients = oracle.run(case, linear_grpo_loss)
    head = case.head()
    loss = checkpoint(
        lambda hidden, weight: linear_grpo_loss(hidden, weight, **case.rest()).loss, *head.values(),
        use_reentrant=False,
    )  # fmt: skip
    loss.backward()
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(tensor.grad, gradients[name]) for name, tensor in head.items())


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["loss", "sequence-level loss", "log-probs", "entropy"])
def test_memory_is_bounded_by_one_chunk(monkeypatch, which, dtype):
    """The largest tensor is one chunk of fp32 logits, whatever N."""
    chunk, vocab, dim = 8, 512, 4
    oracle.set_chunk(monkeypatch, chunk)
    largest = []
    for sequences in (8, 16):
        case = oracle.make_case((16,) * sequences, vocab, dim, dtype, masked=0.0)
        head = case.head()
        with oracle.LargestTensor() as memory:
            if which.endswith("loss"):
                level = "sequence" if which.startswith("sequence") else "token"
                linear_grpo_loss(
                    **head, **case.rest(), beta=0.1, return_entropy=True, importance_sampling_level=level
                ).loss.backward()
            else:
                outputs = linear_logprob(**head, targets=case.targets, return_entropy=which == "entropy")
                (outputs if which == "log-probs" else outputs[0].sum() + outputs[1]).sum().backward()
        largest.append(memory.nbytes)
    assert largest == [4 * chunk * vocab] * 2


def test_one_chunk_is_alive_at_a_time(monkeypatch):
    """Beyond inputs and gradients: the logits of one chunk and what is small beside them, not those of two."""
    chunk, vocab = 8, 8192
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((16, 16), vocab, 4, torch.float32, masked=0.0)
    head = case.head()

    def loss():
        return torch.autograd.grad(linear_grpo_loss(**head, **case.rest()).loss, list(head.values()))

    def logps():
        return torch.autograd.grad(linear_logprob(**head, targets=case.targets).sum(), list(head.values()))

    def scored():
        with torch.no_grad():
            return linear_logprob(**head, targets=case.targets)

    # dW may be held twice: it is scaled by grad_output out of place.
    weight_bytes = case.weight.nbytes
    for name, result in compare({"loss": loss, "logps": logps, "scored": scored}, 1).items():
        assert result["peak_bytes"] <= 1.1 * 4 * chunk * vocab + weight_bytes, name


# --------------------------------------------------------------------------------------------- what autograd asks of it


@CHUNKS
@pytest.mark.parametrize("grad_output", [0.37, -3.0, 0.0, 65536.0])
def test_grad_output(monkeypatch, grad_output, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(bias=True)
    _, _, _, gradients = oracle.truth(case, grad_output=grad_output)
    _, actual = oracle.run(case, linear_grpo_loss, grad_output=grad_output)
    torch.testing.assert_close(actual, gradients)


@pytest.mark.gpu
def test_grad_output_is_not_read_by_the_host():
    hidden = torch.randn(16, 8, device="cuda", requires_grad=True)
    weight = torch.randn(32, 8, device="cuda", requires_grad=True)
    targets, advantages = torch.randint(32, (16,), device="cuda"), torch.randn(16, device="cuda")
    loss = linear_grpo_loss(hidden, weight, targets, advantages).loss
    grad_output = torch.tensor(0.37, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward(grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.grad.isfinite().all()


@CHUNKS
def test_backward_twice(monkeypatch, chunk):
    """retain_graph: the second backward gives the same gradient again; without it, an error."""
    oracle.set_chunk(monkeypatch, chunk)
    case = float32_case(bias=True)
    _, once = oracle.run(case, linear_grpo_loss)
    head = case.head()
    loss = linear_grpo_loss(**head, **case.rest()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(tensor.grad, 2 * once[name]) for name, tensor in head.items())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    logps = linear_logprob(**head, targets=case.targets)
    first = torch.autograd.grad(logps.sum(), head["weight"], retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(logps.sum(), head["weight"])[0])


@CHUNKS
@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("hidden", "weight"), ("bias",)], ids="+".join)
def test_frozen_inputs(monkeypatch, frozen, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(bias=True)
    _, expected = oracle.run(case, linear_grpo_loss)
    head = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.head().items()}
    linear_grpo_loss(**head, **case.rest()).loss.backward()
    for name, tensor in head.items():
        assert tensor.grad is None if name in frozen else torch.equal(tensor.grad, expected[name])


def test_everything_frozen():
    case = oracle.make_case(bias=True)
    head = {name: tensor.requires_grad_(False) for name, tensor in case.head().items()}
    output = linear_grpo_loss(**head, **case.rest())
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, oracle.run(case, linear_grpo_loss)[0].loss)
    assert not linear_logprob(**head, targets=case.targets).requires_grad


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_contiguous_hidden_and_transposed_weight(monkeypatch, dtype, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((4, 4, 4), dtype=dtype)
    expected, gradients = oracle.run(case, linear_grpo_loss)
    # hidden as the usual shifted slice of [B, T+1, D] and stored feature-major; weight stored [D, V].
    wide = torch.cat([case.hidden.view(3, 4, 6), torch.full((3, 1, 6), math.nan, dtype=dtype)], 1)
    per_token = {name: value.view(3, 4) for name, value in case.rest().items() if getattr(value, "shape", 0) == (12,)}
    for store in (wide, wide.transpose(0, 2).contiguous().transpose(0, 2), wide.repeat_interleave(2, -1)[..., ::2]):
        leaf = store.requires_grad_()
        hidden = leaf[:, :-1]
        transposed = case.weight.T.contiguous().requires_grad_()
        assert not hidden.is_contiguous() and not transposed.T.is_contiguous()
        output = linear_grpo_loss(hidden, transposed.T, **per_token, temperature=case.temperature)
        output.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss)
        torch.testing.assert_close(leaf.grad[:, :-1].reshape(12, 6), gradients["hidden"])
        torch.testing.assert_close(transposed.grad.T, gradients["weight"])
        assert (leaf.grad[:, -1] == 0).all()


@CHUNKS
def test_tied_embedding(monkeypatch, chunk):
    """One parameter embeds and projects: both gradients add up, and nothing writes `.grad` in the forward."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(dim=11)
    ids = torch.randint(11, (16,))
    gradients = []
    for loss in (
        lambda hidden, weight: linear_grpo_loss(hidden, weight, **case.rest()).loss,
        lambda hidden, weight: reference.linear_grpo_loss(
            hidden[case.mask], weight, case.targets[case.mask], case.advantages[case.mask],
            torch.full((16,), 1 / case.mask.sum().item()).double()[case.mask], Objective(),
            old_logps=case.old_logps[case.mask], temperature=case.temperature,
        )[0],
    ):  # fmt: skip
        weight = case.weight.clone().requires_grad_()
        result = loss(torch.tanh(weight[ids]), weight)
        assert weight.grad is None
        result.backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)


@CHUNKS
def test_gradients_accumulate(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = float32_case()
    _, once = oracle.run(case, linear_grpo_loss)
    head = case.head()
    for tensor in head.values():
        tensor.grad = torch.ones_like(tensor)
    linear_grpo_loss(**head, **case.rest()).loss.backward()
    assert all(torch.equal(tensor.grad, 1 + once[name]) for name, tensor in head.items())


def test_double_backward_is_an_error():
    case = oracle.make_case()
    head, scale = case.head(), torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = linear_grpo_loss(**head, **case.rest()).loss * scale
    (gradient,) = torch.autograd.grad(loss, head["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_give_the_same_bits(monkeypatch, dtype, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((40, 30, 50), vocab=130, dim=32, dtype=dtype, bias=True)
    first, gradients = oracle.run(case, linear_grpo_loss)
    second, again = oracle.run(case, linear_grpo_loss)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.logps, second.logps)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@CHUNKS
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(monkeypatch, hidden_dtype, level, chunk):
    """The head computes in fp32 by itself; a bf16 hidden state may meet an fp32 weight there. Forward and backward."""
    oracle.set_chunk(monkeypatch, chunk)
    case = float32_case(bias=True)
    case = replace(case, hidden=case.hidden.to(hidden_dtype))
    knobs = {"importance_sampling_level": level, "loss_type": "grpo", "beta": 0.1, "return_entropy": True}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    head = case.head()
    with torch.autocast("cpu", torch.bfloat16):
        output, actual = oracle.run(case, linear_grpo_loss, **knobs)
        logps, entropy = linear_logprob(**head, targets=case.targets, return_entropy=True)
        (logps + entropy).sum().backward()
        policy = grpo_loss(logps.detach(), case.old_logps, case.advantages)
    assert output.loss.dtype == logps.dtype == policy.loss.dtype == torch.float32
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logps, expected.logps)
    assert all(torch.equal(actual[name], gradients[name]) for name in gradients)
    plain = case.head()
    outputs = linear_logprob(**plain, targets=case.targets, return_entropy=True)
    sum(outputs).sum().backward()
    assert torch.equal(logps, outputs[0]) and torch.equal(entropy, outputs[1])
    assert all(torch.equal(head[name].grad, plain[name].grad) for name in head)


@CHUNKS
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_under_torch_compile(monkeypatch, level, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    torch._dynamo.reset()
    case = float32_case(bias=True)
    knobs = {"importance_sampling_level": level, "loss_type": "grpo", "beta": 0.1}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)

    @torch.compile(backend="eager")
    def step(hidden, weight, bias, scale):
        output = linear_grpo_loss(hidden * scale, weight, bias=bias, **case.rest(), **knobs)
        logps = linear_logprob(hidden, weight, case.targets, bias=bias, temperature=case.temperature)
        apart = grpo_loss(logps, case.old_logps, case.advantages, mask=case.mask, cu_seqlens=case.cu_seqlens,
                          ref_logps=case.ref_logps, **knobs)  # fmt: skip
        return output.loss * 2, apart.loss, output.metrics["kl"]

    head = case.head()
    loss, apart, kl = step(*head.values(), torch.ones(()))
    (loss - apart).backward()
    torch.testing.assert_close(loss / 2, expected.loss)
    torch.testing.assert_close(apart, expected.loss)
    torch.testing.assert_close(kl, expected.metrics["kl"])
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
@CHUNKS
def test_under_torch_compile_with_inductor(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    torch._dynamo.reset()
    case = float32_case(bias=True)
    expected, gradients = oracle.run(case, linear_grpo_loss, beta=0.1)
    head = case.head()
    compiled = torch.compile(lambda **head: linear_grpo_loss(**head, **case.rest(), beta=0.1).loss)
    loss = compiled(**head)
    loss.backward()
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)


# ---------------------------------------------------------------------------------------------------------- exactness
#
# Against an fp64 truth of the same rounded inputs, relative to plain PyTorch in the same dtype with fp32 logits:
# log-probs and dH at most 1.1 times its error plus 1e-5, dW at most 1.5 times plus 1e-5.


def check_errors(case, grad_output, **knobs):
    """Errors of the gradients are relative, in the Euclidean norm; of log-probs and loss the largest, in nats."""
    exact_loss, exact_logps, _, exact = oracle.truth(case, grad_output=grad_output, dtype=torch.float64, **knobs)
    plain_loss, plain_logps, _, plain = oracle.truth(case, grad_output=grad_output, **knobs)
    output, actual = oracle.run(case, linear_grpo_loss, grad_output=grad_output, **knobs)

    def largest(logps):
        return (logps.double() - exact_logps).abs().max().item()

    assert largest(output.logps[case.mask]) <= 1.1 * largest(plain_logps) + 1e-5
    assert abs(output.loss - exact_loss) <= 1.1 * abs(plain_loss - exact_loss) + 1e-5
    for name, slack in (("hidden", 1.1), ("weight", 1.5), ("bias", 1.5)):
        assert actual[name].dtype == case.hidden.dtype
        mine, theirs = oracle.error(actual[name], exact[name]), oracle.error(plain[name], exact[name])
        assert mine <= slack * theirs + 1e-5, f"d{name}: error {mine:.2e}, plain PyTorch's {theirs:.2e}"


@CHUNKS
@pytest.mark.parametrize("grad_output", [1.0, 0.37, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_worse_than_plain_pytorch(monkeypatch, dtype, grad_output, chunk):
    """grad_output 0.37 stands for gradient accumulation; 65536 is the first loss scale of torch's GradScaler."""
    oracle.set_chunk(monkeypatch, chunk and 16)
    check_errors(oracle.make_case((20, 31, 13), 301, 32, dtype, bias=True), grad_output, beta=0.1)


@pytest.mark.parametrize("per_token", [False, True], ids=["T-float", "T-tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_logprob_no_worse_than_plain_pytorch(monkeypatch, dtype, per_token):
    oracle.set_chunk(monkeypatch, 16)
    case = oracle.make_case((64,), 301, 32, dtype, per_token_temperature=per_token)
    arguments = {"targets": case.targets, "temperature": case.temperature, "return_entropy": True}
    results = []
    for function, the_case in (
        (reference.linear_logprob, case.to(torch.float64)),
        (reference.linear_logprob, case),
        (linear_logprob, case),
    ):
        head = the_case.head()
        logps, entropy = function(**head, **arguments)
        (logps * case.advantages + entropy).sum().backward()
        results.append((logps.detach(), entropy.detach(), head["hidden"].grad, head["weight"].grad))
    for exact, plain, actual, slack in zip(*results, (1.1, 1.1, 1.1, 1.5), strict=True):
        assert oracle.error(actual, exact) <= slack * oracle.error(plain, exact) + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dw_over_64_chunks_as_good_as_over_one(monkeypatch, dtype):
    """A sum over chunks that is rounded to bf16 after each would lose small addends."""
    case = oracle.make_case((256, 256), 64, 16, dtype, masked=0.0)
    *_, exact = oracle.truth(case, dtype=torch.float64)
    _, one = oracle.run(case, linear_grpo_loss)
    oracle.set_chunk(monkeypatch, 8)
    _, many = oracle.run(case, linear_grpo_loss)
    for name in ("hidden", "weight"):
        assert oracle.error(many[name], exact[name]) <= 1.02 * oracle.error(one[name], exact[name]) + 1e-6


def extreme_case(kind):
    """Logits of spread about 1.5 around extremes that overflow or underflow a careless exponential."""
    case = oracle.make_case((12,), vocab=40, dim=8, dtype=torch.float32, old=False, ref=False, masked=0.0)
    hidden, weight = case.hidden.clone(), case.weight.clone()
    hidden[:, 0] = 1.0
    targets = case.targets % 39 + 1
    if kind == "every logit below -87":
        weight[:, 0] -= 120
    elif kind == "every logit above 88":
        weight[:, 0] += 120
    elif kind in ("60 nats above, the target", "60 nats above, another"):
        weight[0, 0] += 60
        targets = torch.zeros_like(targets) if kind.endswith("the target") else targets
    elif kind == "least likely target":
        weight *= 12
        targets = (hidden @ weight.T).argmin(-1)
    return replace(case, hidden=hidden, weight=weight, targets=targets, temperature=1.0)


@CHUNKS
@pytest.mark.parametrize(
    "kind",
    [
        "every logit below -87",
        "every logit above 88",
        "60 nats above, the target",
        "60 nats above, another",
        "least likely target",
    ],
)
def test_extreme_logits(monkeypatch, kind, chunk):
    """The truth by log1p in fp64: logp = -log1p(sum of e^(z - z_target) over the others), and 1 - p = S / (1 + S)."""
    oracle.set_chunk(monkeypatch, chunk)
    case = extreme_case(kind)
    hidden, weight, targets = case.hidden.double(), case.weight.double(), case.targets[:, None]
    odds = hidden @ weight.T
    odds = (odds - odds.gather(-1, targets)).exp().scatter(-1, targets, 0.0)
    others = odds.sum(-1, keepdim=True)
    exact_logps = -torch.log1p(others)[:, 0]
    slope = (-odds / (1 + others)).scatter(-1, targets, others / (1 + others))  # dlogp/dz
    slope *= -case.advantages.double()[:, None] / 12  # dloss/dlogp at ratio 1
    exact = {"logps": exact_logps, "hidden": slope @ weight, "weight": slope.T @ hidden}
    if kind == "every logit below -87":
        assert (case.hidden @ case.weight.T).max() < -87
    if kind == "least likely target":
        assert exact_logps.min() < -40

    _, plain_logps, _, plain = oracle.truth(case)
    output, actual = oracle.run(case, linear_grpo_loss, return_entropy=True)
    assert output.loss.isfinite() and output.metrics["entropy"].isfinite()
    for name, mine, theirs, slack in (
        ("logps", output.logps, plain_logps, 1.1),
        ("hidden", actual["hidden"], plain["hidden"], 1.1),
        ("weight", actual["weight"], plain["weight"], 1.5),
    ):
        limit = slack * (theirs.double() - exact[name]).abs().max() + 1e-5
        assert (mine.double() - exact[name]).abs().max() <= limit, name
    logps = linear_logprob(case.hidden, case.weight, case.targets)
    assert torch.equal(logps, output.logps)


def test_confident_entropy_is_not_negative_infinity_or_nan():
    case = extreme_case("60 nats above, the target")
    head = case.head()
    _, entropy = linear_logprob(**head, targets=case.targets, return_entropy=True)
    entropy.sum().backward()
    assert entropy.abs().max() < 1e-5 and head["weight"].grad.isfinite().all()
