"""The launches of a decode step are those of the committed table, which `make launches` writes."""

import json
from pathlib import Path

import pytest
import torch
import triton

from benchmarks.launches import launches, table

TABLE = json.loads((Path(__file__).parent / "launches.json").read_text())


def test_without_liger():
    counted = table(liger=False)
    assert counted == {name: counts for name, counts in TABLE.items() if "liger" not in name}
    assert counted["qwen2 triton"]["a layer"] == 42


def test_with_liger():
    pytest.importorskip("liger_kernel")
    counted = table(liger=True)
    assert counted == {name: counts for name, counts in TABLE.items() if "liger" in name}
    assert counted["qwen2 triton liger"]["a layer"] == 18


@triton.jit
def _kernel():
    pass


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda x: x.view(3, 2).T[None].expand(3, 2, 3).detach(), []),
        (lambda x: torch.empty_like(x), []),
        (lambda x: x.new_empty(3), []),
        (lambda x: x.contiguous(), []),
        (lambda x: x.T.contiguous(), ["clone"]),
        (lambda x: x.add_(1), ["add_"]),
        (lambda x: x.to(torch.bfloat16), ["_to_copy"]),
        (lambda x: x[0].copy_(x[1]), ["copy_"]),
        (lambda x: torch.nn.functional.linear(x, x), ["mm"]),
        (lambda x: _kernel[(1,)](), ["_kernel"]),
    ],
)
def test_what_counts(call, expected):
    run = triton.runtime.jit.JITFunction.run
    with torch.inference_mode():
        x = torch.empty(2, 3, device="meta")
        with launches() as names:
            call(x)
    assert names == expected and triton.runtime.jit.JITFunction.run is run
