"""A sharded policy computes on K ranks what the plain policy computes in one process."""

import pytest
import ranked
import tiny
import torch

from fastgrpo.policy.model import Policy
from fastgrpo.policy.shard import shard
from fastgrpo.ranks import ALONE


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("name", ranked.names("sharded_updates"))
def test_shards(name, size):
    ranked.passes(name, size)


@pytest.mark.slow
@pytest.mark.parametrize("module", ranked.MODULES)
def test_four_ranks(module):
    for name in ranked.names(module):
        ranked.passes(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranked.names("sharded_updates", rare=True))
def test_rarer_shards(name):
    ranked.passes(name, 2, rare=True)


def test_a_model_that_keeps_weights_in_another_dtype_is_refused():
    """transformers keeps some weights of a bf16 model in fp32, such as the routers of ERNIE 4.5."""
    model = tiny.model().to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.float()
    kept = r"keeps 1 weights in another one \(model.layers.1.mlp.up_proj.weight in torch.float32, ...\); take --dtype"
    with pytest.raises(ValueError, match=kept):
        shard(Policy(model), ALONE, dtype=torch.bfloat16)
