"""The rollout's kernels on the CPU: sampling and shared-prefix decode attention, against plain PyTorch.

Collected by test_triton_interpret.py, in a process of its own with TRITON_INTERPRET=1.
"""

import math
import warnings

import pytest
import torch
from decode_cases import check_draws, chi_square_score, random_decode

from fastgrpo.kernels import launch, reference, sampling
from fastgrpo.kernels.group_decode import group_decode

if not launch.INTERPRET:
    pytest.skip("needs TRITON_INTERPRET=1 before the import", allow_module_level=True)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():  # numpy tells of exp2(-inf) and of NaN on purpose
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 60},  # more than there are tiles
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
]
SHAPES = [(3, 101), (1, 32), (1, 157)]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draws(shape, filters):
    temperature = 0.6 if shape[0] == 3 else 1.0
    logits = torch.randn(shape) * 3
    uniforms = torch.rand(len(logits))
    tokens, _, _ = check_draws(logits, uniforms, temperature=temperature, **filters)
    expected, _, _ = reference.sample(logits, uniforms, temperature=temperature, **filters)
    assert torch.equal(tokens, expected)  # nothing here lies within rounding of a boundary


@pytest.mark.parametrize("filters", ({}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}), ids=str)
def test_the_ends_of_the_distribution(filters):
    """u = 0 and the largest float below 1, with tokens of probability 0 first and last."""
    logits = torch.randn(2, 150) * 2
    logits[:, :40] = logits[:, -45:] = -math.inf
    logits[:, 77] = -200.0
    check_draws(logits, torch.tensor([0.0, 1 - 2**-24]), temperature=1.0, **filters)


@pytest.mark.parametrize(
    "filters", ({"top_k": 5}, {"top_p": 0.31}, {"top_k": 30, "top_p": 0.41}, {"min_p": 0.5}), ids=str
)
@pytest.mark.parametrize("kind", ("equal", "signed zeros", "coarse", "huge", "masked by the least float", "tiny"))
def test_floors_of_awkward_rows(kind, filters):
    coarse = (torch.randn(1, 133) * 2).round()
    logits = {
        "equal": torch.full((1, 133), 1.7),
        "signed zeros": torch.where(torch.arange(133) % 2 == 0, 0.0, -0.0)[None].masked_fill(coarse > 1, 1.0),
        "coarse": coarse,
        "huge": torch.randn(1, 133) * 1e30,
        "masked by the least float": torch.randn(1, 133).masked_fill(coarse != 0, torch.finfo(torch.float32).min),
        "tiny": torch.randn(1, 133) * 1e-30,
    }[kind]
    check_draws(logits, torch.rand(1), temperature=1.0, **filters)


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.randn(4, 150)
    logits[1, 40] = logits[1, 140] = 9.0
    logits[2, :] = 0.5
    tokens, _, kept = check_draws(logits, torch.rand(4), temperature=0, top_k=3, top_p=0.5)
    assert tokens[1:3].tolist() == [40, 0] and (kept == 1).all()


def test_rows_without_a_distribution():
    logits = torch.randn(4, 70)
    logits[0, 50], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    for params in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}):
        tokens, logps, kept = sampling.sample(logits, torch.full((4,), 0.5), **params)
        assert tokens[:3].tolist() == [0, 0, 0] and logps[:3].isnan().all() and kept[:3].isnan().all()
        expected = reference.sample(logits, torch.full((4,), 0.5), **params)
        assert torch.equal(tokens, expected[0]) and torch.equal(logps.isnan(), expected[1].isnan())
        torch.testing.assert_close(logps[3], expected[1][3])


def test_a_confident_token_keeps_its_precision():
    logits = torch.zeros(1, 100)
    logits[0, 50] = 20.0
    check_draws(logits, torch.tensor([0.5]), temperature=1.0)
    check_draws(logits * 10, torch.tensor([0.5]), temperature=1.0, top_p=0.9)


def test_rows_of_a_larger_matrix():
    logits = torch.randn(6, 200)[::2, :90]
    assert logits.stride() == (400, 1)
    check_draws(logits, torch.rand(3), temperature=1.0, top_p=0.9)


def test_a_row_draws_the_same_in_any_batch():
    logits, uniforms = torch.randn(4, 100), torch.rand(4)
    together = sampling.sample(logits, uniforms, temperature=0.8, top_p=0.9)
    alone = [sampling.sample(logits[i : i + 1], uniforms[i : i + 1], temperature=0.8, top_p=0.9) for i in range(4)]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(together, zip(*alone, strict=True), strict=True))


@pytest.mark.parametrize(
    "filters", ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.4}, {"top_k": 6, "top_p": 0.8}), ids=str
)
def test_draws_follow_the_distribution(filters):
    """Chi-square of 80 draws from 8 tokens, held to the 99.99% quantile; test_triton_rollout.py draws more."""
    row, draws = torch.linspace(0, 1.4, 8)[torch.randperm(8)], 80
    tokens, _, _ = sampling.sample(row.expand(draws, -1).contiguous(), torch.rand(draws), temperature=0.9, **filters)
    assert chi_square_score(tokens, row, 0.9, filters) < 3.72


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.randn(3, 8).half()}, "logits must be fp32"),
        ({"logits": torch.randn(8, 3).T}, "logits must be fp32"),
        ({"logits": torch.randn(3, 0)}, "logits must be fp32"),
        ({"uniforms": torch.rand(2)}, r"uniforms must be fp32 \[3\]"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\]"),
    ],
    ids=str,
)
def test_bad_arguments_of_sample(change, message):
    given = {"logits": torch.randn(3, 8), "uniforms": torch.rand(3), "temperature": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        sampling.sample(given.pop("logits"), given.pop("uniforms"), **given)


GROUPS = {  # name -> members, prompt lengths, suffix lengths; ragged, in any order, with lanes and prompts left out
    "ragged": ([[0, 2, -1, 1], [3, -1, 4, -1], [-1] * 4], [37, 13, 20], [3, 40, 1, 0, 17, 5, 0]),
    "one lane": ([[0]], [5], [1]),
    "sixteen": ([[15, *range(15)]], [33], [1, 16, 17, 0, *range(12)]),
    "no prompt": ([[-1, -1]], [9], [4, 0]),
    "empty prompt": ([[1, 0]], [0], [4, 0]),
    "no groups": ([], [], [7, 16, 0]),
}


@pytest.mark.parametrize("layout", ("KC", "CK", "mixed"))
@pytest.mark.parametrize("heads", ((2, 2), (14, 2), (6, 1)), ids="{0[0]}-over-{0[1]}".format)
@pytest.mark.parametrize("name", GROUPS)
def test_group_decode(name, heads, layout):
    case = random_decode(*GROUPS[name], heads=heads, depth=16, layout=layout)
    torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", (24, 64, 80))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_depths_and_dtypes(dtype, depth):
    case = random_decode(*GROUPS["ragged"], heads=(7, 1), depth=depth, dtype=dtype)
    out = group_decode(**case)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out, reference.group_decode(**case), rtol=tolerance, atol=tolerance)


def test_more_query_rows_than_a_block_holds():
    case = random_decode([[*range(12)]], [21], [2] * 12, heads=(6, 1), depth=16)
    assert launch.decode_blocks(12 * 6, 16, torch.float32).rows < 12 * 6
    torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", ((40, 1), (71, 1), (80, 2)), ids="{0[0]}-over-{0[1]}".format)
def test_more_heads_of_a_key_head_than_a_block_holds(heads):
    case = random_decode(*GROUPS["ragged"], heads=heads, depth=16)
    assert launch.decode_blocks(heads[0] // heads[1], 16, torch.float32).rows < heads[0] // heads[1]
    torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-5, atol=1e-5)


def test_scores_far_apart():
    """A key 90 nats above the rest in the prompt, the suffix, or both: the merge neither overflows nor loses it."""
    for prompt, suffix in ((90.0, 0.0), (0.0, 90.0), (90.0, 90.0), (-900.0, -900.0)):
        case = random_decode([[1, 0]], [20], [18, 3], heads=(2, 2), depth=16)
        case["query"][:] = 1.0
        case["prompt_keys"][:, :, 7] = prompt / 16 / case["scale"]
        case["keys"][:, :, 1] = suffix / 16 / case["scale"]
        torch.testing.assert_close(group_decode(**case), reference.group_decode(**case), rtol=1e-4, atol=1e-4)


def test_what_lies_beyond_the_lengths_is_not_read():
    case = random_decode(*GROUPS["ragged"], heads=(4, 2), depth=16)
    expected = group_decode(**case)
    for prefix in ("", "prompt_"):
        for slot, length in enumerate(case[f"{prefix}lengths"].tolist()):
            case[f"{prefix}keys"][slot, :, length:] = math.nan
            case[f"{prefix}values"][slot, :, length:] = math.nan
    assert torch.equal(group_decode(**case), expected)


def test_bounds_are_of_no_consequence():
    case = random_decode(*GROUPS["ragged"], heads=(4, 2), depth=16)
    expected = group_decode(**case)
    torch.testing.assert_close(group_decode(**case, max_length=3, max_prompt_length=1), expected)


def test_no_lanes():
    case = random_decode([[-1]], [4], [], heads=(4, 2), depth=16)
    assert group_decode(**case).shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.randn(2, 4, 16).double()}, "query must be bf16, fp16 or fp32"),
        ({"query": torch.randn(2, 16)}, r"query must be \[R, H, d\]"),
        ({"query": torch.randn(2, 4, 8)}, "keys must be torch.float32"),
        ({"query": torch.randn(3, 4, 16)}, r"lengths must be \[3\]"),
        ({"query": torch.randn(2, 3, 16)}, "K a divisor of 3 heads"),
        ({"keys": torch.randn(2, 2, 16, 9).mT}, "contiguous in the last"),
        ({"values": torch.randn(2, 2, 9, 16).half()}, "values must be torch.float32"),
        ({"prompt_values": torch.randn(1, 2, 4, 16)}, "prompt_values must be"),
        ({"prompt_keys": torch.randn(1, 1, 5, 16), "prompt_values": torch.randn(1, 1, 5, 16)}, "have 2 heads"),
        ({"lengths": torch.tensor([1, 2])}, "lengths must be int32"),
        ({"members": torch.tensor([[0, 1]])}, "members must be int32"),
        ({"members": torch.zeros(2, 2, dtype=torch.int32)}, r"members must be int32 \[1, G\]"),
        ({"prompt_lengths": torch.zeros(0, dtype=torch.int32)}, r"prompt_lengths must be \[1\]"),
    ],
    ids=str,
)
def test_bad_arguments_of_group_decode(change, message):
    case = random_decode([[1, 0]], [5], [9, 3], heads=(4, 2), depth=16) | change
    with pytest.raises(ValueError, match=message):
        group_decode(**case)
