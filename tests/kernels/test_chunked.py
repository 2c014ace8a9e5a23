"""The path by chunks of rows: any size of chunk gives the same results, in the memory of one chunk."""

import oracle
import pytest
import torch

from benchmarks.compare import compare
from fastgrpo import Objective, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import head_torch, reference


def test_uninitialised_memory_is_nan():
    """The tests rely on this fixture of conftest.py to see a read before a write."""
    assert torch.empty(100).isnan().all() and torch.ones(3).new_empty(100).isnan().all()


@pytest.mark.parametrize(("vocab", "rows"), [(32_768, 512), (151_936, 128), (128, 131_072), (10**6, 128)])
def test_chunk_rows(vocab, rows):
    """64 MiB of fp32 logits, and no fewer than 128 rows."""
    assert head_torch.chunk_rows(vocab) == rows


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [3, 4, 11, 12, 13], ids=lambda vocab: f"V={vocab}")
@oracle.CHUNKS
def test_vocabulary_no_multiple_of_the_cast_block(monkeypatch, dtype, vocab, chunk):
    """A half-precision weight is cast block by block: no phantom logit beyond V, none left out."""
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(vocab=vocab, dtype=dtype, bias=True)
    whole, gradients = oracle.run(case, linear_grpo_loss)
    monkeypatch.setattr(head_torch, "CAST_BYTES", 4 * 4 * case.weight.shape[1])  # 4 rows
    output, actual = oracle.run(case, linear_grpo_loss)
    torch.testing.assert_close(output.logps, whole.logps, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual, gradients)
    torch.testing.assert_close(
        linear_logprob(case.hidden, case.weight, case.targets),
        reference.linear_logprob(case.hidden, case.weight, case.targets),
    )


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


@pytest.mark.parametrize("softcap, chunks", [(None, 1), (5.0, 2)])
def test_one_chunk_is_alive_at_a_time(monkeypatch, softcap, chunks):
    """Beyond inputs and gradients: the logits of one chunk, the slope of a soft-cap, and what is small beside them."""
    chunk, vocab = 8, 8192
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((16, 16), vocab, 4, torch.float32, masked=0.0)
    head = case.head()

    def loss():
        output = linear_grpo_loss(**head, **case.rest(), logit_softcap=softcap)
        return torch.autograd.grad(output.loss, list(head.values()))

    def logps():
        logps = linear_logprob(**head, targets=case.targets, logit_softcap=softcap)
        return torch.autograd.grad(logps.sum(), list(head.values()))

    def scored():
        with torch.no_grad():
            return linear_logprob(**head, targets=case.targets, logit_softcap=softcap)

    # dW may be held twice: it is scaled by grad_output out of place.
    weight_bytes = case.weight.nbytes
    for name, result in compare({"loss": loss, "logps": logps, "scored": scored}, 1).items():
        assert result["peak_bytes"] <= (chunks + 0.1) * 4 * chunk * vocab + weight_bytes, name


@pytest.mark.parametrize("several_chunks", (False, True))
def test_softcap(several_chunks, monkeypatch):
    if several_chunks:
        oracle.set_chunk(monkeypatch, 5)
    hidden, weight = torch.randn(12, 8).double().requires_grad_(), torch.randn(40, 8).double().requires_grad_()
    targets, advantages = torch.randint(40, (12,)), torch.randn(12).double()
    objective = Objective(entropy_coef=0.2)
    ours = linear_grpo_loss(hidden, weight, targets, advantages, logit_softcap=2.0, objective=objective)
    weights = torch.full((12,), 1 / 12, dtype=torch.float64)
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
