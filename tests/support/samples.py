"""Samples as a judged rollout leaves them, for tests that draw nothing."""

import torch

from fastgrpo.data import Prompt, Sample


def length(completions, **_):
    return [float(len(text)) for text in completions]


def drawn(ids, logps=None, reason="stop", *, prompt_ids=(1,), sampler_logps=None):
    logps = torch.zeros(len(ids)) if logps is None else logps
    sampler_logps = logps if sampler_logps is None else sampler_logps
    return Sample([*prompt_ids], ids, logps=logps, sampler_logps=sampler_logps, finish_reason=reason)


def answer(prompt: Prompt, ids, content, logps=None, reason="stop", **more):
    logps = torch.zeros(len(ids)) if logps is None else logps
    return Sample(
        prompt.ids, ids, logps=logps, sampler_logps=logps, finish_reason=reason, prompt=prompt.prompt,
        columns=prompt.columns, content=content, **more,
    )  # fmt: skip
