"""Layers that pass through two buffers: the same results, in order, and nothing stays on the device.

On a CPU everything runs but the side stream and the pinned memory, which the gpu test covers.
"""

from itertools import pairwise

import pytest
import tiny
import torch
from runs import samples_of

from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import FrozenCopy, HostWeights, LayerStream, Scoring, StreamedCopy, frozen_copy, score

NAMES = ["qwen2", "qwen3", "llama", "smollm3-like"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_streamed_equals_resident(name, layers):
    policy = Policy(tiny.model(name, num_hidden_layers=layers))
    resident, streamed = FrozenCopy(policy), StreamedCopy(policy)
    for max_tokens in (10_000, 12):  # one pass, and several
        expected = resident.score(samples_of(), Scoring(0.9, max_tokens))
        for got, want in zip(streamed.score(samples_of(), Scoring(0.9, max_tokens)), expected, strict=True):
            assert torch.equal(got, want)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_layer_runs_from_one_of_two_buffers_which_take_turns():
    reference = StreamedCopy(Policy(tiny.model(num_hidden_layers=5)))
    stream, seen = reference.stream, []
    layers = reference.policy.module.base_model.layers
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: seen.append({storage(p) for p in layer.parameters()}))
    with reference.ready():
        buffers = {storage(buffer) for buffer in stream.buffers}
        score(reference.policy, samples_of(), Scoring(1.0, 12))
        assert storage(reference.policy.module.lm_head.weight) not in {storage(stream.rest.host)} | buffers
    assert len(seen) > 10 and len(buffers) == 2
    assert all(len(one) == 1 and one <= buffers for one in seen)
    assert all(one != following for one, following in pairwise(seen))
    assert stream.buffers is None  # and afterwards all lies on the host again
    for weights in (stream.rest, *stream.layers):
        assert {storage(p) for p in weights.parameters} == {storage(weights.host)}


def test_a_pass_that_fails_leaves_the_weights_whole():
    model = tiny.model()
    reference = StreamedCopy(Policy(model))
    expected = reference.score(samples_of(), Scoring(1.0, 10_000))
    hook = reference.policy.module.base_model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reference.score(samples_of(), Scoring(1.0, 10_000))
    hook.remove()
    for name, parameter in model.named_parameters():
        assert torch.equal(reference.policy.module.get_parameter(name), parameter)
    assert all(
        torch.equal(a, b) for a, b in zip(reference.score(samples_of(), Scoring(1.0, 10_000)), expected, strict=True)
    )


def test_layers_out_of_order_are_an_error():
    model = frozen_copy(tiny.model(), "cpu")
    stream = LayerStream(model, "cpu")
    with stream.ready(), pytest.raises(RuntimeError, match="layer 1 runs, but layer 0 was fetched"):
        stream._enter(1)


def test_packing_keeps_every_dtype():
    values = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2, 2).double()]
    parameters = [torch.nn.Parameter(value.clone(), requires_grad=False) for value in values]
    packed = HostWeights(parameters, pin=False)
    buffer = packed.host.clone()
    packed.attach(buffer)
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.dtype == value.dtype and torch.equal(parameter, value)
        assert storage(parameter) == storage(buffer)


@pytest.mark.gpu
def test_on_a_gpu_two_layers_are_there_at_most_and_afterwards_none():
    model = tiny.model(num_hidden_layers=12, hidden_size=512, intermediate_size=2048).cuda().bfloat16()
    resident, streamed = FrozenCopy(Policy(model)), StreamedCopy(Policy(model))
    expected = resident.score(samples_of(), Scoring(0.9, 12))
    layer, rest = (len(weights.host) for weights in (streamed.stream.layers[0], streamed.stream.rest))
    assert streamed.stream.layers[0].host.is_pinned()
    del resident
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        got = streamed.score(samples_of(), Scoring(0.9, 12))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.cuda.max_memory_allocated() - before < 2 * layer + rest + 2**23
    del got
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20
