"""All ranks begin with the same weights, and what cannot be shared is refused before anything is loaded."""

import pytest
import tiny
import torch
from runs import lines, make_trainer
from safetensors.torch import load_file

from fastgrpo import GRPOConfig
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.trainer.setup import make_policy


def two(digest=None, weights=()):
    """Rank 1 of two, which gets from rank 0 what a test says."""

    def gather(value, what):
        compared = digest is not None and isinstance(value, dict) and "weights_of_the_model" in value
        return [{"weights_of_the_model": digest} if compared else value, value]

    ranks = Ranks(1, 2)
    ranks.gather = gather
    ranks.share = lambda tensors, what: [mine.detach().copy_(own) for mine, own in zip(tensors, weights, strict=True)]
    return ranks


def config(**settings):
    return GRPOConfig(device="cpu", dtype="float32", **settings)


def test_a_model_made_in_memory_gets_the_weights_of_rank_0():
    theirs = tiny.model(seed=0, vocab_size=258)
    weights = [*theirs.parameters(), *theirs.buffers()]
    made = make_policy(tiny.model(seed=1, vocab_size=258), tiny.tokenizer(), config(), two(weights=weights))
    assert all(torch.equal(*pair) for pair in zip(made.policy.parameters(), theirs.parameters(), strict=True))
    assert made.parallel == "ddp" and made.digest is None


def test_other_weights_on_another_rank_are_refused(tmp_path):
    path = tiny.save(tmp_path / "model")
    with pytest.raises(ValueError, match="the weights of the model differ between rank 0 and rank 1; give all ranks"):
        make_policy(str(path), None, config(), two(digest="0"))
    make_policy(str(path), None, config(), two())


def test_one_process_that_shards_to_the_host_trains_as_with_ddp(tmp_path):
    weights, logged = {}, {}
    try:
        for way in ("ddp", "fsdp2_offload"):
            trainer = make_trainer(tmp_path / way, parallel=way, dtype="bfloat16", beta=0.1, learning_rate=1e-2)
            trainer.train()
            weights[way] = load_file(tmp_path / way / "run" / "checkpoint-2" / "model.safetensors")
            logged[way] = [(row["reward"], row["kl"], row["grad_norm"]) for row in lines(tmp_path / way / "run")]
        assert trainer.policy.lockstep  # it is sharded
    finally:
        torch.distributed.destroy_process_group()
    assert logged["ddp"] == logged["fsdp2_offload"]
    assert all(torch.equal(weight, weights["ddp"][name]) for name, weight in weights["fsdp2_offload"].items())


def test_one_process_shards_only_to_the_host():
    with pytest.raises(ValueError, match="parallel=fsdp2 needs several processes, and there is only one"):
        make_policy(tiny.model(), tiny.tokenizer(), config(parallel="fsdp2"), ALONE)
