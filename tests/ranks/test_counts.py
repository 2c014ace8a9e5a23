"""The traffic and memory of two ranks in a step, as in benchmarks/README.md.

As a script, `python test_counts.py FOLDER MODEL` forks two ranks, of which rank 0 writes the counts to a file. Every
collective goes through torch's dispatcher. Those of the host group carry integers, or floating-point tensors of a CPU.
"""

import functools
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from ranks import LIMIT, fork, forked
from runs import make_trainer
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from updates import rising

from fastgrpo.policy.shard import local
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.trainer.update import Learner

pytestmark = pytest.mark.slow
SMALL = {"max_tokens_per_microbatch": 30}  # each rank has 2 groups of about 26 tokens, so that it makes 2 passes
CASES = {
    "ddp-small": {"parallel": "ddp", "num_iterations": 2, **SMALL},
    "fsdp2-small": {"parallel": "fsdp2", **SMALL}, "fsdp2-kept": {"parallel": "fsdp2_keep", **SMALL},
    "fsdp2-lora": {"parallel": "fsdp2", "use_peft": True, "lora_r": 4},
}  # fmt: skip
FP32 = 4  # bytes of a number
SCALARS = [["allreduce", FP32]] * 2  # the loss and the norm of the gradients


class Counted(TorchDispatchMode):
    """Notes each collective with the place at which it is called: its kind and the bytes of its largest tensor."""

    def __init__(self):
        super().__init__()
        self.places, self.sent, self.host = ["elsewhere"], defaultdict(list), Counter()
        self.host_group, self.called = None, Counter()  # the group's name, and the calls of each place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and "barrier" not in function.__name__:
            self._note(function, args)
        return function(*args, **(kwargs or {}))

    def _note(self, function, args):
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        (group,) = map(ProcessGroup.unbox, boxed)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if group.group_name == self.host_group and not any(map(torch.is_floating_point, tensors)):
            self.host[self.places[-1]] += 1
            return
        largest = max(tensor.nbytes for tensor in tensors)
        self.sent[self.places[-1]].append([function.__name__.partition(".")[0].strip("_"), largest])

    def at(self, owner, method, place):
        inner = getattr(owner, method)

        def called(*args, **kwargs):
            self.places.append(place)
            self.called[place] += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self.places.pop()

        return mock.patch.object(owner, method, called)


def held(trainer):
    states = [value for state in trainer.optimizer.adamw.state.values() for value in state.values() if value.ndim]
    states += [master for _, master in trainer.optimizer.pairs]
    mine = {"policy": trainer.policy.module.parameters(), "optimizer": states}
    sizes = {name: sum(local(tensor.detach()).nbytes for tensor in tensors) for name, tensors in mine.items()}
    every = trainer.ranks.gather(sizes, "what the ranks hold")
    return {name: sum(sizes[name] for sizes in every) for name in sizes}


def main(out, model):
    counts = {}
    for name, settings in CASES.items():
        counted = Counted()
        trainer = make_trainer(out.parent, rising, model=model, output_dir=str(out.parent / name), **settings)
        counted.host_group = trainer.ranks.group.group_name
        trained = [p.numel() for p in trainer.policy.module.parameters() if p.requires_grad]
        units = [sum(p.numel() for p in layer.parameters()) for layer in trainer.policy.module.base_model.layers]
        units.append(sum(p.numel() for p in trainer.policy.module.parameters()) - sum(units))
        with counted, counted.at(RolloutEngine, "step", "decode"), counted.at(Learner, "step", "update"):
            trainer.step()
        trainer.log.terminal.close_bar()
        told = {"sent": counted.sent, "host": counted.host, "called": counted.called, "held": held(trainer)}
        told["planned"] = {part.name: part.bytes for part in trainer.plan.parts}
        counts[name] = told | {"trained": sum(trained), "units": units}
    if trainer.ranks.lead:
        out.write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counted")
    model = tiny.save(folder / "model")
    codes, (lead, other) = forked(__file__, folder, model, limit=3 * LIMIT)("counted")
    assert codes == [0, 0], lead + other
    for case in CASES.values():
        assert f"2 processes use {case['parallel'].partition('_')[0]} (set by parallel)" in lead
    assert "share the run" not in other
    return json.loads((folder / "counts.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_decode_loop_sends_nothing(counts, case):
    assert counts[case]["called"]["decode"] > 1
    assert "decode" not in counts[case]["sent"] and "decode" not in counts[case]["host"]


def test_ddp_sends_the_gradients_once_an_update(counts):
    told = counts["ddp-small"]
    assert told["sent"] == {"update": [["allreduce", FP32 * (told["trained"] + 1)]] * 2}
    assert told["trained"] == sum(told["units"])


def parts_of(sent, kind):
    return sorted(size for name, size in sent if name == kind)


@pytest.mark.parametrize("case, passes, gathers", [("fsdp2-small", 2, 2), ("fsdp2-kept", 2, 1)])
def test_fsdp2_gathers_all_weights_once_and_layers_for_each_pass_and_reduces_gradients(counts, case, passes, gathers):
    sent, units = counts[case]["sent"], [FP32 * count for count in counts[case]["units"]]
    layers, root = units[:-1], units[-1]
    assert sent.keys() == {"elsewhere", "update"}
    assert sorted(sent["elsewhere"]) == sorted(["allgather_base", unit] for unit in units)  # once, before it draws
    assert parts_of(sent["update"], "allgather_base") == sorted((layers * gathers + [root]) * passes)
    assert parts_of(sent["update"], "reduce_scatter_base") == sorted(units * passes)
    assert [entry for entry in sent["update"] if "_base" not in entry[0]] == SCALARS


def test_adapters_of_a_sharded_base_are_added_up_as_ddp_does(counts):
    told = counts["fsdp2-lora"]
    assert not parts_of(told["sent"]["update"], "reduce_scatter_base")
    assert 0 <= sum(parts_of(told["sent"]["update"], "allreduce")) - FP32 * told["trained"] <= 2 * FP32


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_hold_twice_what_is_planned_for_one(counts, case):
    for name, held in counts[case]["held"].items():
        assert 0 <= 2 * counts[case]["planned"][name] - held <= 1, name


if __name__ == "__main__":
    folder, model = sys.argv[1:]
    body = functools.partial(main, Path(folder) / "counts.json", model)
    fork({"counted": body}, folder, count=2, limit=len(CASES) * LIMIT)
