"""fp32 masters, clipping, schedules."""

import copy
from unittest.mock import Mock

import pytest
import tiny
import torch
from transformers import TrainingArguments

from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.trainer.optim import MasterAdamW, check_schedule, make_schedule


def test_micro_batches_accumulate_in_fp32():
    layer = torch.nn.Linear(1, 1).bfloat16()
    optimizer = MasterAdamW(layer, learning_rate=1e-3)
    layer.bias.requires_grad_(False)  # a script may freeze parameters later
    with optimizer.receiving():
        for value in [1.0] + [2**-9] * 64:  # each of the 64 alone would be rounded away next to 1
            (layer.weight.sum() * value).backward()
    assert optimizer.masters[0].grad.item() == 1 + 64 * 2**-9 and layer.weight.grad is None


def test_a_weight_that_was_changed_and_changed_back_keeps_its_exact_master():
    layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = MasterAdamW(layer, learning_rate=1.0)
    (master,), weight = optimizer.masters, layer.weight.data.clone()
    exact = master.data.mul_(1 + 2**-12).clone()
    layer.weight.data.zero_()
    with torch.no_grad():
        layer.weight.copy_(weight)
    with optimizer.receiving():
        assert torch.equal(master, exact) and not torch.equal(master.to(torch.float64), weight.double())


def test_two_trainers_of_a_model_update_it_in_turns():
    layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
    optimizers = [MasterAdamW(layer, learning_rate=0.25) for _ in range(2)]
    before = layer.weight.item()
    for optimizer in (*optimizers, *optimizers):
        layer.weight.sum().backward()  # of no trainer
        with optimizer.receiving():
            layer.weight.sum().backward()
        assert optimizer.step() == 1
    assert layer.weight.item() == pytest.approx(before - 1, abs=0.02)


def test_an_update_without_gradients_equals_one_with_zeros():
    optimizers = [MasterAdamW(torch.nn.ParameterList([torch.ones(2)]), learning_rate=0.1) for _ in range(2)]
    for gradient in (3.0, None):
        for i, optimizer in enumerate(optimizers):
            (master,) = optimizer.masters
            master.grad = torch.full((2,), gradient or 0.0) if gradient or i else None
            before = master.clone()
            assert optimizer.step() == pytest.approx((gradient or 0) * 2**0.5)
    assert torch.equal(*(optimizer.masters[0] for optimizer in optimizers)) and (master < before).all()


def step_8bit(optimizer, model, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    with optimizer.receiving():
        (factor * sum((p * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters())).backward()
    return optimizer.step()


def state_of(optimizer):
    """Every tensor and count, by name."""
    return {name: value for name, value in optimizer.named_state().items() if name != "groups"}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_8_bit_moments_train_skip_and_resume_to_the_bit(ranks):
    pytest.importorskip("bitsandbytes")
    model, plain = (tiny.model(hidden_size=64).bfloat16() for _ in range(2))
    optimizer = MasterAdamW(model, learning_rate=1e-3, weight_decay=0.1, optim="adamw_8bit")
    exact = MasterAdamW(plain, learning_rate=1e-3, weight_decay=0.1)
    start = torch.cat([master.detach().flatten() for master in optimizer.masters])
    come = optimizer.bytes_to_come(torch.device("cpu"))
    for seed in range(5):
        step_8bit(optimizer, model, seed), step_8bit(exact, plain, seed)
    held = [value for name, value in state_of(optimizer).items() if name.startswith("state")]
    assert {value.dtype for value in held} == {torch.uint8, torch.float32}
    assert come == 6 * len(start)  # an fp32 gradient and two moments of one byte
    moved, expected = (torch.cat([m.detach().flatten() for m in o.masters]) - start for o in (optimizer, exact))
    assert (moved - expected).norm() < 0.1 * expected.norm()

    before = {name: copy.deepcopy(value) for name, value in state_of(optimizer).items()}
    assert step_8bit(optimizer, model, 5, factor=torch.nan).isnan() and same(state_of(optimizer), before)

    resumed = tiny.model(hidden_size=64).bfloat16()
    resumed.load_state_dict(model.state_dict())
    other = MasterAdamW(resumed, learning_rate=1.0, optim="adamw_8bit")
    if ranks == 1:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        state = copy.deepcopy(optimizer.named_state())
        tensors = {name: state.pop(name) for name, value in [*state.items()] if isinstance(value, torch.Tensor)}
        other.make_room(set(tensors))
        for name in tensors:
            other.named_state()[name].copy_(tensors[name])
        other.load_named_state(state)
    assert same(state_of(other), before)
    for each, of in ((optimizer, model), (other, resumed)):
        step_8bit(each, of, 6)
    assert same(state_of(other), state_of(optimizer))


def rates_of(total, *how, **more):
    optimizer = MasterAdamW(torch.nn.Linear(2, 2), learning_rate=1.0)
    schedule, rates = make_schedule(optimizer, *how, total_steps=total, **more), []
    for _ in range(total + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.adamw.step()
        schedule.step()
    return rates


def test_the_state_of_other_parameters_is_refused():
    optimizer = MasterAdamW(tiny.model().bfloat16(), learning_rate=1.0)
    state = optimizer.state_dict()
    for other in ({**state, "masters": state["masters"][1:]}, {**state, "adamw": {"param_groups": [], "state": {}}}):
        with pytest.raises(ValueError, match="belongs to other parameters than the policy's"):
            optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="belongs to other parameters than the policy's"):
        optimizer.make_room({"master.other"})


def test_weight_decay_spares_norms_and_biases():
    module = torch.nn.Linear(2, 2)
    groups = MasterAdamW(module, learning_rate=1.0, weight_decay=0.1).adamw.param_groups
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.1, [2]), (0.0, [1])]


@pytest.mark.parametrize("share, total", [(0.05, 25), (0.07, 100), (0.01, 3)])
def test_a_share_of_warmup_is_as_long_as_transformers_makes_it(share, total):
    length = TrainingArguments(warmup_steps=share, use_cpu=True).get_warmup_steps(total)
    assert rates_of(total, "constant_with_warmup", warmup_steps=share).index(1.0) == length


def test_schedules_follow_transformers():
    expected = [0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]
    assert rates_of(10, "linear", warmup_steps=0.2) == pytest.approx(expected)
    further = {"min_lr_rate": 0.25}
    assert rates_of(4, "cosine_with_min_lr", warmup_steps=0, further=further)[-1] == 0.25
    with pytest.raises(ValueError, match=r"'linear' .*lr_scheduler_kwargs"):
        check_schedule("linear", further)
    for name in ("reduce_lr_on_plateau", "greedy"):
        with pytest.raises(ValueError, match="depends on a metric"):
            check_schedule(name)


def beside(others):
    """Rank 0 of two; the other one has gradients of ones for some of the masters, and a loss of 2."""
    ranks = Ranks(0, 2)
    ranks.gather = lambda value, what: [value, others]
    ranks.sum = Mock(side_effect=lambda tensors, what: [tensor.add_(1 + (tensor.ndim == 0)) for tensor in tensors])
    return ranks


def test_ranks_sum_gradients_and_skip_unused_parameters():
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)])
    optimizer = MasterAdamW(model, learning_rate=0.1, weight_decay=0.5)
    model[0].grad = torch.full((2, 2), 4.0)
    ranks = beside([True, True, False])  # the second one on the other rank alone, the third on none
    assert optimizer.reduce(ranks, torch.tensor(3.0)) == 5 and len(ranks.sum.call_args.args[0]) == 3
    assert (model[0].grad == 5).all() and (model[1].grad == 1).all() and model[2].grad is None
    optimizer.step()
    assert (model[2] == 1).all() and (model[1] < 1).all()
    assert optimizer.reduce(beside([False, True, False]), None) == 2
    assert optimizer.reduce(ALONE, None) is None
