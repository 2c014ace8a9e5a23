"""Trajectories of three updates, each computed by all ranks in one of many ways; rank 0 writes them to a file.

python matrix.py FOLDER COUNT LIMIT      forks COUNT ranks; LIMIT is in seconds
"""

import dataclasses
import functools
import itertools
import random
import sys
from dataclasses import dataclass

import tiny
import torch
from ranks import fork
from torch.distributed.tensor import DTensor

from fastgrpo.config import GRPOConfig
from fastgrpo.data.records import Sample
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import make_reference
from fastgrpo.policy.shard import fill, shard
from fastgrpo.ranks import ALONE, join
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import AdaptiveEntropy, GRPOUpdate, Learner

LOSS_TYPES = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEARNING_RATE = 3e-4
STEPS = 3
SELECTION = (("top_entropy_quantile", 0.4), ("off_policy_mask_threshold", 1e-3))
ADAPTIVE = GRPOConfig(use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=10.0)
WHOLE = 10**6  # a token budget that holds everything


@dataclass(frozen=True)
class Case:
    """One way to make the three updates."""

    loss_type: str
    beta: float
    samples: str = "ragged"  # a name for `samples_of`
    parallel: str = "ddp"  # or fsdp2
    budget: int = WHOLE  # tokens of a micro-batch
    knobs: tuple = ()  # of the objective, as pairs
    minibatches: int = 1  # updates of a pass over the samples
    lora: bool = False
    selection: tuple = ()  # what selects tokens, as pairs
    adaptive: bool = False  # the coefficient of the entropy bonus follows the entropy

    @property
    def truth(self):
        return dataclasses.replace(self, parallel="ddp", budget=WHOLE)


def group(rng, prompt, lengths, advantages, turns=False, **more):
    """A group of completions; with `turns`, those of more than four tokens have two answers of tools."""
    ids = [rng.randint(2, 63) for _ in range(prompt)]
    return [
        Sample(
            ids, [rng.randint(2, 63) for _ in range(n)], advantage, tool_mask=two_answers(n) if turns else None, **more
        )
        for n, advantage in zip(lengths, advantages, strict=True)
    ]


def two_answers(length):
    if length < 5:
        return None
    return [0 if i in (1, 3) or length // 3 < i < length // 2 else 1 for i in range(length)]


def samples_of(name):
    """Groups of very different lengths ("ragged": one without spread, one masked, two with tools), and odd ones."""
    rng = random.Random(1)
    if name == "ragged":
        return [
            group(rng, 5, (1, 1, 2), (1.0, -0.5, -0.5)), group(rng, 9, (120, 3, 60), (0.7, -1.2, 0.5), turns=True),
            group(rng, 4, (7, 8, 9), (0.0, 0.0, 0.0)), group(rng, 6, (20, 30, 1), (-1.0, 0.4, 0.6)),
            group(rng, 3, (11, 12, 13), (1.0, -1.0, 0.2), masked=True),
            group(rng, 8, (16, 5, 40), (1.1, -0.2, -0.9), turns=True),
        ]  # fmt: skip
    if name == "few":  # without a KL, all ranks but one have nothing to do
        return [group(rng, 4, (6, 6), (0.0, 0.0)), group(rng, 5, (9, 2), (1.5, 0.0))]
    if name == "apart":  # single tokens and long completions: ranks make very different numbers of passes
        return [group(rng, 3, (1, 1), (1.0, -1.0)), group(rng, 3, (200, 190, 180), (0.5, 0.5, -1.0))]
    return [group(rng, 4, (6, 5), (0.0, 0.0)), group(rng, 4, (3, 9), (0.0, 0.0))]  # "none": nothing to learn


def cases(count):
    losses = [Case(loss, beta) for loss in LOSS_TYPES for beta in (0.0, 0.04)]
    others = [Case("dapo", beta, name) for name in ("few", "apart", "none") for beta in (0.0, 0.04)]
    others += [
        Case("grpo", 0.0, knobs=(("entropy_coef", 0.01),)), Case("dapo", 0.1, knobs=(("kl", "full"),)),
        Case("grpo", 0.0, knobs=(("importance_sampling_level", "sequence"),)), Case("bnpo", 0.04, minibatches=2),
        Case("dapo", 0.04, lora=True), Case("dapo", 0.04, minibatches=2, selection=SELECTION, adaptive=True),
        Case("grpo", 0.0, "few", selection=SELECTION), Case("vespo", 0.0, adaptive=True),
    ]  # fmt: skip
    modes = ("ddp", "fsdp2") if count > 1 else ("fsdp2",)
    crossed = [*itertools.product(losses, modes, (WHOLE, 150, 40)), *itertools.product(others, modes, (60,))]
    return [dataclasses.replace(case, parallel=parallel, budget=budget) for case, parallel, budget in crossed]


def trajectory(case, ranks=ALONE):
    """The gradients and weights, [U, W] for U updates, and the metrics of three updates on one rollout."""
    policy = Policy(tiny.model("llama", tie_word_embeddings=True))
    if case.lora:
        add_lora(policy.module, r=4, target_modules=["all-linear"])
    policy.module.double()  # so that rounding hides no difference
    if case.parallel == "fsdp2" and ranks is not ALONE:
        policy = shard(policy, ranks, dtype=torch.float64)
    reference = make_reference(policy, case.beta)
    move(policy.module)
    optimizer = MasterAdamW(policy.module, learning_rate=LEARNING_RATE, eps=1e-4)
    schedule = make_schedule(optimizer, "constant", warmup_steps=0, total_steps=STEPS)
    learner = Learner(policy, optimizer, schedule, max_grad_norm=1.0, max_tokens=case.budget, ranks=ranks)
    knobs = {"luspo": {"importance_sampling_level": "sequence"}, "cispo": {"epsilon_high": 5.0}}.get(case.loss_type, {})
    objective = Objective(case.loss_type, beta=case.beta, max_completion_length=200, **knobs, **dict(case.knobs))
    gradients, weights, step = [], [], optimizer.step

    def flat(tensors):
        return torch.cat([(t.full_tensor() if isinstance(t, DTensor) else t).detach().flatten() for t in tensors])

    def noted(*arguments):
        gradients.append(flat(torch.zeros_like(m) if m.grad is None else m.grad for m in optimizer.masters))
        norm = step(*arguments)
        weights.append(flat(optimizer.masters))
        return norm

    optimizer.step = noted
    passes = {"updates_per_rollout": case.minibatches, "num_iterations": STEPS, **dict(case.selection)}
    entropy = AdaptiveEntropy(ADAPTIVE) if case.adaptive else None
    update = GRPOUpdate(policy, reference, learner, objective, temperature=0.9, entropy=entropy, **passes)
    metrics = update(samples_of(case.samples))[1]
    return {"gradients": torch.stack(gradients), "weights": torch.stack(weights), "metrics": metrics}


@torch.no_grad()
def move(module):
    """Move the policy away from its reference, in the same way on every rank."""
    for i, parameter in enumerate(module.parameters()):
        change = torch.empty_like(parameter)
        fill(change, torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05)
        parameter.add_(change)


def main(path, chosen=None):
    ranks = join("cpu", 50)
    results = {case: trajectory(case, ranks) for case in chosen or cases(ranks.size)}
    if ranks.lead:
        torch.save(results, path)


if __name__ == "__main__":
    import matrix  # so that the classes in the file are those of the module, not of __main__

    folder, count, limit = sys.argv[1:]
    body = functools.partial(matrix.main, f"{folder}/results.pt")
    fork({"ranks": body}, folder, int(count), limit=float(limit))
