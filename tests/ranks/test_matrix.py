"""Three updates give the same gradients, weights and metrics, however many ranks compute them, and in whichever way.

As a script, `python test_matrix.py FOLDER COUNT` forks ranks, of which rank 0 writes the trajectory of each case.
"""

import dataclasses
import functools
import random
import sys
from dataclasses import dataclass

import pytest
import tiny
import torch
from ranks import LIMIT, fork, forked
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

GRADIENT, METRIC, DRIFT = 5e-7, 5e-7, 5e-8  # weights are in fp64, some sums in fp32
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


CASES = [
    Case("grpo", 0.04, parallel="ddp", budget=60), Case("luspo", 0.0, parallel="fsdp2", budget=60),
    Case("vespo", 0.0, parallel="ddp", budget=60, adaptive=True), Case("dapo", 0.0, "few", "ddp", 60),
    Case("dapo", 0.0, "none", "fsdp2", 60), Case("dapo", 0.04, "apart", "fsdp2", 60),
    Case("dapo", 0.1, parallel="fsdp2", knobs=(("kl", "full"),)), Case("dapo", 0.04, "few", "fsdp2", lora=True),
    Case("dapo", 0.04, parallel="fsdp2", budget=60, minibatches=2, selection=SELECTION, adaptive=True),
    Case("dr_grpo", 0.0, parallel="ddp", budget=40), Case("bnpo", 0.04, parallel="ddp", budget=60, minibatches=2),
    Case("cispo", 0.0, parallel="fsdp2", budget=150), Case("sapo", 0.04, parallel="fsdp2", budget=40),
]  # fmt: skip


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


truth = functools.cache(trajectory)  # of one rank, with one micro-batch an update


def compared(results):
    """The signed residuals of the gradients along the true ones, after each case has been compared with the truth."""
    signed = []
    for case, got in zip(CASES, results, strict=True):
        want = truth(case.truth)
        mine, true = (of["gradients"].double().flatten() for of in (got, want))  # of all three updates
        assert (mine - true).norm() <= GRADIENT * true.norm(), case
        if true.norm() > 0:
            signed.append(((mine - true) @ true / (true @ true)).item())
        assert (got["weights"] - want["weights"]).abs().max() <= 0.01 * LEARNING_RATE, case
        assert got["metrics"].keys() == want["metrics"].keys(), case
        for name, value in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(value, rel=METRIC, abs=METRIC), (case, name)
    return signed


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 4))])
def test_any_number_of_ranks_gives_the_trajectory_of_one(count, tmp_path):
    codes, outputs = forked(__file__, tmp_path, count)("ranks")
    assert codes == [0] * count, "\n".join(outputs)
    signed = compared(torch.load(tmp_path / "results.pt"))
    assert len(signed) == len(CASES) - 1  # "none" stands still
    assert abs(sum(signed) / len(signed)) <= DRIFT
    # Where the trajectories were all the same, or stood still, the comparisons would prove nothing.
    ends = [truth(case.truth)["weights"][-1] - truth(case.truth)["weights"][0] for case in CASES]
    moved = sorted(end.abs().max().item() for end in ends)
    assert moved[0] == 0 and moved[1] > LEARNING_RATE / 2
    assert len({end.sum().item() for end in ends}) == len(ends)


def main(folder):
    ranks = join("cpu", 50)
    results = [trajectory(case, ranks) for case in CASES]
    if ranks.lead:
        torch.save(results, f"{folder}/results.pt")


if __name__ == "__main__":
    folder, count = sys.argv[1:]
    fork({"ranks": functools.partial(main, folder)}, folder, int(count), limit=6 * LIMIT)
