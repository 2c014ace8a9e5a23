"""Small runs on several ranks that count what a step sends; rank 0 writes the counts to a file.

    python counted_ranks.py FOLDER MODEL CASES      forks two ranks; CASES is JSON: the settings of each run by its name

Every collective of torch.distributed goes through torch's dispatcher. Those of the ranks' host group carry objects and
flags, as integers, or floating-point tensors of a CPU. The others carry tensors.
"""

import functools
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import torch
from ranks import LIMIT, fork
from runs import make_trainer
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from updates import rising

from fastgrpo.policy.shard import local
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.trainer.update import Learner


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


def main(out, model, cases):
    counts = {}
    for name, settings in cases.items():
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


if __name__ == "__main__":
    folder, model, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    body = functools.partial(main, Path(folder) / "counts.json", model, cases)
    fork({"counted": body}, folder, count=2, limit=len(cases) * LIMIT)
