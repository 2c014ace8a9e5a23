"""A GRPO update of a policy without a trainer around it, and gradients by name."""

from fastgrpo.loss.objective import Objective
from fastgrpo.policy.ref_model import make_reference
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import GRPOUpdate, Learner


def rising(completions, **_):
    return [float(i) for i in range(len(completions))]


def make_update(policy, objective=None, device=None, temperature=1.0, learning_rate=1e-3, **settings):
    """A `GRPOUpdate`; `device` is that of the reference, which is the policy as it is now."""
    how = {name: settings.pop(name) for name in ("max_tokens", "max_grad_norm", "share_prompt") if name in settings}
    optimizer, objective = MasterAdamW(policy.module, learning_rate=learning_rate), objective or Objective()
    schedule = make_schedule(optimizer, "constant", warmup_steps=0, total_steps=1)
    learner = Learner(policy, optimizer, schedule, **{"max_tokens": 10_000, "max_grad_norm": 0.0, **how})
    reference = make_reference(policy, objective.beta, device=device)
    return GRPOUpdate(policy, reference, learner, objective, temperature=temperature, **settings)


def before_each_step(update, look):
    """Let `look()` run before each step of the optimizer; returns the list of what it returned."""
    seen, optimizer = [], update.learner.optimizer
    step = optimizer.step
    optimizer.step = lambda *arguments: seen.append(look()) or step(*arguments)
    return seen


def gradients(module):
    """The gradients by name; the module has none afterwards."""
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    return found
