"""The draw of tokens and the attention of a decode step, through Triton's launch path for a GPU that is not there."""

from itertools import product

import pytest
import torch

from fastgrpo.kernels import launch
from fastgrpo.kernels.decode import group_decode
from fastgrpo.kernels.sampling import sample

FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.05}
VOCABULARIES = (1000, 2048, 32_768, 151_936, 262_144)
# Query heads over key heads, as models have them.
HEADS = ((14, 2), (28, 4), (32, 1), (8, 8), (71, 1))


def chosen(ordinary, *axes):
    """Make the cases of all combinations of the axes. Slow are those with a value that is not among the ordinary."""
    cases = []
    for case in product(*axes):
        slow = any(value not in few for value, few in zip(case, ordinary, strict=True) if few is not None)
        cases.append(pytest.param(*case, id="-".join(map(str, case)), marks=[pytest.mark.slow] if slow else []))
    return cases


@pytest.mark.parametrize(
    ("vocab", "rows", "top_k", "top_p", "min_p", "temperature"),
    chosen(
        ((1000, 151_936), (3,), None, None, None, (0.0, 0.8)),
        VOCABULARIES, (1, 3), (False, True), (False, True), (False, True), (0.0, 0.8, 1.0),
    ),
)  # fmt: skip
def test_draw(vocab, rows, top_k, top_p, min_p, temperature, launches):
    on = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters = {name: value for name, value in FILTERS.items() if on[name]}
    sample(torch.randn(rows, vocab), torch.rand(rows), temperature=temperature, **filters)
    filtered = temperature > 0 and any(on.values())
    assert launches == ["_tile_sums_kernel", *["_kept_sums_kernel"] * filtered, "_draw_kernel"]


@pytest.mark.parametrize(
    ("dtype", "heads", "group", "depth"),
    chosen(((torch.bfloat16,), HEADS[:3], (1, 16), None), launch.DTYPES, HEADS, (1, 8, 16), (64, 80, 128, 192, 256)),
)
def test_decode(dtype, heads, group, depth, launches):
    prompts, (heads, key_heads) = 2, heads
    lanes = prompts * group
    own, prompt = (torch.zeros(n, key_heads, length, depth, dtype=dtype) for n, length in ((lanes, 64), (prompts, 256)))
    group_decode(
        torch.zeros(lanes, heads, depth, dtype=dtype), own, own, torch.full((lanes,), 5, dtype=torch.int32), prompt,
        prompt, torch.full((prompts,), 90, dtype=torch.int32),
        torch.arange(lanes, dtype=torch.int32).view(prompts, group), scale=depth**-0.5,
    )  # fmt: skip
    assert launches == [
        "_partial_fwd_kernel",
        "_partial_fwd_kernel",
        "_merge_fwd_kernel",
    ]  # own keys, then the prompt's
