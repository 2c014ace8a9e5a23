"""Liger's settings and tensors in our terms: an objective, advantages, old log-probs, and the tokens of the step."""

import math
import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastgrpo import Objective
from fastgrpo.integrations.liger import objective_of, step_tokens, translate

MASK = torch.tensor([[True, True, False], [True, False, False]])
ADVANTAGES = torch.tensor([2.0, -1.0])
OLD = torch.full((2, 3), -3.0)


def test_settings_that_we_have_pass():
    assert objective_of("grpo", 0.3, epsilon=0.1, beta=0.2, importance_sampling_level="sequence") == Objective(
        "grpo", "sequence", 0.1, 0.3, beta=0.2
    )


def test_luspo_by_tokens_is_a_sum_over_them():
    objective = objective_of("luspo", 0.2, importance_sampling_level="token")
    mask, starts = MASK.flatten(), torch.tensor([0, 3, 6])
    assert torch.equal(objective.token_weights(mask, starts), mask / 2)
    assert objective_of("luspo", 0.2, importance_sampling_level="sequence").loss_type == "luspo"


def test_a_cap_below_1():
    objective = objective_of("cispo", 0.5, beta=0.2, use_bias_correction_kl=True, importance_sampling_level="token")
    assert objective.epsilon_high == 1.0
    terms = translate(objective, 0.5, ADVANTAGES, MASK, OLD, None)
    assert torch.equal(terms.advantages, ADVANTAGES / 2) and torch.equal(terms.old_logps, OLD + math.log(0.5))
    assert (terms.objective.beta, terms.kl_scale, terms.all_clipped) == (0.1, 0.5, False)
    first = translate(objective, 0.5, ADVANTAGES, MASK, None, None)
    assert (first.objective.beta, first.kl_scale, first.old_logps, first.all_clipped) == (0.2, 1.0, None, True)
    at_1 = translate(objective_of("cispo", 1.0, importance_sampling_level="token"), 1.0, ADVANTAGES, MASK, OLD, None)
    assert torch.equal(at_1.advantages, ADVANTAGES) and torch.equal(at_1.old_logps, OLD)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_weights_against_the_sampler_go_into_the_advantages(shape):
    ratio = torch.rand(shape)
    terms = translate(Objective(), 0.2, ADVANTAGES.bfloat16(), MASK, None, ratio)
    expected = ADVANTAGES[:, None] * (ratio if len(shape) == 2 else ratio[:, None])
    assert torch.equal(terms.advantages, expected.expand(2, 3)) and terms.sampler_logps is None


def test_weights_of_vespo_go_into_its_own():
    objective = objective_of("vespo", 0.2, importance_sampling_level="token")
    ratio = torch.tensor([0.25, 3.0])
    terms = translate(objective, 0.2, ADVANTAGES, MASK, OLD, ratio)
    weights = (OLD - terms.sampler_logps).masked_fill(~MASK, 0).sum(1).exp()
    torch.testing.assert_close(weights, ratio)  # the product over the tokens that count
    first = translate(objective, 0.2, ADVANTAGES, MASK, None, ratio)
    phi = torch.stack(
        [torch.exp(3 + 2 * ratio[0].log() - 3 * ratio[0]), torch.exp(2 + 3 * ratio[1].log() - 2 * ratio[1])]
    )
    torch.testing.assert_close(first.advantages, (ADVANTAGES * phi)[:, None].expand(2, 3))
    assert first.objective.loss_type == "cispo" and first.old_logps is first.sampler_logps is None


def test_one_process_counts_as_the_loss_does():
    for count in (None, 7, torch.tensor(7)):
        assert step_tokens(Objective(), MASK, count) is count


def count_on_rank(rank, folder):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mask = MASK if rank == 0 else MASK[:1]  # 3 and 2 tokens
    counted = [float(step_tokens(Objective(), mask, count)) for count in (None, 7, torch.tensor(7))]
    if rank == 0:  # an objective that does not read the count asks nobody: the other rank makes no call
        counted.append(step_tokens(Objective("bnpo"), mask, None))
    Path(folder, str(rank)).write_text(repr(counted))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_divide_by_two(tmp_path):
    """DDP averages the gradients: each process divides by the tokens of all over the processes."""
    multiprocessing.set_forkserver_preload(["torch", "fastgrpo.loss"])
    mp.start_processes(count_on_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["[2.5, 3.5, 3.5, None]", "[2.5, 3.5, 3.5]"]


@pytest.mark.parametrize(
    ("loss_type", "unread"),
    [
        ("dapo", {"vespo_k_neg": -1.0, "sapo_temperature_pos": 0.0}),
        ("cispo", {"epsilon": 1.5}),
        ("sapo", {"epsilon": 1.5, "epsilon_high": -2.0}),
        ("vespo", {"epsilon": 1.5, "vespo_lambda_pos": 0.0}),
    ],
)
def test_settings_that_are_not_read_may_have_any_value(loss_type, unread):
    knobs = {"epsilon": 0.2, "vespo_lambda_pos": 3.0, "vespo_lambda_neg": 2.0, "importance_sampling_level": "token"}
    made = objective_of(loss_type, unread.pop("epsilon_high", 1.2), **knobs | unread)
    assert made.loss_type == loss_type and made.vespo_lambda_pos == (1e-4 if loss_type == "vespo" else 3.0)
