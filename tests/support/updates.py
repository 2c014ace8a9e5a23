"""A GRPO update without a trainer around it, gradients by name, and runs whose samples are older than their updates."""

import copy

import torch
from runs import make_trainer

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


TEXTS = ("ab", "c", "hello ", "1+1=", "x", "yz", "?")


def asynchronous(tmp_path, url, trained, name="run", reward=rising, texts=TEXTS, **how):
    """A run with asynchronous rollouts; `trained` gets the weights and the samples of each update."""
    rows = [{"prompt": text} for text in texts]
    how = {"max_steps": 5, "max_staleness": 2, "learning_rate": 1e-2, "save_steps": 1, "dtype": "float32"} | how
    how |= {"rollout_backend": "vllm", "vllm_server_base_url": url, "importance_sampling_mode": "token_truncate"}
    trainer = make_trainer(tmp_path, reward, rows, output_dir=str(tmp_path / name), **how)
    update = trainer.update

    def noted(samples):
        trained[trainer.state.global_step] = copy.deepcopy(trainer.policy.module), samples
        return update(samples)

    trainer.update = noted
    return trainer


@torch.no_grad()
def mixed_samples(trained, max_staleness, tolerance, mixed_too=True):
    """Compare the log-prob of each token with the weights of its version. Return samples of several versions."""
    mixed = []
    for step, (_, samples) in trained.items():
        for sample in samples:
            versions, ids = sample.versions, torch.tensor([sample.prompt_ids + sample.ids])
            assert len(versions) == len(sample.ids)
            assert max(step - max_staleness, 0) <= versions.min() <= versions.max() <= step
            if len(versions.unique()) > 1:
                mixed.append(sample)
                if not mixed_too:
                    continue
            for version in versions.unique().tolist():
                logits = trained[version][0](ids).logits[0, len(sample.prompt_ids) - 1 : -1]
                logps = logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
                chosen = versions == version
                torch.testing.assert_close(logps[chosen], sample.logps[chosen], atol=tolerance, rtol=0)
    return mixed


def gradients(module):
    """The gradients by name; the module has none afterwards."""
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    return found
