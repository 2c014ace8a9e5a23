"""A sharded policy computes on K ranks what the plain policy computes in one process; so do its whole copies.

As a script, `python test_shard.py FOLDER SIZE` forks SIZE ranks over gloo on the CPU, which make the checks.
"""

import functools
import json
import math
import sys
import tempfile
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from drawing import PROMPTS
from ranks import LIMIT, fork, forked
from torch.distributed.tensor import DTensor

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy import ref_model
from fastgrpo.policy.lora import ADAPTER, add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import FrozenCopy, Scoring, StreamedCopy, make_reference
from fastgrpo.policy.shard import shard
from fastgrpo.ranks import ALONE, join
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.trainer.optim import MasterAdamW

CHECKS, QUANTIZED = {}, "quantized_references"  # by name; and the one that needs torchao
LONG = "gradients_of_every_architecture"  # takes minutes, on 4 ranks only


def check(function):
    CHECKS[function.__name__] = function
    return function


def sample(prompt, completion, seed=0):
    ids = torch.randint(2, 60, (prompt + completion,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sample(ids[:prompt], ids[prompt:], 1.0)


# One rank gets 1 token, another 300; with two ranks one of them then has nothing left.
MICRO_BATCHES = [[sample(3, 1)], [sample(20, 300)], [sample(9, 4, seed=1), sample(9, 7, seed=1)]]


def model(name="qwen2", dtype=torch.float32, lora=False, **changes):
    made = tiny.model(name, **{"max_position_embeddings": 512, **changes}).to(dtype)
    if lora:
        add_lora(made, r=4, target_modules=["q_proj", "down_proj"])
        tiny.stir(made, ADAPTER, std=0.1)  # B = 0 would hide the gradient of A
    return made


def policies(ranks, name="qwen2", dtype=torch.float32, own_attention=False, lora=False, how=None, **changes):
    plain, other = (Policy(model(name, dtype, lora, **changes), own_attention) for _ in range(2))
    return plain, shard(other, ranks, dtype=dtype, **(how or {}))


def loss_of(policy, samples, factor=1.0):
    logps = policy.logps(Batch.pack(samples, policy.device))
    return factor * (logps * torch.linspace(0.5, 1.5, len(logps))).sum()


def passes(policy, ranks, micro_batches, factor=1.0):
    """Forward and backward passes of this rank, as many as every rank makes; returns the sum of its losses."""
    mine, total = micro_batches[ranks.rank :: ranks.size], None
    for i in range(math.ceil(len(micro_batches) / ranks.size)):
        loss = policy.within(lambda i=i: loss_of(policy, mine[i], factor) if i < len(mine) else policy.idle_loss())
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def distance(mine, theirs):
    pairs = list(zip(mine, theirs, strict=True))
    error = math.sqrt(sum((whole(a).double() - b.double()).square().sum().item() for a, b in pairs))
    return error / (math.sqrt(sum(b.double().square().sum().item() for _, b in pairs)) or 1.0)


def trained(policy):
    return [parameter for parameter in policy.module.parameters() if parameter.requires_grad]


def compare_gradients(ranks, plain, sharded, micro_batches=MICRO_BATCHES, kind=None):
    expected = torch.stack([loss_of(plain, samples, 1.0) for samples in micro_batches]).sum()
    expected.backward()
    total = passes(sharded, ranks, micro_batches)
    got = MasterAdamW(sharded.module, learning_rate=1.0).reduce(ranks, total)
    assert abs(got / expected - 1) < 1e-6, (kind, got, expected)
    # Nothing may depend on a parameter, such as a bias that the softmax takes away.
    pairs = [(g.grad, e.grad) for g, e in zip(trained(sharded), trained(plain), strict=True) if e.grad is not None]
    assert distance(*zip(*pairs, strict=True)) < 1e-6, kind
    for gradient, expected in pairs:
        assert distance([gradient], [expected]) < 1e-5 or expected.norm() < 1e-4, kind


KINDS = (  # two ranks try the first four
    {"name": "qwen3", "final_logit_softcapping": 5.0, "gradient_checkpointing": True},
    {"how": {"reshard_after_forward": False}, "tie_word_embeddings": True},
    {"how": {"cpu_offload": True}, "tie_word_embeddings": True, "gradient_checkpointing": True},
    {"lora": True, "gradient_checkpointing": True},
    {}, {"name": "llama", "attention_bias": True}, {"name": "smollm3"}, {"lora": True},
    {"how": {"reshard_after_forward": False}, "gradient_checkpointing": True},
    {"own_attention": True, "gradient_checkpointing": True},
)  # fmt: skip


@check
def gradients(ranks):
    """Of several architectures, however layers are held, and of a rank without samples."""
    for kind in KINDS[: 4 if ranks.size == 2 else None]:
        compare_gradients(ranks, *policies(ranks, **kind), kind=kind)
    compare_gradients(ranks, *policies(ranks), MICRO_BATCHES[1:2], "a rank without samples")


@check
def an_update_that_is_not_finite_on_one_rank(ranks):
    _, sharded = policies(ranks)
    optimizer = MasterAdamW(sharded.module, learning_rate=1e-3)
    optimizer.step(0.0, optimizer.reduce(ranks, passes(sharded, ranks, MICRO_BATCHES)))
    before = [whole(parameter).clone() for parameter in trained(sharded)]
    moments = [whole(state["exp_avg"]).clone() for state in optimizer.adamw.state.values()]
    bad = ranks.rank == min(ranks.size, len(MICRO_BATCHES)) - 1
    total = passes(sharded, ranks, MICRO_BATCHES, factor=math.inf if bad else 1.0)
    assert optimizer.step(1.0, optimizer.reduce(ranks, total)).isnan()
    assert all(map(torch.equal, before, map(whole, trained(sharded))))
    assert all(map(torch.equal, moments, (whole(state["exp_avg"]) for state in optimizer.adamw.state.values())))
    assert all(parameter.grad is None for parameter in trained(sharded))


@check
def bf16_passes_have_fp32_masters(ranks):
    """Gradients of bf16 passes are added up in fp32, as the masters of the plain policy do it."""
    plain, sharded = policies(ranks, dtype=torch.bfloat16, tie_word_embeddings=True)
    assert (sharded.dtype, sharded.device.type) == (torch.bfloat16, "cpu")
    assert {parameter.dtype for parameter in sharded.module.parameters()} == {torch.float32}
    buffers = dict(sharded.module.named_buffers())
    assert buffers and all(torch.equal(value, plain.module.get_buffer(name)) for name, value in buffers.items())
    settings = {"learning_rate": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
    truth, optimizer = MasterAdamW(plain.module, **settings), MasterAdamW(sharded.module, **settings)
    assert not optimizer.pairs
    for _ in range(3):
        with truth.receiving():
            for samples in MICRO_BATCHES:
                loss_of(plain, samples).backward()
        total = passes(sharded, ranks, MICRO_BATCHES)
        assert distance([ours.grad for ours in optimizer.masters], [theirs.grad for theirs in truth.masters]) < 1e-5
        assert abs(optimizer.step(1.0, optimizer.reduce(ranks, total)) / truth.step(1.0) - 1) < 1e-5
    apart = [(whole(a) - b).abs().max().item() for a, b in zip(optimizer.masters, truth.masters, strict=True)]
    assert max(apart) < 1e-4, max(apart)


@check
def gradients_of_every_architecture(ranks):
    """Also of mixtures of experts, some of which see no token of a rank, and of models with layers of several kinds."""
    from benchmarks.architectures import ARCHITECTURES, tiny_model  # its imports take long
    from fastgrpo.policy.load import prepare

    warnings.simplefilter("ignore", UserWarning)  # torch warns of layers that return a view, as OPT's do
    tried, wrong = [], {}
    for name in ARCHITECTURES:
        try:
            plain, other = (prepare(tiny_model(name, max_position_embeddings=512), True, True) for _ in range(2))
        except ValueError:
            continue  # refused in one process too
        tried.append(name)
        try:
            compare_gradients(ranks, plain, shard(other, ranks, dtype=torch.float32))
        except AssertionError as error:
            wrong[name] = repr(error)
    assert not wrong and len(tried) > 20, (wrong, tried)


SAMPLES = [sample(4, 5, seed) for seed in range(7)]
SCORING = Scoring(1.0, 16)


def update(policy, ranks):
    optimizer = MasterAdamW(policy.module, learning_rate=1e-2)
    optimizer.step(1.0, optimizer.reduce(ranks, passes(policy, ranks, MICRO_BATCHES)))


def plain_copy(policy, ranks, **kind):
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
        if ranks.rank == 0:  # the engine of one rank alone: nothing is sent
            with copy.gather() as inner:
                assert [w.data_ptr() for w in inner] == [w.data_ptr() for w in weights]
        assert taken() == size
    assert taken() < size / 100
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
        assert all(map(torch.equal, weights, plain_copy(sharded, ranks).parameters()))


def same_scores(got, expected):
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, expected, strict=True))


def gathers_of(policy):
    """A list that grows whenever the whole weights of a sharded policy are gathered."""
    gathers, inner = [], policy.whole_parameters
    policy.whole_parameters = lambda: gathers.append(1) or inner()
    return gathers


@check
def references(ranks):
    """A copy is sharded as the policy is, without a gather, and stays what it was; a moving one follows its shards."""
    for device, kind, how in ((None, FrozenCopy, {"cpu_offload": True}), ("cpu", StreamedCopy, {})):
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
def states_of_references_inside_of_a_pass(ranks):
    """As the full KL takes them: they outlive the reference's pass. A head with its adapters off is not copied."""
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
        assert distance([ours.grad for ours in trained(sharded)], [theirs.grad for theirs in trained(plain)]) < 1e-5


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
            with pytest.raises(ValueError, match="other names or shapes"):
                sharded.load_state_dict(broken)


@check
def quantized_references(ranks):
    plain, sharded = policies(ranks, hidden_size=64)
    gathers = gathers_of(sharded)
    truth, reference = (make_reference(policy, 0.1, quantization="int8") for policy in (plain, sharded))
    assert type(reference) is ref_model.QuantizedCopy and len(gathers) == 1
    got, expected = (copied.measure(SAMPLES, SCORING)["ref/kl_error"] for copied in (reference, truth))
    assert got == expected
    same_scores(reference.score(SAMPLES[ranks.rank :], SCORING, passes=7), truth.score(SAMPLES[ranks.rank :], SCORING))


@functools.cache
def results_of(size):
    """Fork the ranks once for all checks. Returns for each rank {check: its traceback, empty where it passed}."""
    with tempfile.TemporaryDirectory() as folder:
        forked(__file__, Path(folder), size)
        files = [Path(folder, f"{rank}.jsonl") for rank in range(size)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return [dict(map(json.loads, of_rank)) for of_rank in lines]


def make(folder):
    warnings.simplefilter("error", UserWarning)
    torch.use_deterministic_algorithms(True, warn_only=True)  # NaN in uninitialised memory
    ranks = join("cpu", LIMIT / 2)
    with open(f"{folder}/{ranks.rank}.jsonl", "w", buffering=1) as out:
        for name, function in CHECKS.items():
            if (name == LONG and ranks.size != 4) or (name == QUANTIZED and not find_spec("torchao")):
                continue
            try:
                function(ranks)
                out.write(json.dumps([name, ""]) + "\n")
            except BaseException:
                out.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise  # the other ranks may be anywhere now


CASES = [(name, size) for size in (2, 1, 4) for name in CHECKS if name != LONG or size == 4]


@pytest.mark.parametrize("name, size", [pytest.param(*x, marks=() if x[1] == 2 else pytest.mark.slow) for x in CASES])
def test_shards(name, size):
    if name == QUANTIZED and not find_spec("torchao"):
        pytest.skip("the quantization extra is not installed")
    for rank, of_rank in enumerate(results_of(size)):
        assert name in of_rank, f"rank {rank} ended with {list(of_rank)[-1:]}"
        assert not of_rank[name], f"rank {rank}: {of_rank[name]}"


def test_rejects_a_model_that_keeps_weights_in_another_dtype():
    """transformers keeps some weights of a bf16 model in fp32, such as the routers of ERNIE 4.5."""
    model = tiny.model().to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.float()
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight in torch.float32.*--dtype"):
        shard(Policy(model), ALONE, dtype=torch.bfloat16)


if __name__ == "__main__":
    folder, size = sys.argv[1], int(sys.argv[2])
    fork({"checks": functools.partial(make, folder)}, folder, size, limit=len(CHECKS) * LIMIT)
