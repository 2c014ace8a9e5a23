"""The trials of `python -m fastgrpo.doctor --check`: random inputs, a kernel's values, and their judgement.

The truth is kernels/reference.py in fp64, differentiated by autograd. Plain is PyTorch in the inputs' dtype with fp32
logits and fp32 accumulation; dz is rounded to the inputs' dtype for its two products. A kernel may err `FACTORS` times
as much as plain, plus `SLACK`. Losses are called as users call them, with the backend that a mode names.

Shapes: N tokens, V vocabulary, D hidden; R lanes, P prompts, H query heads, K key heads, d width of a head.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastgrpo.kernels import reference
from fastgrpo.loss.dispatch import HAS_TRITON
from fastgrpo.loss.logprobs import linear_logprob
from fastgrpo.loss.losses import grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.loss.objective import Objective

if HAS_TRITON:
    from fastgrpo.kernels import launch
    from fastgrpo.kernels.decode import group_decode
    from fastgrpo.kernels.sampling import sample

Tensor = torch.Tensor
Tensors = dict[str, torch.Tensor]
Errors = dict[str, tuple[float, float]]  # by name: an error, and the largest that is allowed
LossOf = Callable[[torch.Tensor], tuple[torch.Tensor, Tensors]]  # logits -> the loss, and other values by name
SLACK = 1e-5
FACTORS = {"logps": 1.1, "entropy": 1.1, "loss": 1.1, "hidden": 1.1, "logits": 1.1, "weight": 1.5, "bias": 1.5,
           "output": 1.2}  # fmt: skip
HEAD_SIZES = {"gpu": (1024, 896, 32_003), "cpu": (64, 32, 500), "interpreter": (40, 16, 70)}  # N, D, V
CHUNKED_SIZES = {"gpu": (9000, 128, 4099)}  # more rows than launch.CHUNK_ROWS
DECODE_SIZES = {"gpu": (4, 8, 600, 300), "interpreter": (2, 3, 20, 9)}  # P, lanes of each, tokens of prompt and lane
SAMPLE_SIZES = {"gpu": (64, 151_936), "interpreter": (5, 150)}  # R, V
FLAGGED = 20.0  # times the hidden states of every seventh token, whose target is the least likely one
NEAR = 1e-5  # to a draw's or a filter's boundary: there, rounding may decide about the token
DAPO = Objective(beta=0.1)
BONUS = Objective(beta=0.1, entropy_coef=1.0)
SURROGATES = {
    "clip": Objective(beta=0.1),
    "clip with delta": Objective(delta=1.25, epsilon_high=0.1),
    "cispo": Objective("cispo", epsilon_high=1.2),
    "sapo": Objective("sapo"),
    "vespo": Objective("vespo", importance_sampling_mode="token_truncate"),
    "gspo": Objective(importance_sampling_level="sequence", beta=0.3, use_bias_correction_kl=True),
}


class Place(NamedTuple):
    """Where a case runs: in mode "gpu", "cpu" (the paths without Triton) or "interpreter" (the kernels on a CPU)."""

    mode: str
    device: torch.device
    dtype: torch.dtype

    @property
    def backend(self) -> str:
        """The backend that the mode tries."""
        return "chunked" if self.mode == "cpu" else "triton"


class Trial(NamedTuple):
    """A call of a kernel, and what judges its result."""

    ours: Callable[[], Any]
    judge: Callable[[Any], Errors]


class Case(NamedTuple):
    """A line of the table, with the dtype that it has on a GPU. Elsewhere it has fp32."""

    name: str
    make: Callable[[Place], Trial]
    modes: tuple[str, ...] = ("gpu", "interpreter")
    dtype: torch.dtype = torch.bfloat16

    def trial(self, mode: str) -> Trial:
        """Draw the inputs."""
        torch.manual_seed(0)
        on_gpu = mode == "gpu"
        return self.make(Place(mode, torch.device("cuda" if on_gpu else "cpu"), self.dtype if on_gpu else torch.float))


def error(name: str, value: Tensor, true: Tensor) -> float:
    """Return the error of log-probs, entropies and losses, relative only above 1; of all else relative in norm."""
    value, true = value.detach().double(), true.detach().double()
    if name in ("logps", "entropy", "loss"):
        return ((value - true).abs() / true.abs().clamp(min=1)).max().item() if true.numel() else 0.0
    return ((value - true).norm() / true.norm().clamp(min=1e-300)).item()


def judge(ours: Tensors, true: Tensors, simple: Tensors) -> Errors:
    """Compare values with the truth and with plain PyTorch. A name's last word is a key of `FACTORS`."""
    return {
        name: (error(kind, value, true[name]), FACTORS[kind] * error(kind, simple[name], true[name]) + SLACK)
        for name, value in ours.items()
        for kind in name.split()[-1:]
    }


def gradients(loss: Tensor, leaves: Tensors) -> Tensors:
    """Differentiate a loss by leaves."""
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def random_head(
    n: int, d: int, v: int, dtype: torch.dtype, device: torch.device, *, bias: bool = False,
    temperature: float | str = 1.0, softcap: float | None = None,
) -> tuple[Tensors, dict[str, Any]]:  # fmt: skip
    """Draw hidden, weight and bias, and what a loss is told of the tokens; half of the targets are likely ones."""

    def randn(*shape):
        return torch.randn(*shape, device=device)

    leaves = {"hidden": randn(n, d).to(dtype), "weight": (randn(v, d) * 2 / d**0.5).to(dtype)}
    leaves |= {"bias": randn(v).to(dtype)} if bias else {}
    targets = torch.randint(v, (n,), device=device)
    targets[::2] = (leaves["hidden"][::2].float() @ leaves["weight"].float().T).argmax(-1)
    temperature = torch.rand(n, device=device) + 0.5 if temperature == "row" else temperature
    logps = reference.linear_logprob(
        **{name: leaf.double() for name, leaf in leaves.items()}, targets=targets, temperature=temperature,
        logit_softcap=softcap,
    ).float()  # fmt: skip
    tokens = {"targets": targets, "advantages": randn(n), "token_weights": torch.rand(n, device=device) / n,
              "old_logps": logps + 0.3 * randn(n), "ref_logps": logps + 0.3 * randn(n),
              "temperature": temperature}  # fmt: skip
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, tokens


def exact(leaves: Tensors, softcap: float | None, loss_of: LossOf) -> Tensors:
    """Compute the truth of a head: its values and gradients in fp64."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    loss, values = loss_of(reference._linear(leaves["hidden"], leaves["weight"], leaves.get("bias"), softcap))
    return {"loss": loss, **values, **gradients(loss, leaves)}


def plain(leaves: Tensors, softcap: float | None, loss_of: LossOf) -> Tensors:
    """Compute the same in the inputs' dtype with fp32 logits."""
    hidden, weight, bias = (None if leaves.get(k) is None else leaves[k].detach() for k in ("hidden", "weight", "bias"))

    def matmul(left, right):  # on a GPU through the matrix units, as the kernels' products
        if left.is_cuda and left.dtype != torch.float32:
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()

    x = matmul(hidden, weight.T).requires_grad_()
    y = x if bias is None else x + bias.float()
    loss, values = loss_of(y if softcap is None else softcap * torch.tanh(y / softcap))
    dz = torch.autograd.grad(loss, x)[0].to(hidden.dtype)
    grads = {"hidden": matmul(dz, weight), "weight": matmul(dz.T, hidden), "bias": dz.float().sum(0)}
    return {"loss": loss, **values, **{name: grads[name].to(hidden.dtype) for name in leaves}}


def loss_of_logits(logits: Tensor, *, token_weights: Tensor, **tokens: Any) -> tuple[Tensor, Tensors]:
    """Compute the GRPO loss by the reference."""
    loss, logps, _ = reference.logits_grpo_loss(logits, weights=token_weights, **tokens)
    return loss, {"logps": logps}


def fused_loss(
    place: Place, *, objective: Objective = DAPO, sharded: bool = False,
    sizes: dict[str, tuple[int, int, int]] = HEAD_SIZES, softcap: float | None = None, **options: Any,
) -> Trial:  # fmt: skip
    """Make the trial of the fused loss, `sharded` over a group of this process alone."""
    leaves, tokens = random_head(*sizes[place.mode], place.dtype, place.device, softcap=softcap, **options)
    tokens["objective"] = objective
    if objective.entropy_coef:
        tokens["entropy_weights"] = 0.3 * tokens["token_weights"]
    if sharded and not dist.is_initialized():
        dist.init_process_group("nccl" if place.mode == "gpu" else "gloo", store=dist.HashStore(), rank=0, world_size=1)

    def ours() -> Tensors:
        group = dist.group.WORLD if sharded else None
        out = linear_grpo_loss(**leaves, **tokens, logit_softcap=softcap, process_group=group, backend=place.backend)
        return {"loss": out.loss, "logps": out.logps, **gradients(out.loss, leaves)}

    loss_of = partial(loss_of_logits, **tokens)
    return Trial(ours, lambda found: judge(found, exact(leaves, softcap, loss_of), plain(leaves, softcap, loss_of)))


def logprob(
    place: Place, *, entropy: bool = True, flagged: bool = False,
    softcap: float | None = None, **options: Any,
) -> Trial:  # fmt: skip
    """Make the trial of the log-probs; `flagged` rows need another anchor than their target."""
    leaves, tokens = random_head(*HEAD_SIZES[place.mode], place.dtype, place.device, softcap=softcap, **options)
    by = {"targets": tokens["targets"], "temperature": tokens["temperature"], "return_entropy": entropy}
    if flagged:
        with torch.no_grad():
            leaves["hidden"][::7] *= FLAGGED
            by["targets"][::7] = (leaves["hidden"][::7].float() @ leaves["weight"].float().T).argmin(-1)

    def with_loss(found: Any) -> tuple[Tensor, Tensors]:  # the log-probs and entropies, each weighted at random
        values = dict(zip(("logps", "entropy"), found if entropy else (found,), strict=False))
        factors = (tokens["advantages"], tokens["old_logps"])
        return sum((value * factor).sum() for value, factor in zip(values.values(), factors, strict=False)), values

    def ours() -> Tensors:
        loss, values = with_loss(linear_logprob(**leaves, **by, logit_softcap=softcap, backend=place.backend))
        return values | gradients(loss, leaves)

    def loss_of(logits: Tensor) -> tuple[Tensor, Tensors]:
        return with_loss(reference.logits_logprob(logits, **by))

    return Trial(ours, lambda found: judge(found, exact(leaves, softcap, loss_of), plain(leaves, softcap, loss_of)))


def logits_loss(place: Place, *, inplace: bool = False) -> Trial:
    """Make the trial of the loss of given logits."""
    leaves, tokens = random_head(*HEAD_SIZES[place.mode], place.dtype, place.device)
    logits = (leaves["hidden"] @ leaves["weight"].T).detach()
    tokens["objective"] = DAPO

    def with_gradient(dtype: torch.dtype, loss_of: LossOf) -> Tensors:
        leaf = logits.clone().to(dtype).requires_grad_()
        loss, values = loss_of(leaf)
        return {"loss": loss, **values, **gradients(loss, {"logits": leaf})}

    def fused(leaf: Tensor) -> tuple[Tensor, Tensors]:
        out = logits_grpo_loss(leaf, **tokens, inplace=inplace, backend=place.backend)
        return out.loss, {"logps": out.logps}

    def judged(found: Tensors) -> Errors:
        by_reference = partial(loss_of_logits, **tokens)
        true, simple = with_gradient(torch.double, by_reference), with_gradient(torch.float, by_reference)
        return judge(found, true, simple | {"logits": simple["logits"].to(place.dtype)})

    return Trial(lambda: with_gradient(place.dtype, fused), judged)


def token_losses(place: Place) -> Trial:
    """Make the trial of the loss of given log-probs, with every surrogate."""
    n = 5000 if place.mode == "gpu" else 300
    _, tokens = random_head(n, 8, 50, torch.float, place.device)
    old, ref, advantages, weights = (tokens[k] for k in ("old_logps", "ref_logps", "advantages", "token_weights"))
    logps = old + 0.3 * torch.randn_like(old)
    lengths = torch.tensor([n // 7, n // 3, n - n // 7 - n // 3], device=place.device)

    def with_each(dtype: torch.dtype, loss_of: Callable[..., Tensor]) -> Tensors:
        found = {}
        for name, objective in SURROGATES.items():
            leaf = logps.to(dtype).requires_grad_()
            found[f"{name} loss"] = loss_of(leaf, objective, ref if name == "vespo" else None)
            found |= gradients(found[f"{name} loss"], {f"{name} logits": leaf})
        return found

    def by_reference(leaf: Tensor, objective: Objective, sampler: Tensor | None) -> Tensor:
        return reference.policy_loss(leaf, old, ref, advantages, weights, objective, lengths, sampler)[0]

    def fused(leaf: Tensor, objective: Objective, sampler: Tensor | None) -> Tensor:
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return grpo_loss(
            leaf, old, advantages, token_weights=weights, ref_logps=ref, sampler_logps=sampler, cu_seqlens=ends,
            objective=objective, backend=place.backend,
        ).loss  # fmt: skip

    return Trial(
        lambda: with_each(torch.float, fused),
        lambda found: judge(found, with_each(torch.double, by_reference), with_each(torch.float, by_reference)),
    )


def decode(place: Place, heads: tuple[int, int], depth: int) -> Trial:
    """Make the trial of one decode step's attention: ragged lanes, the first of them without a prompt."""
    prompts, group, shared, most = DECODE_SIZES[place.mode]
    lanes = prompts * group

    def randn(*shape):
        return torch.randn(*shape, depth, device=place.device).to(place.dtype)

    case = {"query": randn(lanes, heads[0]), "scale": depth**-0.5}
    for prefix, slots, tokens in (("", lanes, most), ("prompt_", prompts, shared)):
        case |= {f"{prefix}{name}": randn(slots, heads[1], tokens) for name in ("keys", "values")}
    members = torch.arange(lanes, dtype=torch.int32, device=place.device)
    members[0] = -1
    lengths = torch.randint(1, most + 1, (lanes,), dtype=torch.int32, device=place.device)
    case |= {"members": members.view(prompts, group), "lengths": lengths,
             "prompt_lengths": torch.full((prompts,), shared, dtype=torch.int32, device=place.device)}  # fmt: skip

    def attend(lane: int) -> Tensor:  # by PyTorch's own attention, in the dtype of the case
        own, prompt = slice(lengths[lane].item()), slice(shared if lane else 0)
        keys, values = (
            torch.cat([case[f"prompt_{name}"][lane // group, :, prompt], case[name][lane, :, own]], dim=1)[None]
            for name in ("keys", "values")
        )
        query = case["query"][lane, None, :, None]
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0, :, 0]

    def judged(found: Tensor) -> Errors:
        in_fp64 = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.items()}
        simple = torch.stack([attend(lane) for lane in range(lanes)])
        return judge({"output": found}, {"output": reference.group_decode(**in_fp64)}, {"output": simple})

    return Trial(lambda: group_decode(**case), judged)


def draws(place: Place, temperature: float = 0.8, **filters: float) -> Trial:
    """Make the trial of drawing a token for each lane.

    The reference draws with uniforms and filters a little smaller and a little greater. Where all these draws are one
    token, it is the only right one; the mass that the filters keep lies between theirs.
    """
    logits = torch.randn(*SAMPLE_SIZES[place.mode], device=place.device) * 2.5
    uniforms = torch.rand(len(logits), device=place.device)

    def near(move: float, change: float) -> tuple[Tensor, Tensor, Tensor]:
        moved = {name: value * (1 + change) if name != "top_k" else value for name, value in filters.items()}
        return reference.sample(logits.double(), uniforms.double() + move, temperature=temperature, **moved)

    def judged(drawn: tuple[Tensor, Tensor, Tensor]) -> Errors:
        tokens, logps, kept = drawn
        true = torch.log_softmax(logits.double() / (temperature or 1), dim=-1).gather(-1, tokens[:, None])[:, 0]
        all_tokens, _, all_kept = map(torch.stack, zip(*(near(*by) for by in product((-NEAR, NEAR), repeat=2)),
                                                       strict=True))  # fmt: skip
        clear = (all_tokens == all_tokens[0]).all(0)
        return {
            "logps": (error("logps", logps, true), SLACK),
            "kept": (torch.maximum(all_kept.amin(0) - kept, kept - all_kept.amax(0)).max().item(), 1e-6),
            "wrong tokens": ((clear & (tokens != all_tokens[0])).double().mean().item(), 0.0),
            "unclear tokens": ((~clear).double().mean().item(), 0.5),
        }

    return Trial(lambda: sample(logits, uniforms, temperature=temperature, **filters), judged)


EVERYWHERE = ("gpu", "cpu", "interpreter")
EVERYTHING = {"bias": True, "softcap": 5.0, "temperature": "row"}
CASES = (
    Case("linear_grpo_loss", fused_loss, EVERYWHERE),
    Case("linear_grpo_loss, chunks", partial(fused_loss, sizes=CHUNKED_SIZES), ("gpu",)),
    Case("linear_grpo_loss, bias, soft-cap", partial(fused_loss, **EVERYTHING), EVERYWHERE),
    Case("linear_grpo_loss, entropy bonus", partial(fused_loss, objective=BONUS)),
    Case("linear_grpo_loss, recomputed", partial(fused_loss, objective=BONUS, softcap=5.0)),
    Case("linear_grpo_loss, sharded", partial(fused_loss, sharded=True)),
    Case("linear_logprob, entropy", logprob, EVERYWHERE),
    Case("linear_logprob, bias, soft-cap", partial(logprob, **EVERYTHING)),
    Case("linear_logprob, unlikely targets", partial(logprob, entropy=False, flagged=True)),
    Case("logits_grpo_loss", logits_loss, EVERYWHERE),
    Case("logits_grpo_loss, in place", partial(logits_loss, inplace=True)),
    Case("grpo_loss", token_losses, EVERYWHERE, torch.float32),
    Case("group_decode, width 64", partial(decode, heads=(14, 2), depth=64)),
    Case("group_decode, width 128", partial(decode, heads=(28, 4), depth=128), ("gpu",)),
    Case("group_decode, width 256", partial(decode, heads=(8, 1), depth=256), ("gpu",)),
    Case("sample", draws, dtype=torch.float32),
    Case("sample, greedy", partial(draws, temperature=0), ("gpu",), torch.float32),
    Case("sample, top-k", partial(draws, top_k=20), dtype=torch.float32),
    Case("sample, top-p, min-p", partial(draws, top_p=0.9, min_p=0.01), dtype=torch.float32),
)


def modes_here() -> tuple[str, ...]:
    """Return where the cases run on this machine: on the GPU, or else on the CPU and in Triton's interpreter."""
    if HAS_TRITON and torch.cuda.is_available() and launch.runs_on(torch.device("cuda", 0)):
        return ("gpu",)
    return ("cpu", "interpreter") if HAS_TRITON else ("cpu",)
