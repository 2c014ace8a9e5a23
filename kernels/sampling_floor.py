"""The least logit of a row that top-k or top-p keeps, exactly, without sorting the row.

A logit is kept while what lies strictly above it is below a limit: k tokens, or top_p of the mass. That holds from a
floor upwards. The search narrows an interval (lo, hi], where lo is known to be cut and hi is known to be kept.

1. `_bracket_kernel`, one program a row, bounds the floor by the maxima of the tiles alone: a value with k tile maxima
   above it is cut, as is one with tile maxima of the limit's mass above it. A value is also cut when it is so unlikely
   that V tokens of its kind would not make up 1 - top_p.
2. `_sweep_kernel`, one program a (row, tile), counts the tokens or the mass above each of PIVOTS values in (lo, hi],
   and `_narrow_kernel`, one program a row, narrows to the interval between two of them. That happens SWEEPS times; a
   tile whose maximum is not above lo is not read. Two sweeps leave a 289th of the bracket: a twentieth of a nat, which
   holds some thousand tokens of a flat row and a few of a peaked one.
3. `_gather_kernel`, one program a (row, tile), collects up to CANDIDATES values in (lo, hi].
4. `_finish_kernel`, one program a row, goes on with the same kind of pivots over the candidates until one value is
   left. Where a tile held more than CANDIDATES, it goes over the whole row instead, which is slower and as exact. The
   pivots lie evenly in value for VALUE_PASSES passes and then evenly among the floats, of which each pass leaves a
   17th: at most 13 passes end the search, whatever the row holds.

Shapes: R rows of logits, V vocabulary. The mass of a token is exp((z - max z) / T). All arithmetic is fp32.
"""

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch

SWEEPS = 2
VALUE_PASSES = tl.constexpr(4)
SLACK = tl.constexpr(1.00001)  # the bracket sums in another order than the sweeps, and must not cut what they keep
# Indices into the state of a row, [8] fp32. BASE is the mass or count above HI, TOP the maximum of the row.
LO, HI, BASE, LIMIT, TOP = (tl.constexpr(i) for i in range(5))
FIELDS = tl.constexpr(8)


@triton.jit
def token_mass(z, top, scale):
    """Return exp((z - top) / T), which is exactly 1 at the top.

    The subtraction comes before the product, so that no fused multiply-add can change it.
    """
    return tl.exp2((z - top) * scale)


@triton.jit
def load_tile(z_ptr, tile, vocab, TILE: tl.constexpr):
    """Return the columns and the logits of one tile of a row; the logits are -inf past the row's end."""
    cols = tile * TILE + tl.arange(0, TILE)
    return cols, tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf"))


@triton.jit
def row_masses(top_ptr, total_ptr, kept_ptr, row, n_tiles, scale, TILES: tl.constexpr):
    """Return a row's tile maxima, its maximum, its tile masses and the kept masses of its tiles.

    Args:
        top_ptr: [R, tiles] maxima of the tiles.
        total_ptr: [R, tiles] sums of exp((z - maximum of the tile) / T).
        kept_ptr: [R, tiles] masses that the filters before kept, or None where everything is kept.
        row: Number of the row.
        n_tiles: Tiles of a row.
        scale: log2(e) / T.
        TILES: n_tiles, rounded up to a power of two.
    """
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
def _ordered(bits):
    """Turn the bits of floats into integers in the order of the floats, or back: the function is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _pivots(lo, hi, scale, PIVOTS: tl.constexpr):
    """Return PIVOTS values evenly in (lo, hi), or 0.7, 1, 1.4, 2, ... nats / T below hi while lo is not known."""
    place = tl.arange(0, PIVOTS).to(tl.float32)
    share = (place + 1.0) / (PIVOTS + 1)
    return tl.where(lo == float("-inf"), hi - tl.exp2(0.5 * place) / scale, lo * (1 - share) + hi * share)


@triton.jit
def _above(z, pivots, top, scale, BY_MASS: tl.constexpr):
    """Return [values, PIVOTS]: a value's weight (its mass, or 1) at the pivots that it is strictly above, else 0."""
    weight = token_mass(z, top, scale) if BY_MASS else tl.full(z.shape, 1.0, tl.float32)
    return tl.where(z[:, None] > pivots[None, :], weight[:, None], 0.0)


@triton.jit
def _bracket_kernel(top_ptr, total_ptr, kept_ptr, state_ptr, vocab, n_tiles, scale, limit, BY_MASS: tl.constexpr,
                    TILES: tl.constexpr):  # fmt: skip
    """Bound the floor of one row by its tile maxima. limit is k, or the share of the kept mass."""
    row = tl.program_id(0)
    tops, top, _, kept = row_masses(top_ptr, total_ptr, kept_ptr, row, n_tiles, scale, TILES)
    lo = float("-inf")
    if BY_MASS:
        total = tl.sum(kept)
        lo = top + tl.log2(total * (1 - limit) / (2.0 * vocab)) / scale
        limit *= total
    above = tl.sum(_above(tops, tops, top, scale, BY_MASS), axis=0)
    lo = tl.maximum(lo, tl.max(tl.where(above >= limit * SLACK, tops, float("-inf"))))
    state_ptr += row * FIELDS
    tl.store(state_ptr + LO, lo)
    tl.store(state_ptr + HI, top)
    tl.store(state_ptr + BASE, 0.0)
    tl.store(state_ptr + LIMIT, limit)
    tl.store(state_ptr + TOP, top)


@triton.jit
def _sweep_kernel(z_ptr, z_stride, top_ptr, state_ptr, above_ptr, vocab, n_tiles, scale, BY_MASS: tl.constexpr,
                  TILE: tl.constexpr, STEP: tl.constexpr, PIVOTS: tl.constexpr):  # fmt: skip
    """Store above [R, tiles, PIVOTS]: the tokens or the mass of one tile that lie above each pivot."""
    place = tl.program_id(0)
    row, tile = place // n_tiles, place % n_tiles
    state_ptr += row * FIELDS
    lo = tl.load(state_ptr + LO)
    above = tl.zeros((STEP, PIVOTS), tl.float32)
    if tl.load(top_ptr + place) > lo:
        pivots = _pivots(lo, tl.load(state_ptr + HI), scale, PIVOTS)
        top = tl.load(state_ptr + TOP)
        for i in tl.static_range(TILE // STEP):
            _, z = load_tile(z_ptr + row.to(tl.int64) * z_stride, tile * (TILE // STEP) + i, vocab, STEP)
            above += _above(z, pivots, top, scale, BY_MASS)
    above_ptr += place.to(tl.int64) * PIVOTS
    tl.store(above_ptr + tl.arange(0, PIVOTS), tl.sum(above, axis=0))


@triton.jit
def _narrow_kernel(above_ptr, state_ptr, n_tiles, scale, TILES: tl.constexpr, PIVOTS: tl.constexpr):
    """Narrow (lo, hi] of one row to the interval between two pivots."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    places = (row * n_tiles + tiles).to(tl.int64)[:, None] * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    above = tl.sum(tl.load(above_ptr + places, mask=(tiles < n_tiles)[:, None], other=0.0), axis=0)
    state_ptr += row * FIELDS
    lo, hi, base = tl.load(state_ptr + LO), tl.load(state_ptr + HI), tl.load(state_ptr + BASE)
    pivots = _pivots(lo, hi, scale, PIVOTS)
    kept = above < tl.load(state_ptr + LIMIT)
    tl.store(state_ptr + LO, tl.maximum(lo, tl.max(tl.where(kept, lo, pivots))))
    tl.store(state_ptr + HI, tl.minimum(hi, tl.min(tl.where(kept, pivots, hi))))
    tl.store(state_ptr + BASE, tl.maximum(base, tl.max(tl.where(kept, above, base))))


@triton.jit
def _gather_kernel(z_ptr, z_stride, top_ptr, state_ptr, found_ptr, candidate_ptr, vocab, n_tiles, TILE: tl.constexpr,
                   CANDIDATES: tl.constexpr):  # fmt: skip
    """Store found [R, tiles], how many values lie in (lo, hi], and the first of them as [R, tiles, CANDIDATES].

    Places without a candidate hold -inf.
    """
    place = tl.program_id(0)
    row, tile = place // n_tiles, place % n_tiles
    state_ptr += row * FIELDS
    lo, hi = tl.load(state_ptr + LO), tl.load(state_ptr + HI)
    candidate_ptr += place.to(tl.int64) * CANDIDATES
    found = 0
    if tl.load(top_ptr + place) > lo:
        _, z = load_tile(z_ptr + row.to(tl.int64) * z_stride, tile, vocab, TILE)
        inside = (z > lo) & (z <= hi)
        rank = tl.cumsum(inside.to(tl.int32)) - 1
        tl.store(candidate_ptr + rank, z, mask=inside & (rank < CANDIDATES))
        found = tl.sum(inside.to(tl.int32))
    index = tl.arange(0, CANDIDATES)
    tl.store(candidate_ptr + index, tl.full((CANDIDATES,), float("-inf"), tl.float32), mask=index >= found)
    tl.store(found_ptr + place, found)


@triton.jit
def _search(z_ptr, n, lo, hi, base, limit, top, scale, BY_MASS: tl.constexpr, STEP: tl.constexpr,
            PIVOTS: tl.constexpr):  # fmt: skip
    """Return the least of n values in (lo, hi] above which lies less than the limit; hi where there is none.

    base is what lies above hi; it counts against the limit.
    """
    least, most = lo, hi  # the least and the greatest value in (lo, hi]
    passes = 0
    while least < most:
        pivots = _pivots(lo, hi, scale, PIVOTS)
        if passes >= VALUE_PASSES:
            low = _ordered(lo.to(tl.int32, bitcast=True)).to(tl.int64)
            high = _ordered(hi.to(tl.int32, bitcast=True)).to(tl.int64)
            keys = low + (high - low) * (tl.arange(0, PIVOTS) + 1) // (PIVOTS + 1)
            pivots = _ordered(keys.to(tl.int32)).to(tl.float32, bitcast=True)
        above = tl.zeros((STEP, PIVOTS), tl.float32)
        smallest = tl.zeros((STEP,), tl.float32) + hi
        largest = tl.zeros((STEP,), tl.float32) + lo
        for i in range(tl.cdiv(n, STEP)):
            _, z = load_tile(z_ptr, i, n, STEP)
            above += _above(z, pivots, top, scale, BY_MASS)
            inside = (z > lo) & (z <= hi)
            smallest = tl.minimum(smallest, tl.where(inside, z, hi))
            largest = tl.maximum(largest, tl.where(inside, z, lo))
        least, most = tl.min(smallest), tl.max(largest)
        kept = base + tl.sum(above, axis=0) < limit
        # No value lies between the greatest one in (lo, hi] and hi, and everything above a kept value is kept.
        hi = tl.maximum(tl.minimum(tl.min(tl.where(kept, pivots, hi)), most), least)
        lo = tl.maximum(lo, tl.max(tl.where(kept, lo, pivots)))
        passes += 1
    return least


@triton.jit
def _finish_kernel(z_ptr, z_stride, state_ptr, found_ptr, candidate_ptr, floor_ptr, vocab, n_tiles, scale,
                   BY_MASS: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
                   PIVOTS: tl.constexpr):  # fmt: skip
    """Store floor [R]. It is -inf where the row has no softmax: its limit or its maximum is then not a number."""
    row = tl.program_id(0)
    state_ptr += row * FIELDS
    lo, hi, base = tl.load(state_ptr + LO), tl.load(state_ptr + HI), tl.load(state_ptr + BASE)
    limit, top = tl.load(state_ptr + LIMIT), tl.load(state_ptr + TOP)
    tiles = tl.arange(0, TILES)
    most = tl.max(tl.load(found_ptr + row * n_tiles + tiles, mask=tiles < n_tiles, other=0))
    source, n = candidate_ptr + row.to(tl.int64) * n_tiles * CANDIDATES, n_tiles * CANDIDATES
    if most > CANDIDATES:
        source, n, base = z_ptr + row.to(tl.int64) * z_stride, vocab, 0.0
    floor = float("-inf")
    if (limit > 0) & (tl.abs(top) < float("inf")):
        floor = _search(source, n, lo, hi, base, limit, top, scale, BY_MASS, STEP, PIVOTS)
    tl.store(floor_ptr + row, floor)


def least_kept(
    logits: torch.Tensor,
    scale: float,
    tops: torch.Tensor,
    totals: torch.Tensor,
    kept: torch.Tensor | None,
    limit: float,
    *,
    by_mass: bool,
) -> torch.Tensor:
    """Find the least logit of each row above which lies less than a limit.

    Args:
        logits: [R, V] fp32, the vocabulary contiguous.
        scale: log2(e) / T.
        tops: [R, tiles] fp32, the maxima of the tiles.
        totals: [R, tiles] fp32, sums of exp((z - maximum of the tile) / T).
        kept: [R, tiles] fp32, the masses that count, or None where all of it counts.
        limit: Number of tokens, or share of the mass that counts.
        by_mass: Whether the limit is a share of the mass.

    Returns:
        [R] fp32 floors; -inf for a row whose softmax is undefined.
    """
    (rows, vocab), n_tiles, device = logits.shape, tops.shape[1], logits.device
    tile, pivots, step = launch.sample_tile(), launch.SEARCH_PIVOTS, launch.search_step()
    held = launch.search_candidates()
    tiles = {"TILES": triton.next_power_of_2(n_tiles)}
    options = {"PIVOTS": pivots, "num_warps": launch.SEARCH_WARPS}

    def empty(*shape, dtype=torch.float32):
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    state, floor = empty(FIELDS.value), empty()
    above, candidates, found = empty(n_tiles, pivots), empty(n_tiles, held), empty(n_tiles, dtype=torch.int32)
    _bracket_kernel[(rows,)](
        tops, totals, kept, state, vocab, n_tiles, scale, float(limit), BY_MASS=by_mass,
        num_warps=launch.SEARCH_WARPS, **tiles,
    )  # fmt: skip
    for _ in range(SWEEPS):
        _sweep_kernel[(rows * n_tiles,)](
            logits, logits.stride(0), tops, state, above, vocab, n_tiles, scale, BY_MASS=by_mass, TILE=tile, STEP=step,
            **options,
        )  # fmt: skip
        _narrow_kernel[(rows,)](above, state, n_tiles, scale, **tiles, **options)
    _gather_kernel[(rows * n_tiles,)](
        logits, logits.stride(0), tops, state, found, candidates, vocab, n_tiles, TILE=tile, CANDIDATES=held,
        num_warps=launch.SAMPLE_WARPS,
    )  # fmt: skip
    _finish_kernel[(rows,)](
        logits, logits.stride(0), state, found, candidates, floor, vocab, n_tiles, scale, BY_MASS=by_mass, STEP=step,
        CANDIDATES=held, **tiles, **options,
    )  # fmt: skip
    return floor
