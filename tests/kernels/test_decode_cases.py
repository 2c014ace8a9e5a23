"""The judge of draws finds what no uniform could have drawn."""

import decode_cases
import pytest
import torch

from fastgrpo.kernels import reference


@pytest.mark.parametrize("filters", ({}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.01}), ids=str)
def test_the_reference_is_right_and_other_tokens_are_not(filters):
    logits, uniforms = torch.randn(6, 40) * 2, torch.linspace(0.1, 0.9, 6)
    tokens, logps, kept = reference.sample(logits, uniforms, temperature=0.7, **filters)
    right, judged = decode_cases.draw_errors((tokens, logps, kept), logits, uniforms, temperature=0.7, **filters)
    assert judged == 1 and all(error <= allowed for error, allowed in right.values())
    wrong = logits.argmin(-1)
    errors, _ = decode_cases.draw_errors((wrong, logps, kept), logits, uniforms, temperature=0.7, **filters)
    assert errors["interval"][0] > errors["interval"][1] and errors["logps"][0] > errors["logps"][1]
    errors, _ = decode_cases.draw_errors((tokens, logps, kept + 0.01), logits, uniforms, temperature=0.7, **filters)
    assert errors["kept"][0] > errors["kept"][1]


def test_greedy():
    logits, uniforms = torch.randn(6, 40), torch.rand(6)
    drawn = reference.sample(logits, uniforms, temperature=0)
    assert decode_cases.draw_errors(drawn, logits, uniforms, temperature=0)[0]["greedy"] == (0, 0)
    wrong = (logits.argmin(-1), *drawn[1:])
    assert decode_cases.draw_errors(wrong, logits, uniforms, temperature=0)[0]["greedy"][0] == 1


def test_attention_of_a_lane_is_the_references():
    case = decode_cases.random_decode([[0, -1], [2, 1]], [5, 3], [4, 1, 2], heads=(4, 2), depth=8)
    expected = reference.group_decode(**case)
    for lane in range(3):
        torch.testing.assert_close(decode_cases.lane_attention(case, lane), expected[lane])
