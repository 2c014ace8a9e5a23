"""How exact the chunked path is, in fp32 and in 16 bits, and on logits that overflow a careless exponential."""

from dataclasses import replace

import oracle
import pytest
import torch

from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.kernel_checks.cases import error
from fastgrpo.kernels import reference


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
        mine, theirs = error("gradient", actual[name], exact[name]), error("gradient", plain[name], exact[name])
        assert mine <= slack * theirs + 1e-5, f"d{name}: error {mine:.2e}, plain PyTorch's {theirs:.2e}"


@oracle.CHUNKS
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
        assert error("gradient", actual, exact) <= slack * error("gradient", plain, exact) + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dw_over_64_chunks_as_good_as_over_one(monkeypatch, dtype):
    """A sum over chunks that is rounded to bf16 after each would lose small addends."""
    case = oracle.make_case((256, 256), 64, 16, dtype, masked=0.0)
    *_, exact = oracle.truth(case, dtype=torch.float64)
    _, one = oracle.run(case, linear_grpo_loss)
    oracle.set_chunk(monkeypatch, 8)
    _, many = oracle.run(case, linear_grpo_loss)
    for name in ("hidden", "weight"):
        assert error("gradient", many[name], exact[name]) <= 1.02 * error("gradient", one[name], exact[name]) + 1e-6


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


@oracle.CHUNKS
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
