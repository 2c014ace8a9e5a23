"""Every operation in plain PyTorch with full logits: the specification, and the oracle of the tests.

Shapes: N rows (tokens), V vocabulary, D hidden, S sequences. No cleverness here: whatever these functions and autograd
return is right by definition. Results are fp32, or fp64 where the inputs are fp64 (for gradcheck).
"""

import math
from typing import NamedTuple

import torch


def _compute_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _linear(hidden, weight, bias, logit_softcap):
    dtype = _compute_dtype(hidden)
    logits = hidden.to(dtype) @ weight.to(dtype).T  # z = h W^T + b
    if bias is not None:
        logits = logits + bias.to(dtype)
    return logits if logit_softcap is None else logit_softcap * torch.tanh(logits / logit_softcap)


def logits_logprob(logits, targets, *, temperature=1.0, return_entropy=False):
    """Log-probability of `targets` [N] under softmax(logits [N, V] / temperature); see linear_logprob."""
    logits = logits.to(_compute_dtype(logits))
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(logits.dtype)[:, None]
    all_logps = torch.log_softmax(logits / temperature, dim=-1)
    logps = all_logps.gather(-1, targets[:, None])[:, 0]
    if not return_entropy:
        return logps
    return logps, -(all_logps.exp() * all_logps).sum(-1)  # H = -sum_v p_v log p_v


def linear_logprob(hidden, weight, targets, *, bias=None, logit_softcap=None, temperature=1.0, return_entropy=False):
    """Log-probability of `targets` under softmax(softcap(hidden @ weight.T + bias) / temperature).

    Args:
        hidden: [N, D] floating point. weight: [V, D]. targets: [N] int64 in [0, V). bias: [V] or None.
        logit_softcap: float or None; softcap(x) = cap tanh(x / cap), as in Gemma 2 (arXiv 2408.00118).
        temperature: float, or tensor [N].
        return_entropy: also return the entropy of each row, in nats.

    Returns:
        logps [N], or (logps [N], entropy [N]).
    """
    logits = _linear(hidden, weight, bias, logit_softcap)
    return logits_logprob(logits, targets, temperature=temperature, return_entropy=return_entropy)


def _kept(logits, temperature, top_k, top_p, min_p):
    """[R, V] bool: what top-k, then top-p, then min-p keep. Each is a threshold: equal logits stay or go together."""
    ordered = logits.sort(dim=-1, descending=True).values
    floor = ordered[:, -1:]
    if 0 < top_k < logits.shape[-1]:
        floor = ordered[:, top_k - 1 : top_k]
    if top_p < 1:
        probs = torch.softmax((ordered / temperature).masked_fill(ordered < floor, -torch.inf), dim=-1)
        likelier = probs.cumsum(-1) - probs
        # of equal ones the first decides for all; it comes before them, and what it has above it is least
        floor = ordered.masked_fill((likelier >= top_p) | (probs == 0), torch.inf).amin(-1, keepdim=True)
    if min_p > 0:
        floor = floor.maximum(ordered[:, :1] + temperature * math.log(min_p))
    return logits >= floor


def sample(logits, uniforms, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Draw one token a row by inverting the cumulative distribution in the order of the vocabulary.

    Args:
        logits: [R, V]. uniforms: [R] in [0, 1). temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off; a token
            stays while the mass of the strictly likelier ones, of what top_k kept, is below it. min_p: least
            probability relative to the likeliest.

    Returns:
        tokens [R] int64: the first whose cumulative kept probability exceeds the uniform. logps [R]: their log-probs
        under the full softmax at the temperature (1 when greedy). kept [R]: the mass that the filters kept. A row whose
        softmax is undefined gives 0, NaN, NaN.
    """
    logits = logits.to(_compute_dtype(logits))
    if temperature == 0:
        probs = torch.ones_like(logits).masked_fill(logits < logits.amax(-1, keepdim=True), 0)
        uniforms, kept = torch.zeros_like(uniforms), torch.ones_like(uniforms)
        all_logps = torch.log_softmax(logits, dim=-1)
    else:
        all_logps = torch.log_softmax(logits / temperature, dim=-1)
        probs = all_logps.exp().masked_fill(~_kept(logits, temperature, top_k, top_p, min_p), 0)
        kept = probs.sum(-1)
    cumulative = probs.cumsum(-1)
    drawn = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (probs > 0)
    last = (torch.arange(logits.shape[-1], device=logits.device) * (probs > 0)).amax(-1)  # where rounding left none
    undefined = all_logps.isnan().any(-1)
    tokens = torch.where(drawn.any(-1), drawn.int().argmax(-1), last).masked_fill(undefined, 0)
    logps = all_logps.gather(-1, tokens[:, None])[:, 0]
    return tokens, logps.masked_fill(undefined, torch.nan), kept.masked_fill(undefined, torch.nan)


def group_decode(query, keys, values, lengths, prompt_keys, prompt_values, prompt_lengths, members, *, scale,
                 max_length=None, max_prompt_length=None):  # fmt: skip
    """Attention of each lane to its prompt's keys and its own, one softmax over both.

    Args:
        query: [R, H, d]. keys, values: [slots >= R, K, C, d], lengths: [R]. prompt_keys, prompt_values: [P, K, T, d],
            prompt_lengths: [P]. members: [P, G], the lanes of each prompt, -1 where there is none. scale: of the
            scores. max_length, max_prompt_length: of no consequence.

    Returns:
        out [R, H, d]: zeros for a lane without any key.
    """
    dtype, repeats = _compute_dtype(query), query.shape[1] // keys.shape[1]
    prompt_of = {lane: prompt for prompt, row in enumerate(members.tolist()) for lane in row if lane >= 0}
    out = torch.zeros_like(query, dtype=dtype)
    for lane, length in enumerate(lengths.tolist()):
        k, v = keys[lane, :, :length], values[lane, :, :length]
        if lane in prompt_of:
            prompt = prompt_of[lane]
            shared = slice(prompt_lengths[prompt].item())
            k = torch.cat([prompt_keys[prompt, :, shared], k], dim=1)
            v = torch.cat([prompt_values[prompt, :, shared], v], dim=1)
        k, v = (x.to(dtype).repeat_interleave(repeats, dim=0) for x in (k, v))
        scores = scale * (k @ query[lane].to(dtype)[:, :, None])[:, :, 0]
        out[lane] = (torch.softmax(scores, dim=-1)[:, None] @ v)[:, 0]
    return out.to(query.dtype)


class _Tokens(NamedTuple):
    """What a surrogate reads, [N] each: ratio is at the objective's level, log_ratio per token; importance or None."""

    logps: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    importance: torch.Tensor | None
    lengths: torch.Tensor | None


def _per_sequence(values, lengths, reduce):
    pieces = [piece for piece in values.split(lengths.tolist()) if len(piece)]
    return torch.cat([reduce(piece).expand(len(piece)) for piece in pieces] or [values])


def _clip(tokens, objective):
    """-min(r A, clip(r) A)."""
    ratio, advantages = tokens.ratio, tokens.advantages
    clipped = ratio.clamp(1 - objective.epsilon, 1 + objective.epsilon_high)
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    return -torch.min(bounded * advantages, clipped * advantages)


def _cispo(tokens, objective):
    """-sg(min(r, epsilon_high)) A logp."""
    return -tokens.ratio.clamp(max=objective.epsilon_high).detach() * tokens.advantages * tokens.logps


def _sapo(tokens, objective):
    """-4/tau sigmoid(tau (r - 1)) A."""
    gates = [
        torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
        for tau in (objective.sapo_temperature_pos, objective.sapo_temperature_neg)
    ]
    return -torch.where(tokens.advantages > 0, *gates) * tokens.advantages


def _vespo(tokens, objective):
    """-sg(phi(W)) A logp, phi(W) = e^lambda W^k e^(-lambda W), W the product of the ratios of a sequence."""
    log_w = _per_sequence(tokens.log_ratio.clamp(-20, 20), tokens.lengths, torch.sum)
    if tokens.importance is not None:
        log_w = log_w + _per_sequence(tokens.importance.log().clamp(math.log(1e-8), 20), tokens.lengths, torch.sum)
    log_w = log_w.clamp(math.log(1e-8), 20)
    phi_pos, phi_neg = (
        (rate + k * log_w - rate * log_w.exp()).exp()
        for k, rate in (
            (objective.vespo_k_pos, objective.vespo_lambda_pos),
            (objective.vespo_k_neg, objective.vespo_lambda_neg),
        )
    )
    phi = torch.where(tokens.advantages >= 0, phi_pos, phi_neg)
    return -phi.detach() * tokens.advantages * tokens.logps


_SURROGATES = {"clip": _clip, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}

_KL = {  # of d = ref - logp
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
    "abs": lambda d: d.abs(),
}


def importance_weights(old_logps, sampler_logps, objective, lengths=None):
    """I [N] = exp(old - sampler), of the token or of its whole sequence, truncated to the bounds or 0 outside of them.

    The bounds are objective.importance_sampling_clip_min and _max (None: unbounded). NaN in sampler_logps: log-ratio 0.
    """
    log_ratio = (old_logps - sampler_logps).detach()
    log_ratio = log_ratio.masked_fill(log_ratio.isnan(), 0)
    mode, low, high = objective.importance_sampling_mode, *objective.importance_bounds
    if mode.startswith("sequence"):
        log_ratio = _per_sequence(log_ratio, lengths, torch.sum)
    importance = log_ratio.exp()
    if mode.endswith("truncate"):
        return importance.clamp(low, high)
    return importance.masked_fill((importance < low) | (importance > high), 0)


def policy_loss(logps, old_logps, ref_logps, advantages, weights, objective, lengths=None, sampler_logps=None):
    """The GRPO loss from log-probabilities: sum_n w_n (I_n s_n + beta KL_n), s_n the objective's surrogate.

    Sources: the clipped surrogate, PPO (arXiv 1707.06347 eq. 7) as used by GRPO (arXiv 2402.03300 eq. 3); the upper
    bound `delta` on the ratio, INTELLECT-2 (arXiv 2505.07291 eq. 2); sequence-level ratios, GSPO (arXiv 2507.18071
    eq. 7); cispo, arXiv 2506.13585; sapo, arXiv 2511.20347; vespo, arXiv 2602.10693; the KL estimators k1, k2, k3,
    http://joschu.net/blog/kl-approx.html, times the ratio, DeepSeek-V3.2 (arXiv 2512.02556).

    Args:
        logps, advantages, weights: [N]; the weights carry the mask and the whole aggregation.
        old_logps: [N], or None for the first update of a rollout, where the ratio is exactly 1.
        ref_logps: [N], or None where objective.beta is 0.
        objective: a fastgrpo.Objective, or anything with its attributes.
        lengths: [S] rows of each sequence, in order; needed where objective.couples_tokens.
        sampler_logps: [N] log-probs under the sampler, NaN where unknown, or None: no importance weights.

    Returns:
        (loss scalar, metrics): the mean over the rows of `kl`, `ratio/mean`, `ratio/max`, `clip_ratio/low_mean`,
        `clip_ratio/high_mean`, and `policy_loss`, the part of the loss without the KL.
    """
    old_logps = logps.detach() if old_logps is None else old_logps
    log_ratio = ratio = logps - old_logps
    if objective.importance_sampling_level == "sequence":
        ratio = _per_sequence(log_ratio, lengths, torch.mean)
    ratio = ratio.exp()
    importance = None
    if sampler_logps is not None:
        importance = importance_weights(old_logps, sampler_logps, objective, lengths)
    tokens = _Tokens(logps, log_ratio, ratio, advantages, importance, lengths)
    surrogate = _SURROGATES[objective.surrogate](tokens, objective)
    if importance is not None and objective.surrogate != "vespo":  # which has it inside of W
        surrogate = importance * surrogate
    kl = torch.zeros_like(logps)
    if objective.beta != 0:
        kl = _KL[objective.kl](ref_logps - logps)
        if objective.use_bias_correction_kl:
            kl = kl * ratio
    loss = (weights * (surrogate + objective.beta * kl)).sum()
    low, high = objective.ratio_bounds
    metrics = {
        "policy_loss": (weights * surrogate).sum(),
        "kl": kl.mean(),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "clip_ratio/low_mean": ((ratio < low) & (advantages < 0)).float().mean(),
        "clip_ratio/high_mean": ((ratio > high) & (advantages > 0)).float().mean(),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def logits_grpo_loss(logits, targets, advantages, weights, objective, *, old_logps=None, ref_logps=None,
                     sampler_logps=None, lengths=None, entropy_weights=None, temperature=1.0):  # fmt: skip
    """policy_loss of logits_logprob, less the entropy bonus sum_n entropy_weights_n H_n ([N], coefficient included).

    logits: [N, V]; the rest as above. Returns (loss, logps [N], metrics).
    """
    logps, entropy = logits_logprob(logits, targets, temperature=temperature, return_entropy=True)
    loss, metrics = policy_loss(logps, old_logps, ref_logps, advantages, weights, objective, lengths, sampler_logps)
    if entropy_weights is not None:
        loss = loss - (entropy_weights * entropy).sum()
        metrics["entropy"] = entropy.detach().mean()
    return loss, logps.detach(), metrics


def linear_grpo_loss(hidden, weight, targets, advantages, weights, objective, *, bias=None, logit_softcap=None,
                     **per_row):  # fmt: skip
    """The head, then logits_grpo_loss: hidden [N, D] x weight [V, D] -> (loss, logps [N], metrics)."""
    logits = _linear(hidden, weight, bias, logit_softcap)
    return logits_grpo_loss(logits, targets, advantages, weights, objective, **per_row)
