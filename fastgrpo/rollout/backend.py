"""What a rollout backend is: requests in, finished groups out, under vLLM's names."""

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import torch

from fastgrpo.data.records import Rollout
from fastgrpo.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt whose completions are to be drawn. limits: most tokens of each of the n."""

    request_id: int
    prompt_ids: list[int]
    limits: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class RequestOutput:
    """A finished group: the n completions of a prompt."""

    request_id: int
    rollouts: list[Rollout]


class RolloutBackend(ABC):
    """Requests begin in the order they came and finish in any. Prompts can be added, and groups taken and cancelled,
    while others are in flight; the weights must not change as long as any is."""

    def __init__(self, model, max_num_seqs=256):
        """max_num_seqs: completions in flight at once; more wait."""
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.model, self.max_num_seqs = model, max_num_seqs
        self.unfinished = {}  # request_id -> Request, waiting or running
        self.waiting = deque()
        self.next_id = 0
        self.live_lanes = []  # completions in flight, at each look since the backend was last idle

    def add_request(self, prompt_ids, n=1, sampling=None, request_id=None, max_tokens=None):
        """Queue n completions of a prompt.

        Args:
            prompt_ids: token ids. sampling: `SamplingParams`; requests in flight together must agree in all but seed
                and max_tokens. request_id: keys the draws beside the seed; None takes the next number. max_tokens: n
                limits, where they differ among the completions.

        Returns:
            the request_id.

        Raises:
            ValueError: what cannot be drawn.
        """
        sampling = sampling or SamplingParams()
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=torch.randint(2**63 - 1, ()).item())
        if request_id is None:
            request_id = self.next_id
        limits = [sampling.max_tokens] * n if max_tokens is None else list(max_tokens)
        request = Request(request_id, list(prompt_ids), limits, sampling)
        self._check(request, n)
        if not self.unfinished:
            self.live_lanes = []
        self.next_id = max(self.next_id, request_id + 1)
        self.unfinished[request_id] = request
        self.waiting.append(request)
        return request_id

    def _check(self, request, n):
        number, length, limits = request.request_id, len(request.prompt_ids), request.limits
        if n < 1:
            raise ValueError(f"num_generations must be at least 1, got {n}")
        if n > self.max_num_seqs:
            raise ValueError(f"num_generations={n} does not fit into max_num_seqs={self.max_num_seqs}")
        if len(limits) != n or min(limits) < 1:
            raise ValueError(f"max_tokens must be {n} positive limits, got {limits}")
        if not length:
            raise ValueError(f"prompt {number} has no tokens")
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and length + max(limits) > context:
            raise ValueError(
                f"prompt {number} has {length} tokens; with max_tokens={max(limits)} it exceeds the model's context of "
                f"{context}; shorten the prompt or lower max_completion_length"
            )
        if number in self.unfinished:
            raise ValueError(f"request {number} is in flight; wait for it or choose another request_id")
        for other in self.unfinished.values():
            mine, theirs = ((s.distribution, s.stop_token_ids) for s in (request.sampling, other.sampling))
            if mine != theirs:
                raise ValueError(
                    f"requests in flight share temperature, filters and stop tokens: {mine} is not {theirs}; finish or "
                    "abort the others first"
                )
            break  # they agree with one another

    def abort_request(self, request_id):
        """Drop a request, waiting or running; an unknown or finished one is passed over.

        Returns:
            how many tokens had been drawn of its completions.
        """
        request = self.unfinished.pop(request_id, None)
        if request in self.waiting:
            self.waiting.remove(request)
            return 0
        return 0 if request is None else self._stop(request)

    @abstractmethod
    def _stop(self, request):
        """Drop a request that runs. Returns how many tokens had been drawn of it."""

    def has_unfinished_requests(self):
        """Whether any request waits or runs."""
        return bool(self.unfinished)

    @abstractmethod
    def step(self):
        """Work for a while. Returns the `RequestOutput`s that finished meanwhile."""

    def metrics(self):
        """What the backend measured since it was last idle: rollout/live_mean, the completions in flight, and
        rollout/live_share, their mean as a share of the most in flight. Nothing where it does not look."""
        if not self.live_lanes:
            return {}
        mean = sum(self.live_lanes) / len(self.live_lanes)
        return {"rollout/live_mean": mean, "rollout/live_share": mean / max(self.live_lanes)}

    def generate(self, prompts, num_generations=1, sampling=None, progress=None):
        """G completions of each prompt, to the end.

        Args:
            prompts: B lists of token ids, none empty. num_generations: G. sampling: `SamplingParams`.
            progress: called with the number of completions that finished, or None.

        Returns:
            B * G `Rollout`s, those of a prompt side by side.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for max_tokens in the model's context.
        """
        if self.has_unfinished_requests():
            raise ValueError("generate needs an idle backend; finish or abort the requests in flight first")
        groups = {}
        try:
            for i, prompt in enumerate(prompts):
                self.add_request(prompt, num_generations, sampling, request_id=i)
            while self.has_unfinished_requests():
                for output in self.step():
                    groups[output.request_id] = output.rollouts
                    if progress is not None:
                        progress(num_generations)
        finally:
            for request_id in list(self.unfinished):
                self.abort_request(request_id)
        return [rollout for i in range(len(prompts)) for rollout in groups[i]]


def first_finished(engine, prompts, num_generations, sampling, count):
    """Completions of the first `count` prompts to finish; the others are aborted.

    Args:
        engine: an idle `RolloutBackend`. prompts: lists of token ids. sampling: `SamplingParams`.

    Returns:
        {index of the prompt: its `Rollout`s}, in the order of the prompts, and the tokens drawn of the others.
    """
    groups, lost = {}, 0
    try:
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, num_generations, sampling, request_id=i)
        while len(groups) < count:
            for output in engine.step():
                if len(groups) < count:
                    groups[output.request_id] = output.rollouts
                else:  # it finished at the same look
                    lost += sum(len(rollout.ids) for rollout in output.rollouts)
    finally:
        for request_id in list(engine.unfinished):
            lost += engine.abort_request(request_id)
    return dict(sorted(groups.items())), lost
