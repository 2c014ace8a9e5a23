"""The reference policy: none, the policy without its adapters, or a frozen copy of it as it was when training began;
whole on the device, streamed there from the host layer by layer, or quantized.
"""

import copy
from contextlib import nullcontext

import torch

from fastgrpo.loss import linear_logprob
from fastgrpo.policy.batch import Batch, split_by_tokens
from fastgrpo.policy.lora import adapters_off, has_adapters
from fastgrpo.policy.model import completion_states, head
from fastgrpo.policy.quantize import quantize
from fastgrpo.policy.streaming import LayerStream


def make_reference(model, beta, *, device=None, quantization=None):
    """The reference for a policy.

    Args:
        beta: at 0 there is none. device: "cpu" keeps the copy in host memory and streams it; None: the policy's.
        quantization: of the copy's linear layers, "int8", "nf4" or None.

    Returns:
        None; the policy itself with adapters off, where it has some; or a copy.
    """
    if beta == 0:
        return None
    if has_adapters(model):
        return AdaptersOff(model)
    if quantization is not None:
        return QuantizedCopy(model, quantization)
    return FrozenCopy(model) if device is None else StreamedCopy(model)


def frozen_copy(model, device=None):
    """A copy without gradients, its parameters on `device` (None: where they are), its buffers where they are."""
    memo = {}
    for parameter in model.parameters():
        value = parameter.detach().to(device or parameter.device, copy=True)
        memo[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
    return copy.deepcopy(model, memo).eval()  # takes its parameters from the memo


class Reference:
    """A frozen policy that scores samples. `metrics` is what the last `score` measured."""

    exact = None  # what a quantized one is still to be compared with

    def __init__(self, model):
        self.model, self.metrics = model, {}

    def ready(self):
        """A context inside of which `model` is the reference, and can run."""
        return nullcontext()

    def score(self, samples, *how):
        """See the function `score`."""
        with self.ready():
            return score(self.model, samples, *how)


class AdaptersOff(Reference):
    """The policy itself while its adapters are off: nothing in memory."""

    def ready(self):
        return adapters_off(self.model)


class FrozenCopy(Reference):
    """The policy as it is now, without gradients, beside it."""

    def __init__(self, model, device=None):
        super().__init__(frozen_copy(model, device))

    @torch.no_grad()
    def sync(self, policy, alpha):
        """Weights become alpha * policy + (1 - alpha) * weights (TR-DPO, arXiv 2404.09656)."""
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.device), alpha)


class StreamedCopy(FrozenCopy):
    """The same in host memory: the device holds two layers of it, embedding and head, and these only while it runs."""

    def __init__(self, model):
        super().__init__(model, "cpu")
        self.stream = LayerStream(self.model, model.device)

    def ready(self):
        return self.stream.ready()


class QuantizedCopy(Reference):
    """A copy with quantized linear layers; embedding, norms and head keep their dtype.

    The first `score` also measures `ref/kl_error` against the exact copy, which is streamed for it and then dropped.
    """

    def __init__(self, model, quantization):
        super().__init__(quantize(frozen_copy(model, "cpu"), quantization, model.device))
        self.exact = StreamedCopy(model)

    def score(self, samples, *how):
        logps, self.metrics = super().score(samples, *how), {}
        if self.exact is not None and samples:
            exact = torch.cat(self.exact.score(samples, *how))
            log_ratio = torch.cat(logps) - exact
            self.metrics = {"ref/kl_error": (log_ratio.expm1() - log_ratio).mean().item()}
            self.exact = None
        return logps


@torch.no_grad()
def score(model, samples, temperature, max_tokens, share_prompt=True):
    """Log-probs of each sample's completion under `model`, fp32 [len(completion_ids)] on the model's device.

    Args:
        samples: `Sample`s. temperature: the one they were drawn at. max_tokens: budget of a micro-batch.
        share_prompt: one prompt for neighbours that have the same.
    """
    weight, bias = head(model)
    logps = []
    for part in split_by_tokens(samples, max_tokens, share_prompt):
        batch = Batch.pack(part, weight.device, share_prompt)
        states = completion_states(model, batch)
        flat = linear_logprob(states, weight, batch.targets, bias=bias, temperature=temperature)
        logps += flat.split([len(sample.completion_ids) for sample in part])
    return logps
