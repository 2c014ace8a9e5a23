"""Every operation in plain PyTorch with full logits: the specification, and the oracle of the tests.

The code is simple: results of these functions and of autograd are right by definition. So this file imports nothing
that it checks. Results are fp32, or fp64 for fp64 inputs.

Shapes: N tokens, V vocabulary, D hidden, S sequences.
"""

import math
from typing import Any, NamedTuple

import torch


def _compute_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _linear(hidden, weight, bias, logit_softcap):
    dtype = _compute_dtype(hidden)
    logits = hidden.to(dtype) @ weight.to(dtype).T  # z = h W^T + b
    logits = logits if bias is None else logits + bias.to(dtype)
    return logits if logit_softcap is None else logit_softcap * torch.tanh(logits / logit_softcap)


def logits_logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute log-probs of `targets` under softmax(logits / temperature).

        logp = log p_t,   H = -sum_v p_v log p_v

    Args:
        logits: [N, V] floating point.
        targets: [N] int64 in [0, V).
        temperature: A float, or [N].
        return_entropy: Whether to return the entropy H too, in nats.

    Returns:
        logps [N], or (logps [N], entropy [N]).
    """
    logits = logits.to(_compute_dtype(logits))
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(logits.dtype)[:, None]
    all_logps = torch.log_softmax(logits / temperature, dim=-1)
    logps = all_logps.gather(-1, targets[:, None])[:, 0]
    if not return_entropy:
        return logps
    return logps, -(all_logps.exp() * all_logps).sum(-1)  # H = -sum_v p_v log p_v


def linear_logprob(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, bias: torch.Tensor | None = None,
    logit_softcap: float | None = None, temperature: float | torch.Tensor = 1.0, return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute log-probs of `targets` under softmax(softcap(hidden @ weight.T + bias) / temperature).

    Args:
        hidden: [N, D] floating point.
        weight: [V, D], the head.
        targets: [N] int64 in [0, V).
        bias: [V] or None.
        logit_softcap: The cap of softcap(x) = cap tanh(x / cap), as in Gemma 2 (arXiv 2408.00118), or None.
        temperature: A float, or [N].
        return_entropy: Whether to return the entropy too, in nats.

    Returns:
        logps [N], or (logps [N], entropy [N]).
    """
    logits = _linear(hidden, weight, bias, logit_softcap)
    return logits_logprob(logits, targets, temperature=temperature, return_entropy=return_entropy)


def _kept(logits, temperature, top_k, top_p, min_p):
    """Return the tokens that top-k, then top-p, then min-p keep: [R, V] bool. Equal logits are treated alike."""
    ordered = logits.sort(dim=-1, descending=True).values
    floor = ordered[:, -1:]
    if 0 < top_k < logits.shape[-1]:
        floor = ordered[:, top_k - 1 : top_k]
    if top_p < 1:
        probs = torch.softmax((ordered / temperature).masked_fill(ordered < floor, -torch.inf), dim=-1)
        likelier = probs.cumsum(-1) - probs
        dropped = (likelier >= top_p) | (probs == 0)
        dropped[:, 0] = False  # the likeliest token stays, also where top_p is 0 in fp32
        # Of equal logits, the first one (with the least mass before it) decides whether all of them are kept.
        floor = ordered.masked_fill(dropped, torch.inf).amin(-1, keepdim=True)
    if min_p > 0:
        floor = floor.maximum(ordered[:, :1] + temperature * math.log(min_p))
    return logits >= floor


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Draw one token for each lane by inverting the cumulative distribution in the order of the vocabulary.

    Args:
        logits: [R, V], one row per lane.
        uniforms: [R] in [0, 1).
        temperature: Temperature of the softmax; 0 is greedy.
        top_k: Number of likeliest tokens to keep; 0 is off.
        top_p: Keep a token while the mass of strictly likelier tokens, among those that top_k kept, is below this
            value; 1 is off.
        min_p: Minimum probability of a kept token, relative to the likeliest; 0 is off.

    Returns:
        tokens [R] int64, the first whose cumulative kept probability exceeds the uniform; logps [R], their log-probs
        under the full softmax at the temperature (at temperature 1 when greedy); and kept [R], the mass that the
        filters kept. If the softmax of a lane is undefined: 0, NaN and NaN.
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
    last = (torch.arange(logits.shape[-1], device=logits.device) * (probs > 0)).amax(-1)  # if rounding leaves none
    undefined = all_logps.isnan().any(-1)
    tokens = torch.where(drawn.any(-1), drawn.int().argmax(-1), last).masked_fill(undefined, 0)
    logps = all_logps.gather(-1, tokens[:, None])[:, 0]
    return tokens, logps.masked_fill(undefined, torch.nan), kept.masked_fill(undefined, torch.nan)


def group_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, prompt_keys: torch.Tensor,
    prompt_values: torch.Tensor, prompt_lengths: torch.Tensor, members: torch.Tensor, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attend from each lane to its prompt's keys and its own, with one softmax over both.

    Args:
        query: [R, H, d], one row per lane.
        keys: [slots >= R, K, C, d], the keys of each lane's own tokens.
        values: [slots >= R, K, C, d].
        lengths: [R] number of own tokens of each lane.
        prompt_keys: [P, K, T, d], the keys of each prompt.
        prompt_values: [P, K, T, d].
        prompt_lengths: [P] number of tokens of each prompt.
        members: [P, G], the lanes of each prompt, padded with -1.
        scale: Factor of the scores.

    Returns:
        [R, H, d] in the dtype of the query; zeros for a lane without any key.
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


def add_rms_norm(hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `added` [n, D] to `hidden` in place, and return the sum divided by its root mean square, times `weight`."""
    if added is not None:
        hidden += added
    x = hidden.to(_compute_dtype(hidden))
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)).to(hidden.dtype)


def rotate_and_store(
    packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    token_index: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Normalize and rotate the queries and keys of `packed` [n, H + 2K, d]; store keys and values; return the queries.

    The first and second half of each head are the two coordinates of d / 2 points, which are rotated by the angles of
    `cos` and `sin` [n, d]. The key and value of lane i are written to place token_index[i] of slot i, [slots, K, C, d].
    """
    k_heads = keys.shape[1]
    query, key, value = packed.split([packed.shape[1] - 2 * k_heads, k_heads, k_heads], dim=1)
    if norms is not None:
        query, key = (
            add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps).view_as(x)
            for x, weight in zip((query, key), norms, strict=True)
        )
    query, key = (torch.complex(*x.to(_compute_dtype(x)).contiguous().chunk(2, -1)) for x in (query, key))
    turn = torch.complex(*(x.to(query.real.dtype).chunk(2, -1)[0] for x in (cos, sin)))[:, None]
    query, key = (torch.cat([x.real, x.imag], -1).to(packed.dtype) for x in (query * turn, key * turn))
    for lane, token in enumerate(token_index.tolist()):
        keys[lane, :, token], values[lane, :, token] = key[lane], value[lane]
    return query


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """Return gate / (1 + exp(-gate)) * up of gate and up, side by side in `packed` [n, 2F]."""
    gate, up = packed.to(_compute_dtype(packed)).chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(packed.dtype)


class _Tokens(NamedTuple):
    """Inputs of a surrogate, [N] each. The ratio is at the objective's level, the log-ratio per token."""

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
    """s = -min(r A, clip(r) A), PPO (arXiv 1707.06347 eq. 7).

    The first r is clamped to at most delta (INTELLECT-2, arXiv 2505.07291 eq. 2).
    """
    ratio, advantages = tokens.ratio, tokens.advantages
    clipped = ratio.clamp(1 - objective.epsilon, 1 + objective.clip_high)
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    return -torch.min(bounded * advantages, clipped * advantages)


def _cispo(tokens, objective):
    """s = -sg(min(r, epsilon_high)) A logp (arXiv 2506.13585)."""
    return -tokens.ratio.clamp(max=objective.clip_high).detach() * tokens.advantages * tokens.logps


def _sapo(tokens, objective):
    """s = -4/tau sigmoid(tau (r - 1)) A (arXiv 2511.20347)."""
    gates = [
        torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
        for tau in (objective.sapo_temperature_pos, objective.sapo_temperature_neg)
    ]
    return -torch.where(tokens.advantages > 0, *gates) * tokens.advantages


def _vespo(tokens, objective):
    """s = -sg(phi(W)) A logp, phi(W) = e^lambda W^k e^(-lambda W), W the sequence's ratio (arXiv 2602.10693)."""
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

_KL = {  # estimators from d = ref - logp: http://joschu.net/blog/kl-approx.html
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
    "abs": lambda d: d.abs(),
}


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Compute the KL of the full distributions, with gradient only to the policy's logits.

        KL = sum_v p_v (log p_v - log q_v),   p of the policy, q of the reference

    Args:
        logits: [N, V] floating point, the policy's.
        ref_logits: [N, V] floating point, the reference's.
        temperature: A float, or [N].

    Returns:
        [N], in nats.
    """
    dtype = _compute_dtype(logits)
    divisor = temperature.to(dtype)[:, None] if isinstance(temperature, torch.Tensor) else temperature
    log_p, log_q = (torch.log_softmax(z.to(dtype) / divisor, dim=-1) for z in (logits, ref_logits.detach()))
    return (log_p.exp() * (log_p - log_q)).sum(-1)  # KL = sum_v p_v (log p_v - log q_v)


def importance_weights(
    old_logps: torch.Tensor, sampler_logps: torch.Tensor, objective: Any, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute I = exp(old - sampler) per token or per sequence, truncated to its bounds or set to 0 outside them.

    Args:
        old_logps: [N] log-probs under the policy that drew the tokens.
        sampler_logps: [N] log-probs that the sampler reported. NaN counts as log-ratio 0.
        objective: An Objective, with mode and bounds.
        lengths: [S] tokens of each sequence, needed by the sequence-level modes.

    Returns:
        I [N], without gradient.
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


def policy_loss(
    logps: torch.Tensor, old_logps: torch.Tensor | None, ref_logps: torch.Tensor | None, advantages: torch.Tensor,
    weights: torch.Tensor, objective: Any, lengths: torch.Tensor | None = None,
    sampler_logps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Compute the GRPO loss from log-probs.

        loss = sum_n w_n (I_n s_n + beta KL_n),   s_n the objective's surrogate

    Sources: clipped surrogate: PPO (arXiv 1707.06347 eq. 7) as in GRPO (arXiv 2402.03300 eq. 3); sequence-level ratios:
    GSPO (arXiv 2507.18071 eq. 7); KL estimators: http://joschu.net/blog/kl-approx.html, and their product with the
    ratio: DeepSeek-V3.2 (arXiv 2512.02556).

    Args:
        logps: [N] log-probs under the policy.
        old_logps: [N] log-probs under the policy that drew the tokens, or None if the ratio is exactly 1.
        ref_logps: [N] log-probs under the reference, or None if beta is 0 or kl is "full": `full_kl` needs logits.
        advantages: [N].
        weights: [N], with the mask and the whole aggregation.
        objective: A fastgrpo.Objective, or anything with its attributes.
        lengths: [S] tokens of each sequence, in order, needed if objective.couples_tokens.
        sampler_logps: [N] log-probs under the sampler, NaN where unknown, or None for no importance weights.

    Returns:
        The loss, a scalar; and metrics by name: `policy_loss`, the part of the loss without the KL, and the mean over
        the tokens of `kl`, `ratio/mean`, `ratio/max`, `clip_ratio/low_mean` and `clip_ratio/high_mean`.
    """
    old_logps = logps.detach() if old_logps is None else old_logps
    log_ratio = ratio = logps - old_logps
    if objective.importance_sampling_level == "sequence":  # the geometric mean of the sequence's ratios (GSPO)
        ratio = _per_sequence(log_ratio, lengths, torch.mean)
    ratio = ratio.exp()
    importance = None if sampler_logps is None else importance_weights(old_logps, sampler_logps, objective, lengths)
    tokens = _Tokens(logps, log_ratio, ratio, advantages, importance, lengths)
    surrogate = _SURROGATES[objective.surrogate](tokens, objective)
    if importance is not None and objective.surrogate != "vespo":  # vespo includes it in W
        surrogate = importance * surrogate
    kl = torch.zeros_like(logps)
    if objective.beta != 0 and objective.kl in _KL:
        kl = _KL[objective.kl](ref_logps - logps)
        if objective.use_bias_correction_kl:  # arXiv 2512.02556
            kl = kl * ratio
    loss = (weights * (surrogate + objective.beta * kl)).sum()  # sum_n w_n (I_n s_n + beta KL_n)
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


def logits_grpo_loss(
    logits: torch.Tensor, targets: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, objective: Any, *,
    old_logps: torch.Tensor | None = None, ref_logps: torch.Tensor | None = None,
    sampler_logps: torch.Tensor | None = None, lengths: torch.Tensor | None = None,
    entropy_weights: torch.Tensor | None = None, temperature: float | torch.Tensor = 1.0,
    ref_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Compute the loss from logits: `policy_loss` of `logits_logprob`, with the full KL, less the entropy bonus.

        loss = sum_n w_n (I_n s_n + beta KL_n) - sum_n entropy_weights_n H_n

    Args:
        logits: [N, V].
        targets: [N] int64 in [0, V).
        advantages: [N].
        weights: [N].
        objective: As in `policy_loss`.
        old_logps: [N] or None.
        ref_logps: [N] or None.
        sampler_logps: [N] or None.
        lengths: [S] or None.
        entropy_weights: [N], including the coefficient, or None for no bonus.
        temperature: A float, or [N].
        ref_logits: [N, V] the reference's, if objective.kl is "full"; else None.

    Returns:
        The loss, a scalar; the log-probs [N]; and the metrics of `policy_loss`, with the mean `entropy` if there is a
        bonus.
    """
    logps, entropy = logits_logprob(logits, targets, temperature=temperature, return_entropy=True)
    loss, metrics = policy_loss(logps, old_logps, ref_logps, advantages, weights, objective, lengths, sampler_logps)
    if ref_logits is not None:
        kl = full_kl(logits, ref_logits, temperature=temperature)
        loss = loss + (weights * objective.beta * kl).sum()
        metrics["kl"] = kl.detach().mean()
    if entropy_weights is not None:
        loss = loss - (entropy_weights * entropy).sum()
        metrics["entropy"] = entropy.detach().mean()
    return loss, logps.detach(), metrics


def linear_grpo_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor,
    objective: Any, *, bias: torch.Tensor | None = None, logit_softcap: float | None = None,
    ref_hidden: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None, **per_row: torch.Tensor | float | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Compute the loss of a language-model head: its logits, then `logits_grpo_loss`.

    Args:
        hidden: [N, D].
        weight: [V, D].
        targets: [N] int64 in [0, V).
        advantages: [N].
        weights: [N].
        objective: As in `policy_loss`.
        bias: [V] or None.
        logit_softcap: As in `linear_logprob`, also for the reference's logits.
        ref_hidden: [N, R] the reference's hidden states, if objective.kl is "full"; else None.
        ref_weight: [V, R] the reference's head, or None.
        ref_bias: [V] or None.
        per_row: Keyword arguments of `logits_grpo_loss`.

    Returns:
        As `logits_grpo_loss`.
    """
    logits = _linear(hidden, weight, bias, logit_softcap)
    if ref_hidden is not None:
        per_row["ref_logits"] = _linear(ref_hidden, ref_weight, ref_bias, logit_softcap)
    return logits_grpo_loss(logits, targets, advantages, weights, objective, **per_row)
