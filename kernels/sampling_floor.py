"""The least logit of a row that top-k or top-p keeps, exactly, without sorting the row.

A value is kept while what lies strictly above it is below a limit: k tokens, or top_p of the mass. That holds from a
floor upwards, and the search narrows (lo, hi], lo cut and hi kept:

1. Bracket, a program a row. Tile maxima alone bound it: a value with k of them above it is cut, as is one with the
   limit's mass of them above it. So is one so unlikely that V of its kind would not make up 1 - top_p.
2. Sweep, a program a (row, tile): the tokens or the mass above each of PIVOTS values in (lo, hi], and a program a row
   that narrows to the interval between two of them. SWEEPS times; tiles whose maximum is not above lo are not read.
   Two sweeps leave a 289th of the bracket: a twentieth of a nat, some thousand tokens of a flat row, a few of a peaked.
3. Gather, a program a (row, tile): up to CANDIDATES values in (lo, hi].
4. Finish, a program a row: goes on with the same pivots over the candidates, until one value is left. Where a tile
   held more of them it goes over the whole row instead: slower, as exact. Pivots lie evenly in value for VALUE_PASSES
   passes, then evenly among the floats, 17 times fewer a pass: at most 13 passes end it, whatever the row holds.

Every sum over one source has a fixed order whatever the pivot, so it grows as the set does, and the rounded condition
has one boundary as the exact one has. The launches do not depend on the data.

Shapes: R rows, V vocabulary. mass: exp((z - max z) / T). All arithmetic is fp32.
"""

import torch
import triton
import triton.language as tl

from fastgrpo.kernels import launch

SWEEPS = 2
VALUE_PASSES = tl.constexpr(4)
SLACK = tl.constexpr(1.00001)  # the bound of the tile maxima sums in another order than the sweeps
# of the state of a row [8]: base is what lies above hi, top the maximum of the row
LO, HI, BASE, LIMIT, TOP = (tl.constexpr(i) for i in range(5))
FIELDS = tl.constexpr(8)


@triton.jit
def token_mass(z, top, scale):
    """exp((z - top) / T), scale = log2(e) / T; 1 at the top exactly. No product feeds the subtraction: no fma."""
    return tl.exp2((z - top) * scale)


@triton.jit
def load_tile(z_ptr, tile, vocab, TILE: tl.constexpr):
    """Columns and values of one tile of a row, -inf past its end."""
    cols = tile * TILE + tl.arange(0, TILE)
    return cols, tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf"))


@triton.jit
def row_masses(top_ptr, total_ptr, kept_ptr, row, n_tiles, scale, TILES: tl.constexpr):
    """Maxima of the tiles, maximum of the row, masses of the tiles, and of what is kept of them where there is kept."""
    tiles = tl.arange(0, TILES)
    places, there = row * n_tiles + tiles, tiles < n_tiles
    tops = tl.load(top_ptr + places, mask=there, other=float("-inf"))
    top = tl.max(tops)
    masses = tl.load(total_ptr + places, mask=there, other=0.0)
    masses *= token_mass(tops, tl.where(top == float("-inf"), 0.0, top), scale)  # -inf - -inf is NaN
    kept = masses
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + places, mask=there, other=0.0)
    return tops, top, masses, kept


@triton.jit
def _ordered(bits):
    """Bits of floats <-> integers in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _pivots(lo, hi, scale, PIVOTS: tl.constexpr):
    """Evenly in (lo, hi); 0.7, 1, 1.4, 2, ... nats / T below hi while lo is not known."""
    place = tl.arange(0, PIVOTS).to(tl.float32)
    share = (place + 1.0) / (PIVOTS + 1)
    return tl.where(lo == float("-inf"), hi - tl.exp2(0.5 * place) / scale, lo * (1 - share) + hi * share)


@triton.jit
def _above(z, pivots, top, scale, BY_MASS: tl.constexpr):
    """[values, PIVOTS]: the weight of each value for each of the pivots that it is strictly above."""
    weight = token_mass(z, top, scale) if BY_MASS else tl.full(z.shape, 1.0, tl.float32)
    return tl.where(z[:, None] > pivots[None, :], weight[:, None], 0.0)


@triton.jit
def _bracket_kernel(top_ptr, total_ptr, kept_ptr, state_ptr, vocab, n_tiles, scale, limit, BY_MASS: tl.constexpr,
                    TILES: tl.constexpr):  # fmt: skip
    """limit: k, or top_p, of the mass in kept_ptr where that is not None."""
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
    """above [R, tiles, PIVOTS] of each pivot."""
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
    """found [R, tiles] values in (lo, hi]; candidates [R, tiles, CANDIDATES], the first of them, then -inf."""
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
    slots = tl.arange(0, CANDIDATES)
    tl.store(candidate_ptr + slots, tl.full((CANDIDATES,), float("-inf"), tl.float32), mask=slots >= found)
    tl.store(found_ptr + place, found)


@triton.jit
def _search(z_ptr, n, lo, hi, base, limit, top, scale, BY_MASS: tl.constexpr, STEP: tl.constexpr,
            PIVOTS: tl.constexpr):  # fmt: skip
    """The least of n values in (lo, hi] above which lies less than the limit, base included; hi if there is none."""
    least, most = lo, hi  # of the values in (lo, hi]
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
        # no value lies between hi and the greatest one in (lo, hi], and all from a kept one up are kept
        hi = tl.maximum(tl.minimum(tl.min(tl.where(kept, pivots, hi)), most), least)
        lo = tl.maximum(lo, tl.max(tl.where(kept, lo, pivots)))
        passes += 1
    return least


@triton.jit
def _finish_kernel(z_ptr, z_stride, state_ptr, found_ptr, candidate_ptr, floor_ptr, vocab, n_tiles, scale,
                   BY_MASS: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
                   PIVOTS: tl.constexpr):  # fmt: skip
    """floor [R]; -inf where the row has no softmax, whose limit or maximum is then no number."""
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


def least_kept(logits, scale, tops, totals, kept, limit, *, by_mass):
    """floor [R]: the least logit above which lie less than `limit` tokens, or less than this share of the mass.

    Args:
        logits: [R, V] fp32. scale: log2(e) / T. tops, totals: [R, tiles] maxima and masses of the tiles. kept: [R,
            tiles] the mass that counts, or None for all of it.
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
