"""No needless pass: the matrix products of an update, counted, against the list of those that it needs."""

from collections import Counter

import pytest
import tiny
import torch
from oracle import Products
from runs import make_trainer, samples_of
from updates import make_update, rising

from fastgrpo.data.records import Batch, Sample
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy


def policy(checkpointing=False):
    """Sizes that tell its weights apart, and from the numbers of tokens."""
    return tiny.model("llama", hidden_size=320, intermediate_size=448, vocab_size=832, num_attention_heads=4,
                      gradient_checkpointing=checkpointing)  # fmt: skip


def counted(model, groups, beta=0.0, **settings):
    update = make_update(Policy(model), Objective(beta=beta), **settings)
    with Products() as products:
        update(groups)
    # Products with a weight have three sizes, in the forward pass and in the backward one; attention's have a batch.
    return Counter(tuple(sorted(shape)) for shape in products.shapes if len(shape) == 3)


def sizes(samples):
    batch = Batch.pack(samples, "cpu")
    return len(batch.input_ids), len(batch.targets)


def needed(model, samples, passes):
    """`passes` products with every weight, for these samples in one batch."""
    tokens, rows = sizes(samples)
    layers = [module for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)]
    counts = Counter()
    for layer in layers:
        counts[tuple(sorted((tokens, *layer.weight.shape)))] += passes
    counts[tuple(sorted((rows, *Policy.of(model).head.weight.shape)))] += passes
    return counts


def with_gradient(samples):
    return [sample for sample in samples if sample.advantage != 0]


def test_a_first_update_without_kl_runs_one_forward_and_one_backward_pass():
    model, samples = policy(), samples_of()
    idle = [Sample(s.prompt_ids, s.ids, 0.0) for s in samples_of(seed=1)]
    products = counted(model, [samples, idle])
    assert len(with_gradient(samples)) == len(samples) - 1
    assert products == needed(model, with_gradient(samples), 3)  # no old, no reference, nothing for idle groups


def test_checkpointing_recomputes_layers_but_not_the_head():
    model, samples = policy(checkpointing=True), with_gradient(samples_of())
    tokens, rows = sizes(samples)
    expected = needed(model, samples, 4)
    expected[tuple(sorted((rows, *Policy.of(model).head.weight.shape)))] -= 1
    for layer in model.base_model.layers:  # its last product is no one's input again
        expected[tuple(sorted((tokens, *layer.mlp.down_proj.weight.shape)))] -= 1
    assert counted(model, [samples]) == expected


def test_the_reference_runs_once_per_rollout():
    model, samples = policy(), samples_of()
    products = counted(model, [samples], beta=0.1, num_iterations=2)
    assert products == needed(model, samples, 1 + 3 * 2)  # and no old pass: the first one gives it


def test_old_log_probs_are_computed_only_for_later_minibatches():
    model, samples = policy(), with_gradient(samples_of())
    products = counted(model, [samples[:2], samples[2:]], updates_per_rollout=2)
    assert products == needed(model, samples[:2], 3) + needed(model, samples[2:], 4)


def test_with_adapters_the_base_and_the_head_have_no_weight_gradient():
    model, samples = policy(), with_gradient(samples_of())
    once, tokens = needed(model, samples, 1), sizes(samples)[0]
    add_lora(model, r=8, target_modules=("all-linear",))
    expected = once + once  # forward, and the gradient of the input
    layers = dict(model.base_model.named_modules())
    for name, layer in layers.items():
        if "lora_" in name and isinstance(layer, torch.nn.Linear):
            expected[tuple(sorted((tokens, *layer.weight.shape)))] += 3
    # Nothing before the first layer is trained: of what it makes from its input, no gradient goes further.
    for projection in ("q_proj", "k_proj", "v_proj"):
        layer = layers[f"layers.0.self_attn.{projection}"]
        expected[tuple(sorted((tokens, *layer.weight.shape)))] -= 1
        expected[tuple(sorted((tokens, *layer.lora_A["default"].weight.shape)))] -= 1
    assert counted(model, [samples]) == expected


@pytest.mark.parametrize("coef, measured", [(0.0, [False, False, True, True]), (0.01, [True] * 4)])
def test_entropy_is_measured_in_steps_that_are_logged_or_need_it(tmp_path, coef, measured):
    trainer = make_trainer(tmp_path, rising, logging_steps=3, max_steps=4, entropy_coef=coef)
    assert ["entropy" in trainer.step() for _ in range(4)] == measured
