"""Checks of what a sharded policy gives to others: its whole copy for rollouts, references, and whole weights."""

import importlib.util
import weakref

import pytest
import torch
from drawing import PROMPTS
from ranked import check
from sharded_updates import MICRO_BATCHES, distance, loss_of, model, passes, policies, sample, trained, whole
from torch.distributed.tensor import DTensor

from fastgrpo.data.records import Batch
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import (
    AdaptersOff,
    FrozenCopy,
    QuantizedCopy,
    Scoring,
    StreamedCopy,
    make_reference,
    score,
)
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.trainer.optim import MasterAdamW

SAMPLES = [sample(4, 5, seed) for seed in range(7)]
SCORING = Scoring(1.0, 16)


def update(policy, ranks):
    optimizer = MasterAdamW(policy.module, learning_rate=1e-2)
    total = optimizer.reduce(ranks, passes(policy, ranks, MICRO_BATCHES))
    optimizer.step(1.0, total)


def plain_copy(policy, ranks, **kind):
    """A plain policy with the whole weights of a sharded one."""
    plain = Policy(model(**kind))
    plain.load_state_dict(ranks.from_lead(policy.full_state_dict(), "weights"))
    return plain


def drawn(backend):
    sampling = SamplingParams(temperature=1.0, max_tokens=12, stop_token_ids=(1, 2, 3), seed=5)
    rollouts = backend.generate(PROMPTS, 3, sampling)
    return [rollout.ids for rollout in rollouts], torch.cat([rollout.logps for rollout in rollouts])


def same_draws(mine, theirs):
    """Memory may be aligned otherwise, which changes the last bits of products."""
    assert mine[0] == theirs[0]
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-5)


@check
def rollouts_of_the_whole_copy(ranks):
    """They are those of a plain policy with the same weights, before and after an update."""
    for kind in ({"tie_word_embeddings": True}, {"lora": True}):
        plain, sharded = policies(ranks, **kind)
        engine = RolloutEngine(sharded.for_rollouts)
        before = drawn(engine)
        same_draws(before, drawn(RolloutEngine(plain)))
        same_draws(drawn(HFBackend(sharded.for_rollouts)), drawn(HFBackend(plain)))
        update(sharded, ranks)
        with sharded.gather():
            after = drawn(engine)
        same_draws(after, drawn(RolloutEngine(plain_copy(sharded, ranks, **kind))))
        assert before[0] != after[0]


@check
def the_whole_copy_computes_what_the_shards_compute(ranks):
    """Also in bf16, where both round the same masters: weights are equal to the last bit."""
    batch = Batch.pack(SAMPLES, "cpu")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        _, sharded = policies(ranks, dtype=dtype)
        update(sharded, ranks)
        copy = sharded.for_rollouts
        with torch.no_grad(), sharded.gather():
            equal = [torch.equal(value, copy.module.get_parameter(name)) for name, value in sharded.whole_parameters()]
            assert all(equal) and len(equal) == len(list(copy.module.parameters()))
            expected, got = copy.logps(batch), sharded.within(lambda policy=sharded: policy.logps(batch))
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
            within = sharded.within(lambda policy=sharded: policy.head.weight.clone())
            assert torch.equal(within, copy.head.weight) and within.dtype == dtype


@check
def weights_lie_in_memory_during_a_phase_alone(ranks):
    _, sharded = policies(ranks, tie_word_embeddings=True)
    copy = sharded.for_rollouts
    size = sum(parameter.nbytes for parameter in copy.module.parameters())

    def taken():
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in copy.module.parameters()}
        return sum(storages.values())

    assert taken() < size / 100
    with sharded.gather() as weights:
        assert taken() == size
        held = weakref.ref(weights[0].untyped_storage())
        if ranks.rank == 0:  # the engine of one rank alone: nothing is sent
            with copy.gather() as inner:
                assert [w.data_ptr() for w in inner] == [w.data_ptr() for w in weights]
        assert taken() == size
        del weights
    assert taken() < size / 100 and held is not None
    embedding = copy.module.get_input_embeddings().weight
    assert embedding.shape == (64, 32) and embedding.isnan().all()


@check
def addresses_persist_where_graphs_read_them(ranks):
    _, sharded = policies(ranks)
    with sharded.gather(), sharded.for_rollouts.gather(keep=True) as weights:
        addresses = [weight.data_ptr() for weight in weights]
    update(sharded, ranks)
    with sharded.gather() as weights:
        assert [weight.data_ptr() for weight in weights] == addresses
        truth = plain_copy(sharded, ranks)
        assert all(map(torch.equal, weights, truth.parameters()))


@check
def an_update_while_requests_are_in_flight(ranks):
    _, sharded = policies(ranks)
    engine = RolloutEngine(sharded.for_rollouts)
    number = engine.add_request(PROMPTS[0], 2, SamplingParams(max_tokens=50, seed=0))
    engine.step()
    update(sharded, ranks)
    with pytest.raises(ValueError, match="the weights changed"):
        engine.step()
    engine.abort_request(number)


def same_scores(got, expected):
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, expected, strict=True))


@check
def scores_with_idle_passes(ranks):
    """Each rank scores its own number of samples: rank 0 has all of them, the others one or none."""
    plain, sharded = policies(ranks)
    mine = SAMPLES if ranks.rank == 0 else SAMPLES[: ranks.rank - 1]
    got = score(sharded, mine, SCORING, passes=7)
    same_scores(got, score(plain, mine, SCORING))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.module.parameters())  # nothing stays whole
    loss = sharded.within(lambda: loss_of(sharded, SAMPLES))
    score(sharded, mine, SCORING, passes=7)  # between a forward and its backward pass
    loss.backward()
    loss_of(plain, SAMPLES).backward()
    expected = [ranks.size * parameter.grad for parameter in trained(plain)]
    assert distance([parameter.grad for parameter in trained(sharded)], expected) < 1e-6


def gathers_of(policy):
    """A list that grows whenever the whole weights of a sharded policy are gathered."""
    gathers, inner = [], policy.whole_parameters
    policy.whole_parameters = lambda: gathers.append(1) or inner()
    return gathers


@check
def references(ranks):
    """A copy is sharded as the policy is, and stays what it was; a moving one follows by each rank's own shards.

    Also to make it nothing is gathered.
    """
    for device, kind in ((None, FrozenCopy), ("cpu", StreamedCopy)):
        for how in ({}, {"cpu_offload": True}):
            plain, sharded = policies(ranks, tie_word_embeddings=True, how=how)
            gathers = gathers_of(sharded)
            truth, reference = (make_reference(p, 0.1, device=device, moving=True) for p in (plain, sharded))
            assert type(reference) is kind and reference.policy.lockstep == (device is None)
            assert len(gathers) == (device is not None)
            expected = truth.score(SAMPLES, SCORING)
            update(sharded, ranks)
            same_scores(reference.score(SAMPLES[ranks.rank :], SCORING, passes=7), expected[ranks.rank :])
            plain.load_state_dict(ranks.from_lead(sharded.full_state_dict(), "weights"))
            for copied, policy in ((truth, plain), (reference, sharded)):
                copied.sync(policy, 0.3)
            moved = [whole(parameter) for parameter in reference.policy.module.parameters()]
            assert all(map(torch.equal, moved, truth.policy.module.parameters()))
            state = {name: value.clone() for name, value in reference.state_dict().items()}
            reference.sync(sharded, 1.0)
            reference.load_state_dict(state)
            same_scores(reference.score(SAMPLES, SCORING), truth.score(SAMPLES, SCORING))


@check
def adapters_off_as_the_reference(ranks):
    plain, sharded = policies(ranks, lora=True)
    truth, reference = make_reference(plain, 0.1), make_reference(sharded, 0.1)
    assert type(reference) is AdaptersOff
    mine = SAMPLES[3 * ranks.rank :]
    same_scores(reference.score(mine, SCORING, passes=7), truth.score(mine, SCORING))
    assert not torch.allclose(score(sharded, SAMPLES, SCORING)[0], truth.score(SAMPLES, SCORING)[0], atol=1e-3)


@check
def states_of_references_inside_of_a_pass(ranks):
    """As the KL of the full distributions takes them: what they return outlives the reference's own pass.

    The head of the policy itself, with its adapters off, is whole anyway and is not copied.
    """
    for kind in ({}, {"lora": True}):
        plain, sharded = policies(ranks, gradient_checkpointing=True, **kind)
        truth, reference = make_reference(plain, 0.1), make_reference(sharded, 0.1)
        batch = Batch.pack(SAMPLES, "cpu")

        def loss(policy, of_reference, batch=batch, shared=bool(kind)):
            states, head = of_reference.states(batch)
            assert (head.weight.data_ptr() == policy.head.weight.data_ptr()) == shared
            return (policy.completion_states(batch) @ policy.head.weight.T * (states @ head.weight.T)).mean()

        expected = loss(plain, truth)
        expected.backward()
        if ranks.rank == 0:
            got = sharded.within(lambda s=sharded, r=reference: loss(s, r))
            assert abs(got / expected - 1) < 1e-5
        else:
            got = sharded.within(lambda s=sharded, r=reference: (r.idle(), s.idle_loss())[1])
        got.backward()
        MasterAdamW(sharded.module, learning_rate=1.0).reduce(ranks, got)
        gradients = [parameter.grad for parameter in trained(sharded)], [p.grad for p in trained(plain)]
        assert distance(*gradients) < 1e-5


@check
def whole_weights(ranks):
    """By their own names, on rank 0 alone, in memory that is kept; what is loaded into the shards comes out again."""
    for kind in ({"tie_word_embeddings": True}, {"dtype": torch.bfloat16}, {"lora": True}):
        plain, sharded = policies(ranks, **kind)
        expected, got = plain.state_dict(), sharded.full_state_dict()
        assert list(sharded.state_dict()) == list(expected)
        assert list(got) == (list(expected) if ranks.rank == 0 else [])
        assert all(torch.equal(got[name], expected[name]) and got[name].dtype == plain.dtype for name in got)
        other, before = {name: value + 1 for name, value in expected.items()}, got
        sharded.load_state_dict(other)
        got = sharded.full_state_dict()
        assert "lora" in kind or all(got[name].data_ptr() == before[name].data_ptr() for name in got)
        assert all(torch.equal(got[name], other[name]) for name in got)
        update(sharded, ranks)  # it still computes
        for broken in ({}, {**other, next(iter(other)): torch.zeros(3)}):
            with pytest.raises(ValueError, match="other modules or shapes"):
                sharded.load_state_dict(broken)


@check(rare=True)
def quantized_references(ranks):
    if importlib.util.find_spec("torchao") is None:
        return  # the test skips
    plain, sharded = policies(ranks, hidden_size=64)
    gathers = gathers_of(sharded)
    truth, reference = (make_reference(policy, 0.1, quantization="int8") for policy in (plain, sharded))
    assert type(reference) is QuantizedCopy and len(gathers) == 1
    got, expected = (copied.measure(SAMPLES, SCORING)["ref/kl_error"] for copied in (reference, truth))
    assert got == expected
    same_scores(reference.score(SAMPLES[ranks.rank :], SCORING, passes=7), truth.score(SAMPLES[ranks.rank :], SCORING))
