"""Draw a token from each row of logits, with its log-prob and the probability mass that the filters kept.

    p_v = exp((z_v - max z) / T) / S,   S = sum_v exp((z_v - max z) / T)
    token = the first one whose cumulative kept probability exceeds u

Without a filter there are two launches and one pass over the logits. `_tile_sums_kernel` computes the maximum and the
sum of every (row, tile of the vocabulary). `_draw_kernel`, one program per row, selects a tile by these sums, and reads
this tile again to select the token.

A filter keeps the logits at or above a floor, so equal logits are kept or removed together. The floor of min-p is
max z + T log(min_p). `least_kept` computes the floors of top-k and top-p with torch's topk and sort. Then
`_kept_sums_kernel` sums the kept part of every (row, tile) in one more pass, and the draw uses these sums. There is no
sync, and the launches do not depend on the data.

Shapes: R rows of logits, V vocabulary. All arithmetic is fp32. The order of sums does not depend on R, so a row draws
the same token in any batch.
"""

import math

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch
from fastgrpo.kernels.launch import LN2, LOG2E

LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
UNIT = 2.0**44  # integer mass of the likeliest token; the masses of 2**18 tokens are below 2**63
SORTED_ROWS = 64  # rows of logits that top-p sorts at a time, because a sort needs about 30 bytes per logit


@triton.jit
def token_mass(z, top, scale):
    """Return exp((z - top) / T), which is exactly 1 at z = top.

    The subtraction comes before the product, so that a fused multiply-add cannot change it.
    """
    return tl.exp2((z - top) * scale)


@triton.jit
def load_tile(z_ptr, tile, vocab, TILE: tl.constexpr):
    """Return the columns and the logits of one tile of a row; the logits are -inf past the row's end."""
    cols = tile * TILE + tl.arange(0, TILE)
    return cols, tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf"))


@triton.jit
def row_masses(top_ptr, total_ptr, kept_ptr, row, n_tiles, scale, TILES: tl.constexpr):
    """Return a row's tile maxima, maximum, tile masses and kept tile masses. Without a filter, kept_ptr is None."""
    tiles = tl.arange(0, TILES)
    places, there = row * n_tiles + tiles, tiles < n_tiles
    tops = tl.load(top_ptr + places, mask=there, other=float("-inf"))
    top = tl.max(tops)
    masses = tl.load(total_ptr + places, mask=there, other=0.0)
    masses *= token_mass(tops, tl.where(top == float("-inf"), 0.0, top), scale)  # -inf - -inf would be NaN
    kept = masses
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + places, mask=there, other=0.0)
    return tops, top, masses, kept


@triton.jit
def _row_floor(floor_ptr, row, top, min_p_span):
    """Return the least kept logit. min_p_span is -T log(min_p), inf without min-p; -inf is never kept."""
    floor = tl.maximum(top - min_p_span, LOWEST_FLOAT)
    if floor_ptr is not None:
        floor = tl.maximum(floor, tl.load(floor_ptr + row))
    return floor


@triton.jit
def _tile_sums_kernel(z_ptr, z_stride, top_ptr, total_ptr, vocab, n_tiles, scale, TILE: tl.constexpr):
    """Store the maximum of one tile, and the sum of exp((z - maximum) / T) over it."""
    place = tl.program_id(0)
    row, tile = place // n_tiles, place % n_tiles
    _, z = load_tile(z_ptr + row.to(tl.int64) * z_stride, tile, vocab, TILE)
    top = tl.max(z)
    tl.store(top_ptr + place, top)
    tl.store(total_ptr + place, tl.sum(token_mass(z, tl.where(top == float("-inf"), 0.0, top), scale)))


@triton.jit
def _kept_sums_kernel(z_ptr, z_stride, top_ptr, floor_ptr, kept_ptr, vocab, n_tiles, scale, min_p_span,
                      TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Store the sum of exp((z - max z) / T) over the kept tokens of one tile, with the max over the whole row."""
    place = tl.program_id(0)
    row, tile = place // n_tiles, place % n_tiles
    tiles = tl.arange(0, TILES)
    top = tl.max(tl.load(top_ptr + row * n_tiles + tiles, mask=tiles < n_tiles, other=float("-inf")))
    floor = _row_floor(floor_ptr, row, top, min_p_span)
    kept = 0.0
    if tl.load(top_ptr + place) >= floor:
        _, z = load_tile(z_ptr + row.to(tl.int64) * z_stride, tile, vocab, TILE)
        kept = tl.sum(tl.where(z >= floor, token_mass(z, top, scale), 0.0))
    tl.store(kept_ptr + place, kept)


@triton.jit
def _draw_kernel(z_ptr, z_stride, uniform_ptr, top_ptr, total_ptr, floor_ptr, kept_ptr, token_ptr, logp_ptr, mass_ptr,
                 vocab, n_tiles, scale, min_p_span, GREEDY: tl.constexpr, TILE: tl.constexpr,
                 TILES: tl.constexpr):  # fmt: skip
    """Select the tile of one row, then the token within it. kept_ptr is None without a filter."""
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * z_stride
    tiles = tl.arange(0, TILES)
    tops, top, masses, kept = row_masses(top_ptr, total_ptr, kept_ptr, row, n_tiles, scale, TILES)
    total = tl.sum(masses)
    share = 1.0
    if GREEDY:
        tile = tl.min(tl.where(tops == top, tiles, n_tiles))
        cols, z = load_tile(z_ptr, tile, vocab, TILE)
        token = tl.min(tl.where(z == top, cols, vocab))
    else:
        kept_total = tl.sum(kept)
        limit = tl.load(uniform_ptr + row) * kept_total
        # Only a tile with mass can be drawn. If rounding leaves no cumulative sum above the limit, take the last tile
        # with mass.
        tile = tl.min(tl.where((tl.cumsum(kept) > limit) & (kept > 0), tiles, n_tiles))
        tile = tl.minimum(tile, tl.max(tl.where(kept > 0, tiles, 0)))
        limit -= tl.sum(tl.where(tiles < tile, kept, 0.0))
        cols, z = load_tile(z_ptr, tile, vocab, TILE)
        mass = token_mass(z, top, scale)
        if kept_ptr is not None:
            mass = tl.where(z >= _row_floor(floor_ptr, row, top, min_p_span), mass, 0.0)
            share = tl.minimum(kept_total / total, 1.0)
        token = tl.min(tl.where((tl.cumsum(mass) > limit) & (mass > 0), cols, vocab))
        token = tl.minimum(token, tl.max(tl.where(mass > 0, cols, 0)))
    good = (total > 0) & (total < float("inf"))
    token = tl.where(good, token, 0)
    logp = (tl.load(z_ptr + token) - top) * scale * LN2 - tl.log(total)
    tl.store(token_ptr + row, token)
    tl.store(logp_ptr + row, tl.where(good, logp, float("nan")))
    tl.store(mass_ptr + row, tl.where(good, share, float("nan")))


def _check(logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    """Raise ValueError unless the kernels support the two tensors."""
    if logits.device.type == "cpu" and not launch.INTERPRET:
        raise ValueError("sample needs CUDA tensors, got logits on the CPU; use plain PyTorch on a CPU")
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(-1) != 1 or 0 in logits.shape:
        raise ValueError(
            f"logits must be fp32 [R, V], not empty, with a contiguous vocabulary, got {logits.dtype} "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    if uniforms.shape != logits.shape[:1] or uniforms.dtype != torch.float32 or uniforms.device != logits.device:
        raise ValueError(
            f"uniforms must be fp32 [{len(logits)}] on {logits.device}, one per row of logits, got {uniforms.dtype} "
            f"{tuple(uniforms.shape)} on {uniforms.device}"
        )


def least_kept(logits: torch.Tensor, scale: float, top_k: int, top_p: float) -> torch.Tensor | None:
    """Return the least logit [R] that top-k and then top-p keep, or None if both are off. scale is log2(e) / T."""
    vocab = logits.shape[1]
    if top_p == 1:
        return logits.topk(top_k, dim=-1).values.amin(-1) if 0 < top_k < vocab else None
    return torch.cat([_least_in_nucleus(rows, scale, top_k, top_p) for rows in logits.split(SORTED_ROWS)])


def _least_in_nucleus(logits, scale, top_k, top_p):
    """Return `least_kept` for top_p < 1."""
    vocab = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    masses = torch.exp2((ordered - ordered[:, :1]) * scale)
    if 0 < top_k < vocab:
        masses = masses.masked_fill(ordered < ordered[:, top_k - 1, None], 0)
    # Integers, because torch does not define the order of a scan: their sums are exact in any order, and torch's
    # deterministic mode allows them.
    units = masses.double().mul_(UNIT).round_().long()
    cumulative = units.cumsum(-1)
    likelier = units.neg_().add_(cumulative)
    stays = (likelier < top_p * cumulative[:, -1:].double()) & (masses > 0)
    return ordered.masked_fill(~stays, torch.inf).amin(-1)


@launch.on_its_device
def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token from each row of logits, by inverting its cumulative distribution in vocabulary order.

    The filters are applied in this order. top_k keeps the k likeliest tokens and those that tie with the k-th. top_p,
    over the renormalized rest, keeps a token while the mass of strictly likelier tokens is below it. min_p keeps tokens
    with at least this probability relative to the likeliest one. The caller must check the ranges of the four numbers,
    as `SamplingParams` does.

    Args:
        logits: [R, V] fp32, contiguous in V.
        uniforms: [R] fp32 in [0, 1), one per row of logits.
        temperature: T, at least 0. At 0 the first of the largest logits is selected, and uniforms and filters have no
            effect.
        top_k: Number of kept tokens; 0 keeps all.
        top_p: Kept mass, in (0, 1]; 1 keeps all.
        min_p: Minimum relative probability of a kept token, in [0, 1]; 0 keeps all.

    Returns:
        tokens: [R] int64, the first whose cumulative kept probability exceeds the uniform. Its probability is never 0.
        logps: [R] fp32, the token's log-prob under the full softmax at the temperature (at 1 when greedy), before
            filters.
        kept: [R] fp32, the mass of that softmax that the filters kept; 1 without filters.
        A row whose softmax is undefined (NaN, +inf, or only -inf) gives token 0, log-prob NaN and mass NaN.

    Raises:
        ValueError: A shape, dtype, stride or device differs from the above.
    """
    _check(logits, uniforms)
    assert temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1, (temperature, top_k, top_p, min_p)
    (rows, vocab), device = logits.shape, logits.device
    tile, options = launch.sample_tile(), launch.options(launch.SAMPLE_WARPS)
    n_tiles = triton.cdiv(vocab, tile)
    greedy = temperature == 0
    row = {"z_ptr": logits, "z_stride": logits.stride(0), "vocab": vocab, "n_tiles": n_tiles, "TILE": tile,
           "scale": LOG2E.value / (1.0 if greedy else temperature)}  # fmt: skip
    tiles = {"TILES": triton.next_power_of_2(n_tiles)}
    tops, totals = torch.empty(2, rows, n_tiles, dtype=torch.float32, device=device)
    _tile_sums_kernel[(rows * n_tiles,)](top_ptr=tops, total_ptr=totals, **row, **options)

    floor = kept = None
    min_p_span = -temperature * math.log(min_p) if min_p > 0 else math.inf
    if not greedy and (0 < top_k < vocab or top_p < 1 or min_p > 0):
        floor = least_kept(logits, row["scale"], top_k, top_p)
        kept = torch.empty_like(tops)
        _kept_sums_kernel[(rows * n_tiles,)](
            top_ptr=tops, floor_ptr=floor, kept_ptr=kept, min_p_span=min_p_span, **row, **tiles, **options
        )
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logps, mass = torch.empty(2, rows, dtype=torch.float32, device=device)
    _draw_kernel[(rows,)](
        uniform_ptr=uniforms.contiguous(), top_ptr=tops, total_ptr=totals, floor_ptr=floor, kept_ptr=kept,
        token_ptr=tokens, logp_ptr=logps, mass_ptr=mass, min_p_span=min_p_span, GREEDY=greedy, **row, **tiles,
        **options,
    )  # fmt: skip
    return tokens, logps, mass
