"""A sharded policy computes on K ranks what the plain policy computes in one process; so do its whole copies."""

import pytest
import ranked
import tiny
import torch

from fastgrpo.policy.model import Policy
from fastgrpo.policy.shard import shard
from fastgrpo.ranks import ALONE

CHECKS = [name for module in ranked.MODULES for name in ranked.names(module)]
RARE = [name for module in ranked.MODULES for name in ranked.names(module, rare=True)]


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
@pytest.mark.parametrize("name", CHECKS)
def test_shards(name, size):
    ranked.passes(name, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_rarer_shards(name):
    if "quantized" in name:
        pytest.importorskip("torchao", reason="not installed (extra: quantization)")
    ranked.passes(name, 2, rare=True)


def test_rejects_a_model_that_keeps_weights_in_another_dtype():
    """transformers keeps some weights of a bf16 model in fp32, such as the routers of ERNIE 4.5."""
    model = tiny.model().to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.float()
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight in torch.float32.*--dtype"):
        shard(Policy(model), ALONE, dtype=torch.bfloat16)
