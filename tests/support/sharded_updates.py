"""Checks of updates of a sharded policy: K ranks do what one process does with the plain policy."""

import math
import warnings

import tiny
import torch
from ranked import check
from torch.distributed.tensor import DTensor

from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.lora import ADAPTER, add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.shard import shard
from fastgrpo.trainer.optim import MasterAdamW


def sample(prompt, completion, seed=0):
    ids = torch.randint(2, 60, (prompt + completion,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sample(ids[:prompt], ids[prompt:], 1.0)


# One rank gets 1 token, another 300; with two ranks one of them then has nothing left.
MICRO_BATCHES = [[sample(3, 1)], [sample(20, 300)], [sample(9, 4, seed=1), sample(9, 7, seed=1)]]


def model(name="qwen2", dtype=torch.float32, lora=False, **changes):
    made = tiny.model(name, **{"max_position_embeddings": 512, **changes}).to(dtype)
    if lora:
        add_lora(made, r=4, target_modules=["q_proj", "down_proj"])
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():  # B = 0 would hide the gradient of A
            for weight_name, weight in made.named_parameters():
                if ADAPTER in weight_name:
                    weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return made


def policies(ranks, name="qwen2", dtype=torch.float32, own_attention=False, lora=False, how=None, **changes):
    """The same policy, plain and sharded."""
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


def plain_passes(policy, micro_batches, factor=1.0):
    losses = [loss_of(policy, samples, factor) for samples in micro_batches]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).sum().detach()


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def distance(mine, theirs):
    """The norm of the difference of two lists of tensors, as a share of the norm of the second one."""
    pairs = list(zip(mine, theirs, strict=True))
    error = math.sqrt(sum((whole(a).double() - b.double()).square().sum().item() for a, b in pairs))
    return error / (math.sqrt(sum(b.double().square().sum().item() for _, b in pairs)) or 1.0)


def trained(policy):
    return [parameter for parameter in policy.module.parameters() if parameter.requires_grad]


def compare_gradients(ranks, plain, sharded, micro_batches=MICRO_BATCHES, kind=None):
    expected, total = plain_passes(plain, micro_batches), passes(sharded, ranks, micro_batches)
    got = MasterAdamW(sharded.module, learning_rate=1.0).reduce(ranks, total)
    assert abs(got / expected - 1) < 1e-6, (kind, got, expected)
    # Nothing may depend on a parameter, such as a bias that the softmax takes away.
    pairs = [(g.grad, e.grad) for g, e in zip(trained(sharded), trained(plain), strict=True) if e.grad is not None]
    assert distance(*zip(*pairs, strict=True)) < 1e-6, kind
    for gradient, expected in pairs:
        assert distance([gradient], [expected]) < 1e-5 or expected.norm() < 1e-4, kind


KINDS = (
    {},
    {"name": "llama", "attention_bias": True},
    {"name": "smollm3"},
    {"name": "qwen3", "final_logit_softcapping": 5.0, "gradient_checkpointing": True},
    {"how": {"reshard_after_forward": False}, "tie_word_embeddings": True},
    {"how": {"reshard_after_forward": False}, "gradient_checkpointing": True},
    {"how": {"cpu_offload": True}, "tie_word_embeddings": True, "gradient_checkpointing": True},
    {"own_attention": True, "gradient_checkpointing": True},
    {"lora": True},
    {"lora": True, "gradient_checkpointing": True},
)


@check
def gradients(ranks):
    """Of several architectures, however layers are held, and of a rank without samples."""
    for kind in KINDS:
        compare_gradients(ranks, *policies(ranks, **kind), kind=kind)
    compare_gradients(ranks, *policies(ranks), MICRO_BATCHES[1:2], "a rank without samples")


@check
def gradients_without_any_samples(ranks):
    _, sharded = policies(ranks)
    start = [whole(parameter) for parameter in trained(sharded)]
    norm = MasterAdamW(sharded.module, learning_rate=1.0).step()
    assert norm == 0
    assert all(map(torch.equal, start, map(whole, trained(sharded))))


def same_steps(ranks, steps=3, limit=1.0, **kind):
    """Three steps of AdamW, the second one clipped: norms to 1e-6, weights to 1% of the learning rate."""
    plain, sharded = policies(ranks, **kind)
    settings = {"learning_rate": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
    truth, optimizer = MasterAdamW(plain.module, **settings), MasterAdamW(sharded.module, **settings)
    for step in range(steps):
        limits = limit if step == 1 else 0.0
        total = optimizer.reduce(ranks, passes(sharded, ranks, MICRO_BATCHES))
        expected = truth.step(limits, plain_passes(plain, MICRO_BATCHES))
        norm = optimizer.step(limits, total)
        assert len(set(ranks.gather(norm.item(), "norms"))) == 1
        assert abs(norm / expected - 1) < 1e-6 and norm > limit, (norm, expected)
    apart = [(whole(a) - b).abs().max().item() for a, b in zip(optimizer.masters, truth.masters, strict=True)]
    assert max(apart) < 1e-5, max(apart)
    return plain, sharded, optimizer


@check
def three_steps(ranks):
    same_steps(ranks, tie_word_embeddings=True)
    same_steps(ranks, how={"cpu_offload": True}, gradient_checkpointing=True)
    _, sharded, _ = same_steps(ranks, lora=True)
    kinds = {ADAPTER in name: type(parameter) for name, parameter in sharded.module.named_parameters()}
    assert kinds == {True: torch.nn.Parameter, False: DTensor}, kinds


@check
def an_update_that_is_not_finite_on_one_rank(ranks):
    _, sharded, optimizer = same_steps(ranks, steps=1, limit=0.0)
    before = [whole(parameter).clone() for parameter in trained(sharded)]
    moments = [whole(state["exp_avg"]).clone() for state in optimizer.adamw.state.values()]
    total = passes(
        sharded, ranks, MICRO_BATCHES, factor=math.inf if ranks.rank == min(ranks.size, len(MICRO_BATCHES)) - 1 else 1.0
    )
    assert optimizer.step(1.0, optimizer.reduce(ranks, total)).isnan()
    assert all(map(torch.equal, before, map(whole, trained(sharded))))
    assert all(map(torch.equal, moments, (whole(state["exp_avg"]) for state in optimizer.adamw.state.values())))
    assert all(parameter.grad is None for parameter in trained(sharded))


@check
def gradients_of_whole_masters(ranks):
    """As data parallel ranks have them: one exchange, and a rank without samples counts as zeros."""
    plain, mine = (Policy(model()) for _ in range(2))
    optimizer = MasterAdamW(mine.module, learning_rate=1e-3, eps=1e-4)
    total = plain_passes(mine, MICRO_BATCHES[1:2]) if ranks.rank == 0 else None
    expected = plain_passes(plain, MICRO_BATCHES[1:2])
    assert abs(optimizer.reduce(ranks, total) - expected) < 1e-6 * abs(expected)
    assert distance([p.grad for p in trained(mine)], [p.grad for p in trained(plain)]) < 1e-6
    norms = ranks.gather(optimizer.step(1.0).item(), "norms")
    assert len(set(norms)) == 1
    weights = [parameter.detach() for parameter in trained(mine)]
    ranks.sum(others := [weight.clone() for weight in weights], "weights")
    assert all(map(torch.equal, others, (ranks.size * weight for weight in weights)))


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
        for samples in MICRO_BATCHES:
            loss_of(plain, samples).backward()
        total = passes(sharded, ranks, MICRO_BATCHES)
        gradients = [parameter.grad for parameter in optimizer.masters], [master.grad for master in truth.masters]
        assert distance(*gradients) < 1e-5
        norm = optimizer.step(1.0, optimizer.reduce(ranks, total))
        assert abs(norm / truth.step(1.0) - 1) < 1e-5
    apart = [(whole(a) - b).abs().max().item() for a, b in zip(optimizer.masters, truth.masters, strict=True)]
    assert max(apart) < 1e-4, max(apart)


@check(rare=True)
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
