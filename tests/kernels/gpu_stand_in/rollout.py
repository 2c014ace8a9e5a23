"""The kernels of a decode step, through Triton's launch path for a GPU that is not there."""

import torch
from decode_cases import random_rotation
from stand_in import crossed

from fastgrpo.kernels import launch
from fastgrpo.kernels.decode import group_decode
from fastgrpo.kernels.layer import add_rms_norm, rotate_and_store, silu_mul
from fastgrpo.kernels.sampling import sample

FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.05}
VOCABULARIES = (151_936, 1000, 2048, 32_768, 262_144)
# Query heads over key heads, as models have them.
HEADS = ((14, 2), (28, 4), (32, 1), (8, 8), (71, 1))


@crossed(vocab=VOCABULARIES, rows=(3, 1), top_k=(False, True), top_p=(False, True), min_p=(True, False),
         temperature=(0.8, 0.0, 1.0))  # fmt: skip
def test_draw(vocab, rows, top_k, top_p, min_p, temperature, launches):
    on = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters = {name: value for name, value in FILTERS.items() if on[name]}
    sample(torch.randn(rows, vocab), torch.rand(rows), temperature=temperature, **filters)
    filtered = temperature > 0 and any(on.values())
    assert launches == ["_tile_sums_kernel", *["_kept_sums_kernel"] * filtered, "_draw_kernel"]


@crossed(dtype=launch.DTYPES, heads=HEADS, group=(1, 8, 16), depth=(64, 80, 128, 192, 256))
def test_decode(dtype, heads, group, depth, launches):
    prompts, (heads, key_heads) = 2, heads
    lanes = prompts * group
    own, prompt = (torch.zeros(n, key_heads, length, depth, dtype=dtype) for n, length in ((lanes, 64), (prompts, 256)))
    group_decode(
        torch.zeros(lanes, heads, depth, dtype=dtype), own, own, torch.full((lanes,), 5, dtype=torch.int32), prompt,
        prompt, torch.full((prompts,), 90, dtype=torch.int32),
        torch.arange(lanes, dtype=torch.int32).view(prompts, group), scale=depth**-0.5,
    )  # fmt: skip
    assert launches == ["_partial_fwd_kernel", "_merge_fwd_kernel"]


@crossed(dtype=launch.DTYPES, heads=HEADS, depth=(64, 80, 128), normed=(False, True), width=(896, 3584, 16_384))
def test_layer(dtype, heads, depth, normed, width, launches):
    add_rms_norm(torch.zeros(4, width, dtype=dtype), None, torch.ones(width, dtype=dtype), 1e-6)
    add_rms_norm(*torch.zeros(2, 4, width, dtype=dtype), torch.ones(width, dtype=dtype), 1e-6)
    rotate_and_store(**random_rotation(4, heads, depth, normed, dtype, (0, 2, 1)))
    silu_mul(torch.zeros(4, 2 * width, dtype=dtype))
    assert launches == ["_add_rms_norm_fwd_kernel"] * 2 + ["_rotate_fwd_kernel", "_silu_mul_fwd_kernel"]
