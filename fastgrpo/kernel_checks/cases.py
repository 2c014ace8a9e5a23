"""The trials of `python -m fastgrpo.doctor --check`: random inputs, values of a kernel, and their comparison.

The truth is kernels/reference.py in fp64, differentiated by autograd. "Plain" is PyTorch in the inputs' dtype with fp32
logits and fp32 accumulation; the logits' gradient is rounded to the inputs' dtype. The error of a kernel may be
`FACTORS` times the error of plain, plus `SLACK`. Losses are called as users call them, with the backend of the mode.
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
    from fastgrpo.kernels import launch, layer
    from fastgrpo.kernels.decode import group_decode
    from fastgrpo.kernels.sampling import sample

Tensor = torch.Tensor
Tensors = dict[str, torch.Tensor]
Errors = dict[str, tuple[float, float]]  # by name: an error and its limit
LossOf = Callable[[torch.Tensor], Tensors]  # logits -> the "loss" and other values by name
SLACK = 1e-5
BACKEND = {"gpu": "triton", "cpu": "chunked", "interpreter": "triton"}  # mode -> backend
FACTORS = {"logps": 1.1, "entropy": 1.1, "loss": 1.1, "hidden": 1.1, "logits": 1.1, "weight": 1.5, "bias": 1.5,
           "output": 1.2}  # fmt: skip
HEAD_SIZES = {"gpu": (1024, 896, 32_003), "cpu": (64, 32, 500), "interpreter": (40, 16, 70)}  # N, D, V
NEAR = 1e-5  # distance to the boundary of a draw or filter, where rounding may change the token
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


class Trial(NamedTuple):
    """A call of a kernel, and the check of its result."""

    ours: Callable[[], Any]
    judge: Callable[[Any], Errors]


class Case(NamedTuple):
    """A line of the table, with its dtype on a GPU. On other devices the dtype is fp32."""

    name: str
    make: Callable[[str, torch.dtype], Trial]
    modes: tuple[str, ...] = ("gpu", "interpreter")
    dtype: torch.dtype = torch.bfloat16

    def trial(self, mode: str) -> Trial:
        """Draw the inputs."""
        torch.manual_seed(0)
        with torch.device("cuda" if mode == "gpu" else "cpu"):
            return self.make(mode, self.dtype if mode == "gpu" else torch.float)


def error(name: str, value: Tensor, true: Tensor) -> float:
    """Return max |value - true| / max(|true|, 1) for log-probs, entropies and losses, else the relative error norm."""
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


def random_head(n, d, v, dtype, *, bias=False, temperature=1.0, softcap=None) -> tuple[Tensors, dict[str, Any]]:
    """Draw the head's leaves, and the arguments of each token; half of the targets are the most likely token."""
    leaves = {"hidden": torch.randn(n, d).to(dtype), "weight": (torch.randn(v, d) * 2 / d**0.5).to(dtype)}
    leaves |= {"bias": torch.randn(v).to(dtype)} if bias else {}
    targets = torch.randint(v, (n,))
    targets[::2] = (leaves["hidden"][::2].float() @ leaves["weight"].float().T).argmax(-1)
    temperature = torch.rand(n) + 0.5 if temperature == "row" else temperature
    in_fp64 = {name: leaf.double() for name, leaf in leaves.items()}
    logps = reference.linear_logprob(**in_fp64, targets=targets, temperature=temperature, logit_softcap=softcap).float()
    tokens = {"targets": targets, "temperature": temperature, "advantages": torch.randn(n)}
    tokens |= {"token_weights": torch.rand(n) / n, "old_logps": logps + 0.3 * torch.randn(n)}
    tokens["ref_logps"] = logps + 0.3 * torch.randn(n)
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, tokens


def exact(leaves: Tensors, softcap: float | None, loss_of: LossOf) -> Tensors:
    """Compute the truth of a head: its values and gradients in fp64."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    found = loss_of(reference._linear(leaves["hidden"], leaves["weight"], leaves.get("bias"), softcap))
    return found | gradients(found["loss"], leaves)


def plain(leaves: Tensors, softcap: float | None, loss_of: LossOf) -> Tensors:
    """Compute the same in the inputs' dtype with fp32 logits."""
    hidden, weight = leaves["hidden"].detach(), leaves["weight"].detach()

    def matmul(left, right):  # on a GPU with tensor cores, like the kernels
        if left.is_cuda and left.dtype != torch.float32:
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()

    x = matmul(hidden, weight.T).requires_grad_()
    y = x + leaves["bias"].detach().float() if "bias" in leaves else x
    found = loss_of(y if softcap is None else softcap * torch.tanh(y / softcap))
    dz = torch.autograd.grad(found["loss"], x)[0].to(hidden.dtype)
    grads = {"hidden": matmul(dz, weight), "weight": matmul(dz.T, hidden), "bias": dz.float().sum(0)}
    return found | {name: grads[name].to(hidden.dtype) for name in leaves}


def head_trial(leaves: Tensors, softcap: float | None, ours: Callable[[], Tensors], loss_of: LossOf) -> Trial:
    """Make the trial of a head, whose loss is `loss_of` of its logits."""
    return Trial(ours, lambda found: judge(found, exact(leaves, softcap, loss_of), plain(leaves, softcap, loss_of)))


def states_trial(states: Tensor, ours: LossOf, reference_of: LossOf) -> Trial:
    """Make the trial of the losses of logits or log-probs; each loss has a gradient. Plain is the reference in fp32."""

    def run(loss_of: LossOf, dtype: torch.dtype) -> Tensors:
        leaf = states.clone().to(dtype).requires_grad_()
        found, kind = loss_of(leaf), dtype if dtype == torch.double else states.dtype
        grads = {name: torch.autograd.grad(found[name], leaf)[0] for name in found if name.endswith("loss")}
        return found | {name.replace("loss", "logits"): grad.to(kind) for name, grad in grads.items()}

    true, simple = (partial(run, reference_of, dtype) for dtype in (torch.double, torch.float))
    return Trial(lambda: run(ours, states.dtype), lambda found: judge(found, true(), simple()))


def loss_of_logits(logits: Tensor, *, token_weights: Tensor, **tokens: Any) -> Tensors:
    """Compute the GRPO loss by the reference."""
    loss, logps, _ = reference.logits_grpo_loss(logits, weights=token_weights, **tokens)
    return {"loss": loss, "logps": logps}


def fused_loss(mode, dtype, *, objective=DAPO, sharded=False, sizes=HEAD_SIZES, softcap=None, **options) -> Trial:
    """Make the trial of the fused loss, `sharded` over a group with one process."""
    leaves, tokens = random_head(*sizes[mode], dtype, softcap=softcap, **options)
    tokens["objective"] = objective
    if objective.entropy_coef:
        tokens["entropy_weights"] = 0.3 * tokens["token_weights"]
    if sharded and not dist.is_initialized():
        dist.init_process_group("nccl" if mode == "gpu" else "gloo", store=dist.HashStore(), rank=0, world_size=1)

    def ours() -> Tensors:
        group = dist.group.WORLD if sharded else None
        out = linear_grpo_loss(**leaves, **tokens, logit_softcap=softcap, process_group=group, backend=BACKEND[mode])
        return {"loss": out.loss, "logps": out.logps, **gradients(out.loss, leaves)}

    return head_trial(leaves, softcap, ours, partial(loss_of_logits, **tokens))


def logprob(mode, dtype, *, entropy=True, flagged=False, softcap=None, **options) -> Trial:
    """Make the trial of the log-probs; `flagged` rows need another anchor than their target."""
    leaves, tokens = random_head(*HEAD_SIZES[mode], dtype, softcap=softcap, **options)
    by = {"targets": tokens["targets"], "temperature": tokens["temperature"], "return_entropy": entropy}
    if flagged:
        with torch.no_grad():
            leaves["hidden"][::7] *= 20.0
            by["targets"][::7] = (leaves["hidden"][::7].float() @ leaves["weight"].float().T).argmin(-1)

    def with_loss(found: Any) -> Tensors:  # the log-probs and entropies, each weighted at random
        values = dict(zip(("logps", "entropy"), found if entropy else (found,), strict=False))
        factors = (tokens["advantages"], tokens["old_logps"])
        return values | {"loss": sum((x * y).sum() for x, y in zip(values.values(), factors, strict=False))}

    def ours() -> Tensors:
        found = with_loss(linear_logprob(**leaves, **by, logit_softcap=softcap, backend=BACKEND[mode]))
        return gradients(found.pop("loss"), leaves) | found

    return head_trial(leaves, softcap, ours, lambda logits: with_loss(reference.logits_logprob(logits, **by)))


def logits_loss(mode, dtype, *, inplace=False) -> Trial:
    """Make the trial of the loss of given logits."""
    leaves, tokens = random_head(*HEAD_SIZES[mode], dtype)
    tokens["objective"] = DAPO

    def ours(leaf: Tensor) -> Tensors:
        out = logits_grpo_loss(leaf, **tokens, inplace=inplace, backend=BACKEND[mode])
        return {"loss": out.loss, "logps": out.logps}

    logits = (leaves["hidden"] @ leaves["weight"].T).detach()
    return states_trial(logits, ours, partial(loss_of_logits, **tokens))


def token_losses(mode, dtype) -> Trial:
    """Make the trial of the loss of given log-probs, with every surrogate."""
    n = 5000  # long sequences: vespo amplifies an error of their sums
    _, tokens = random_head(n, 8, 50, torch.float)
    old, ref, advantages, weights = (tokens[k] for k in ("old_logps", "ref_logps", "advantages", "token_weights"))
    ends = torch.tensor([0, n // 7, n // 7 + n // 3, n])

    def ours(leaf, objective, sampler):
        kwargs = {"token_weights": weights, "ref_logps": ref, "sampler_logps": sampler, "cu_seqlens": ends}
        return grpo_loss(leaf, old, advantages, objective=objective, backend=BACKEND[mode], **kwargs).loss

    def by_reference(leaf, objective, sampler):
        return reference.policy_loss(leaf, old, ref, advantages, weights, objective, ends.diff(), sampler)[0]

    def each(loss_of, leaf):
        return {f"{k} loss": loss_of(leaf, x, ref if k == "vespo" else None) for k, x in SURROGATES.items()}

    return states_trial(old + 0.3 * torch.randn_like(old), partial(each, ours), partial(each, by_reference))


def decode(mode, dtype, heads, depth) -> Trial:
    """Make the trial of one decode step's attention: ragged lanes, the first of them without a prompt."""
    prompts, group, shared, most = (4, 8, 600, 300) if mode == "gpu" else (2, 3, 20, 9)
    lanes = prompts * group
    randn = partial(torch.randn, dtype=dtype)
    members = torch.arange(lanes, dtype=torch.int32).view(prompts, group)
    members[0, 0] = -1
    case = {"query": randn(lanes, heads[0], depth), "members": members, "scale": depth**-0.5}
    case |= {name: randn(lanes, heads[1], most, depth) for name in ("keys", "values")}
    case |= {name: randn(prompts, heads[1], shared, depth) for name in ("prompt_keys", "prompt_values")}
    case["lengths"] = torch.randint(1, most + 1, (lanes,), dtype=torch.int32)
    case["prompt_lengths"] = torch.full((prompts,), shared, dtype=torch.int32)

    def attend(lane: int) -> Tensor:  # by PyTorch's own attention, in the dtype of the case
        own, prompt = slice(case["lengths"][lane].item()), slice(shared if lane else 0)
        keys, values = (
            torch.cat([case[f"prompt_{name}"][lane // group, :, prompt], case[name][lane, :, own]], dim=1)[None]
            for name in ("keys", "values")
        )
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(case["query"][lane, None, :, None], keys, values, enable_gqa=True)[0, :, 0]

    def judged(found: Tensor) -> Errors:
        in_fp64 = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.items()}
        simple = torch.stack([attend(lane) for lane in range(lanes)])
        return judge({"output": found}, {"output": reference.group_decode(**in_fp64)}, {"output": simple})

    return Trial(lambda: group_decode(**case), judged)


def decode_layer(mode, dtype) -> Trial:
    """Make the trial of the small operations of a decode step's layer, with Qwen3's norms of queries and keys."""
    lanes, heads, kv, depth, tokens = (64, 14, 2, 64, 9) if mode == "gpu" else (3, 4, 2, 16, 5)
    randn = partial(torch.randn, dtype=dtype)
    angles = torch.randn(lanes, depth // 2).repeat(1, 2)
    case = {"hidden": randn(lanes, 896), "added": randn(lanes, 896), "weight": randn(896), "mlp": randn(lanes, 280)}
    case |= {
        "packed": randn(lanes, heads + 2 * kv, depth),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
    }
    case |= {name: torch.zeros(lanes, kv, tokens, depth, dtype=dtype) for name in ("keys", "values")}
    case |= {name: randn(depth) for name in ("q_norm", "k_norm")}
    at = torch.arange(lanes) % tokens

    def computed(by: Any, of: Tensors) -> Tensor:
        """Return all results in one vector."""
        of = {name: value.clone() for name, value in of.items()}
        normed = by.add_rms_norm(of["hidden"], of["added"], of["weight"], 1e-6)
        slots = of["keys"], of["values"]
        norms = of["q_norm"], of["k_norm"]
        queries = by.rotate_and_store(of["packed"], of["cos"], of["sin"], *slots, at, norms, 1e-6)
        return torch.cat([x.flatten() for x in (of["hidden"], normed, queries, *slots, by.silu_mul(of["mlp"]))])

    def judged(found: Tensor) -> Errors:
        true = computed(reference, {name: value.double() for name, value in case.items()})
        return judge({"output": found}, {"output": true}, {"output": computed(_Plain, case)})

    return Trial(lambda: computed(layer, case), judged)


class _Plain:
    """The operations of `decode_layer` as transformers computes them, with its roundings."""

    @staticmethod
    def add_rms_norm(hidden, added, weight, eps):
        hidden += 0 if added is None else added
        x = hidden.float()
        return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()).to(hidden.dtype) * weight

    @staticmethod
    def rotate_and_store(packed, cos, sin, keys, values, at, norms, eps):
        parts = list(packed.split([packed.shape[1] - 2 * keys.shape[1], *[keys.shape[1]] * 2], dim=1))
        for i, weight in enumerate(norms):
            x = _Plain.add_rms_norm(parts[i].clone(), None, weight, eps)
            first, second = x.chunk(2, -1)
            parts[i] = x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
        keys[range(len(at)), :, at], values[range(len(at)), :, at] = parts[1:]
        return parts[0]

    @staticmethod
    def silu_mul(packed):
        gate, up = packed.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def draws(mode, dtype, temperature=0.8, **filters) -> Trial:
    """Make the trial of drawing a token for each lane.

    The reference draws with slightly smaller and greater uniforms and filters; a result between them is right.
    """
    logits = torch.randn((64, 151_936) if mode == "gpu" else (5, 150)) * 2.5
    uniforms = torch.rand(len(logits))

    def judged(drawn: tuple[Tensor, Tensor, Tensor]) -> Errors:
        tokens, logps, kept = drawn
        true = reference.logits_logprob(logits.double(), tokens, temperature=temperature or 1)
        near = []
        for move, change in product((-NEAR, NEAR), repeat=2):
            moved = {name: value if name == "top_k" else value * (1 + change) for name, value in filters.items()}
            near.append(reference.sample(logits.double(), uniforms.double() + move, temperature=temperature, **moved))
        all_tokens, _, all_kept = map(torch.stack, zip(*near, strict=True))
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
    Case("linear_grpo_loss, chunks", partial(fused_loss, sizes={"gpu": (9000, 128, 4099)}), ("gpu",)),
    Case("linear_grpo_loss, bias, soft-cap", partial(fused_loss, **EVERYTHING), EVERYWHERE),
    Case("linear_grpo_loss, entropy bonus", partial(fused_loss, objective=BONUS)),
    Case("linear_grpo_loss, recomputed", partial(fused_loss, objective=BONUS, softcap=5.0)),
    Case("linear_grpo_loss, sharded", partial(fused_loss, sharded=True)),
    Case("linear_logprob, entropy", logprob, EVERYWHERE),
    Case("linear_logprob, bias, soft-cap", partial(logprob, **EVERYTHING)),
    Case("linear_logprob, unlikely targets", partial(logprob, entropy=False, flagged=True)),
    Case("linear_logprob, unlikely, entropy", partial(logprob, flagged=True)),
    Case("logits_grpo_loss", logits_loss, EVERYWHERE),
    Case("logits_grpo_loss, in place", partial(logits_loss, inplace=True)),
    Case("grpo_loss", token_losses, EVERYWHERE, torch.float32),
    Case("group_decode, width 64", partial(decode, heads=(14, 2), depth=64)),
    Case("group_decode, width 128", partial(decode, heads=(28, 4), depth=128), ("gpu",)),
    Case("group_decode, width 256", partial(decode, heads=(8, 1), depth=256), ("gpu",)),
    Case("layer of a decode step", decode_layer),
    Case("sample", draws, dtype=torch.float32),
    Case("sample, greedy", partial(draws, temperature=0), ("gpu",), torch.float32),
    Case("sample, top-k", partial(draws, top_k=20), dtype=torch.float32),
    Case("sample, top-p, min-p", partial(draws, top_p=0.9, min_p=0.01), dtype=torch.float32),
)


def modes_here() -> tuple[str, ...]:
    """Return the modes of this machine: the GPU, or the CPU and Triton's interpreter."""
    if HAS_TRITON and torch.cuda.is_available() and launch.runs_on(torch.device("cuda", 0)):
        return ("gpu",)
    return ("cpu", "interpreter") if HAS_TRITON else ("cpu",)
