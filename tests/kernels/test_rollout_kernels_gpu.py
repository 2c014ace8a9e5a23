"""The rollout's kernels on a GPU at real sizes: distribution, accuracy in bf16, same bits, no host sync, CUDA graphs.

Single draws are compared in tests/kernel_checks/test_cases.py.
"""

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import chi_square_score, lane_attention, random_decode

from fastgrpo.kernels import reference
from fastgrpo.kernels.decode import group_decode
from fastgrpo.kernels.sampling import sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 151_936
FILTERS = [{}, {"top_k": 50}, {"top_k": 1000}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.01},
           {"top_k": 20, "top_p": 0.95, "min_p": 0.01}]  # fmt: skip
HEADS = {"0.5B": ((14, 2), 64), "1.5B": ((12, 2), 128), "7B": ((28, 4), 128), "Qwen3-0.6B": ((16, 8), 128)}


def random_logits(rows):
    return torch.randn(rows, VOCAB, device="cuda") * 2.5


def random_groups(name, prompts, group, prompt_length, length, dtype=torch.bfloat16, layout="KC"):
    """Return a case of ragged lengths, with lanes in any order, a lane without a prompt, and a prompt without lanes."""
    heads, depth = HEADS[name]
    order = torch.randperm(prompts * group)
    members = order.view(prompts, group)
    members[0, 0] = -1
    lengths = torch.randint(1, length + 1, (prompts * group,))
    prompt_lengths = torch.randint(prompt_length // 2, prompt_length + 1, (prompts,))
    lengths[0], prompt_lengths[0] = length, prompt_length
    members = torch.cat([members, torch.full((1, group), -1)])
    return random_decode(members.tolist(), [*prompt_lengths.tolist(), 7], lengths.tolist(), heads=heads, depth=depth,
                         dtype=dtype, layout=layout, device="cuda")  # fmt: skip


@pytest.mark.parametrize(
    "filters", [*FILTERS[:2], {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8}], ids=str
)
def test_draws_follow_the_distribution(filters):
    row = torch.randn(200, device="cuda")
    logits = row.expand(200_000, -1).contiguous()
    tokens, _, _ = sample(logits, torch.rand(200_000, device="cuda"), temperature=0.9, **filters)
    assert chi_square_score(tokens, row, 0.9, filters) < 3.72


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_are_the_same_in_any_batch(filters):
    logits, uniforms = random_logits(300), torch.rand(300, device="cuda")
    first, second = (sample(logits, uniforms, temperature=0.8, **filters) for _ in range(2))
    part = sample(logits[250:251], uniforms[250:251], temperature=0.8, **filters)
    assert all(torch.equal(a, b) and torch.equal(a[250:251], c) for a, b, c in zip(first, second, part, strict=True))


@pytest.mark.parametrize("size", (((4, 8), (512, 512)), ((16, 16), (2048, 1024)), ((1, 1), (100, 3000))), ids=str)
@pytest.mark.parametrize("layout", ("KC", "CK"))
@pytest.mark.parametrize("name", HEADS)
def test_group_decode_in_bf16(name, layout, size):
    """Against plain attention in fp32; PyTorch's own attention in bf16, lane by lane, is the measure."""
    (groups, lengths) = size
    case = random_groups(name, *groups, *lengths, layout=layout)
    ours = group_decode(**case).float()
    exact = {key: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in case.items()}
    true = reference.group_decode(**exact)
    plain = torch.stack([lane_attention(case, lane) for lane in range(len(true))]).float()
    ours, plain = ((x - true).norm().item() / true.norm().item() for x in (ours, plain))
    print(f"{name} {size}: {ours:.2e}, plain {plain:.2e}")
    assert ours <= 1.2 * plain + 1e-5


def test_slots_past_2_to_the_31_elements():
    """65 slots of 2 x 131,072 x 128: the last one begins at the element 2^31."""
    case = random_decode([[64]], [3], [0] * 64 + [5], heads=(4, 2), depth=128, dtype=torch.bfloat16, device="cuda")
    expected = group_decode(**case)
    for name in ("keys", "values"):
        large = torch.zeros(65, 2, 131_072, 128, dtype=torch.bfloat16, device="cuda")
        large[64, :, :5] = case[name][64, :, :5]
        case[name] = large
    torch.testing.assert_close(group_decode(**case), expected)


def calls():
    """Return the calls by name, each with the inputs that a step overwrites."""
    logits, uniforms = random_logits(32), torch.rand(32, device="cuda")
    case = random_groups("0.5B", 4, 8, 512, 256)
    found = {str(f): ([logits, uniforms], lambda f=f: sample(logits, uniforms, temperature=0.8, **f)) for f in FILTERS}
    found["greedy"] = [logits, uniforms], lambda: sample(logits, uniforms, temperature=0)
    tensors = [case["query"], case["keys"], case["lengths"], case["prompt_lengths"]]
    found["group_decode"] = tensors, lambda: (group_decode(**case),)
    return found


def test_no_wait_for_the_device():
    found = calls()
    for _, call in found.values():
        call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _, call in found.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graphs():
    """Two calls give the same bits; a captured call, replayed over new contents, gives what an eager call gives."""
    for name, (inputs, call) in calls().items():
        assert all(map(torch.equal, call(), call())), name
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = call()
        for tensor in inputs:
            tensor.copy_(tensor.flip(0))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(held, call(), strict=True)), name
