"""The interface of a rollout backend: it takes requests and returns finished groups, under vLLM's names."""

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fastgrpo.data.records import Dialogue, Prompt, Sample, StopReason
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rollout.sampling import SamplingParams, integer, integers
from fastgrpo.rollout.slots import MOST_LANES


@dataclass(frozen=True)
class Request:
    """A prompt to complete.

    Attributes:
        request_id: Its number.
        prompt_ids: Token ids of the prompt.
        limits: Maximum number of tokens of each completion.
        sampling: Sampling parameters.
        draw_key: Seed and key together determine the random numbers of its draws.
        dialogues: The turns of each completion, or None without tools.
    """

    request_id: int
    prompt_ids: list[int]
    limits: list[int]
    sampling: SamplingParams
    draw_key: int
    dialogues: Sequence[Dialogue] | None = None


class RolloutBackend(ABC):
    """Draws completions. Requests start in the order of arrival and finish in any order.

    Requests can be added and aborted while others are in flight. The weights must not change while a request is in
    flight.

    Args:
        model: The policy: a `Policy`, or a transformers causal LM.
        max_num_seqs: Maximum number of completions in flight; others wait. None: `MOST`, or a larger group's size.

    Raises:
        ValueError: `max_num_seqs` is below 1.
    """

    MOST = MOST_LANES
    beside = 0  # GPU memory that is in use and torch does not count, in bytes

    def __init__(self, model: Policy | PreTrainedModel, max_num_seqs: int | None = None):
        if max_num_seqs is not None and max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.auto, self.max_num_seqs = max_num_seqs is None, max_num_seqs or self.MOST
        self.policy = Policy.of(model)
        self.unfinished = {}  # request_id -> Request, waiting or running
        self.waiting = deque()
        self.next_id = 0
        self.live_lanes = []  # number of completions in flight at each step since the backend was last idle
        self.preemptions = 0  # number of groups that were restarted since then
        self.after_step = None  # called after each step of `run`
        self.peak = 0  # GPU memory that was in use before the last `sleep`, in bytes; 0 if torch counts all of it

    def add_request(
        self,
        prompt_ids: Sequence[int],
        n: int = 1,
        sampling: SamplingParams | None = None,
        request_id: int | None = None,
        max_tokens: Sequence[int] | None = None,
        dialogues: Sequence[Dialogue] | None = None,
        draw_key: int | None = None,
    ) -> int:
        """Queue n completions of a prompt.

        Args:
            prompt_ids: Token ids of the prompt.
            n: Number of completions.
            sampling: Sampling parameters. All requests in flight must have the same, except seed and max_tokens.
            request_id: Number of the request, from 0 to 2^63 - 1. None means the next number.
            max_tokens: n limits, one per completion, over all its turns. None means the limit of `sampling` for all.
            dialogues: n objects that answer the turns of the completions. None means one turn each.
            draw_key: Seed and key together determine the random numbers of the draws. None means request_id.

        Returns:
            The request_id.

        Raises:
            ValueError: The request is invalid.
        """
        sampling = sampling or SamplingParams()
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=torch.randint(2**63 - 1, ()).item())
        request_id = self.next_id if request_id is None else integer(request_id, "request_id")
        n = integer(n, "num_generations")
        limits = [sampling.max_tokens] * n if max_tokens is None else integers(max_tokens, "max_tokens")
        ids = integers(prompt_ids, f"the token ids of prompt {request_id}")
        key = request_id if draw_key is None else draw_key
        request = Request(request_id, ids, limits, sampling, key, dialogues)
        self._check(request, n)
        if not self.unfinished:
            self.live_lanes, self.preemptions = [], 0
        self.next_id = max(self.next_id, request_id + 1)
        self.unfinished[request_id] = request
        self.waiting.append(request)
        return request_id

    def _check(self, request, n):
        number, limits = request.request_id, request.limits
        if not 0 <= number < 2**63:
            raise ValueError(f"request_id must be from 0 to 2^63 - 1, got {number}")
        if n < 1:
            raise ValueError(f"num_generations must be at least 1, got {n}")
        if self.auto:
            self.max_num_seqs = max(self.max_num_seqs, n)
        if n > self.max_num_seqs:
            raise ValueError(f"num_generations={n} does not fit into max_num_seqs={self.max_num_seqs}")
        if len(limits) != n or min(limits) < 1:
            raise ValueError(f"max_tokens must be {n} positive limits, got {limits}")
        self.policy.check_prompt(request.prompt_ids, max(limits), f"prompt {number}")
        if number in self.unfinished:
            raise ValueError(f"request {number} is in flight; wait for it or pass another request_id")
        for other in self.unfinished.values():
            mine, theirs = ((s.distribution, s.stop_token_ids) for s in (request.sampling, other.sampling))
            if mine != theirs:
                raise ValueError(
                    "requests in flight must have the same temperature, filters, penalty and stop tokens, got "
                    f"{mine} beside {theirs}; finish or abort the others first"
                )
            break  # all others have the same

    def abort_request(self, request_id: int) -> int:
        """Drop a waiting or running request. Unknown and finished requests are ignored.

        Returns:
            The number of drawn tokens of its completions.
        """
        request = self.unfinished.pop(request_id, None)
        drawn = 0
        if request in self.waiting:
            self.waiting.remove(request)
            for dialogue in request.dialogues or ():
                dialogue.close(StopReason.ABORTED)
        elif request is not None:
            drawn = self._stop(request)
        return drawn

    @abstractmethod
    def _stop(self, request):
        """Drop a running request, and return the number of its drawn tokens."""

    def sync(self, ranks: Ranks = ALONE, step: int | None = None) -> None:  # noqa: B027
        """Give the policy's weights to samplers that have their own. All ranks call this before each rollout.

        `step` counts the training steps of these weights. None keeps the value of the last call.
        """

    def end_sync(self) -> None:  # noqa: B027
        """Wait until samplers have the weights of the last `sync`. A run calls this at its end."""

    def sleep(self) -> None:  # noqa: B027
        """Release memory until the next request. Nothing may be in flight."""

    def work_left(self) -> int:
        """Return the maximum number of tokens left in unfinished requests: prompts and completions."""
        return sum(len(request.prompt_ids) + sum(request.limits) for request in self.unfinished.values())

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is waiting or running."""
        return bool(self.unfinished)

    @abstractmethod
    def step(self) -> dict[int, list[Sample]]:
        """Advance the requests.

        Returns:
            The completions of the groups that finished, by request_id.
        """

    def run(self, progress: Callable[[float], object] | None = None) -> Iterator[dict[int, list[Sample]]]:
        """Step until all requests have finished.

        Args:
            progress: Called with the share of the work done since the last call, or None. The shares add up to 1. A
                share is negative if a group has started again (`preemptions`).

        Yields:
            The groups that finished in a step.

        Raises:
            ValueError: A weight is not finite.
        """
        work = left = self.work_left()
        while self.has_unfinished_requests():
            finished = self.step()
            self.check_finite(finished)
            if self.after_step is not None:
                self.after_step()
            if progress is not None:
                progress((left - self.work_left()) / work)
                left = self.work_left()
            yield finished

    def abort_all(self) -> int:
        """Drop all requests, and return the number of drawn tokens of their completions."""
        return sum(self.abort_request(request_id) for request_id in list(self.unfinished))

    def check_finite(self, groups: Mapping[int, Sequence[Sample]]) -> None:
        """Raise a ValueError if log-probs are not finite because a weight is not.

        If only the log-probs are not finite, the update is skipped and counted.
        """
        if all(sample.logps.isfinite().all() for samples in groups.values() for sample in samples):
            return
        for name, weight in self.policy.module.named_parameters():
            values = weight.to_local() if isinstance(weight, DTensor) else weight
            if bad := values.numel() - int(values.isfinite().sum()):
                raise ValueError(
                    f"{bad:,} of the {values.numel():,} values of the weight {name} are NaN or infinite, and so are "
                    "log-probs of completions; start from another checkpoint"
                )

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the backend was last idle.

        Returns:
            `rollout/live_mean`, the mean number of completions in flight, and `rollout/live_share`, that mean divided
            by the largest number in flight. Empty if the backend does not count them.
        """
        if not self.live_lanes:
            return {}
        mean = sum(self.live_lanes) / len(self.live_lanes)
        return {"rollout/live_mean": mean, "rollout/live_share": mean / max(1, *self.live_lanes)}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int = 1,
        sampling: SamplingParams | None = None,
        progress: Callable[[float], object] | None = None,
        request_ids: Sequence[int] | None = None,
    ) -> list[Sample]:
        """Draw G completions of each prompt, and wait for all of them.

        Args:
            prompts: B >= 0 lists of token ids, none of them empty.
            num_generations: G.
            sampling: Sampling parameters.
            progress: As for `run`.
            request_ids: B different request numbers, which determine the draws. None means 0 to B - 1.

        Returns:
            B * G samples; those of a prompt are adjacent.

        Raises:
            ValueError: A prompt is invalid, the backend is not idle, or a weight is not finite.
        """
        if self.has_unfinished_requests():
            raise ValueError("generate needs an idle backend; finish or abort the requests in flight first")
        groups, request_ids = {}, range(len(prompts)) if request_ids is None else request_ids
        self.sync()
        try:
            for request_id, prompt in zip(request_ids, prompts, strict=True):
                self.add_request(prompt, num_generations, sampling, request_id=request_id)
            for finished in self.run(progress):
                groups |= finished
        finally:
            self.abort_all()
        return [rollout for request_id in request_ids for rollout in groups[request_id]]


APART = 32  # a request_id has the group's number below this bit, and the number of its first completion above it
FIRST = 48  # a request_id has the number of its drawing above this bit, so that drawings in flight differ


class Drawing:
    """The completions of groups in progress on a backend.

    If a group's prompts are equal, they are computed once. A completion with tools is shorter than max_tokens if the
    context of the model requires it.

    Args:
        engine: The backend, which gets the requests.
        groups: The prompts of the completions of each group, by the number of the group.
        sampling: Sampling parameters.
        count: How many groups are wanted; the others are aborted when these have finished. None means all.
        finished: Called with the number and the samples of each wanted group as soon as it has finished.
        number: Differs from those of other drawings in flight; the draws do not depend on it.

    Attributes:
        done: The samples of the wanted groups that have finished, by the number of the group.
        lost: Number of tokens drawn for other groups.
    """

    def __init__(
        self,
        engine: RolloutBackend,
        groups: Mapping[int, Sequence[Prompt]],
        sampling: SamplingParams,
        count: int | None = None,
        finished: Callable[[int, list[Sample]], object] | None = None,
        number: int = 0,
    ):
        self.engine, self.sampling, self.finished, self.number = engine, sampling, finished, number
        self.sizes = {i: len(prompts) for i, prompts in groups.items()}
        self.count = len(groups) if count is None else count
        self.requests, self.parts, self.done, self.lost = {}, {i: {} for i in groups}, {}, 0
        try:
            for i, prompts in groups.items():
                self._request(i, prompts)
        except BaseException:
            self.abort()
            raise

    def _request(self, i, prompts):
        """Request the completions of a group: together if their prompts are the same, else one by one."""
        if prompts[0].dialogue is None:
            self._add(i, 0, prompts, None)
            return
        limits = []
        for prompt in prompts:
            longest = self.engine.policy.longest
            room = self.sampling.max_tokens if longest is None else longest - len(prompt.ids)
            if room < 1:
                raise ValueError(
                    f"a prompt has {len(prompt.ids)} tokens with what the environment added, and the model's limit "
                    f"is {longest}; shorten what reset returns"
                )
            limits.append(min(self.sampling.max_tokens, room))
        if all(prompt.ids == prompts[0].ids for prompt in prompts):
            self._add(i, 0, prompts, limits)
            return
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            self._add(i, number, [prompt], [limit])

    def _add(self, i, first, prompts, limits):
        """Request completions of group i; `first` is the number of the first one."""
        key = i + (first << APART)
        dialogues = None if limits is None else [prompt.dialogue for prompt in prompts]
        request_id = key + (self.number << FIRST)
        self.engine.add_request(
            prompts[0].ids, len(prompts), self.sampling, request_id=request_id, max_tokens=limits, dialogues=dialogues,
            draw_key=key,
        )  # fmt: skip
        self.requests[request_id] = i, first

    def add(self, outputs: Mapping[int, Sequence[Sample]]) -> None:
        """Take the completions of this drawing among those that finished in a step of the backend."""
        for request_id in filter(self.requests.__contains__, outputs):
            (i, first), samples = self.requests[request_id], outputs[request_id]
            limited = (_limited(sample, self.sampling, self.engine.policy.longest) for sample in samples)
            self.parts[i] |= dict(enumerate(limited, first))
            if len(self.parts[i]) == self.sizes[i] and not self.over:
                self.done[i] = [sample for _, sample in sorted(self.parts.pop(i).items())]
                if self.finished is not None:
                    self.finished(i, self.done[i])
        if self.over:
            self.abort()

    @property
    def over(self) -> bool:
        """Whether all wanted groups have finished."""
        return len(self.done) == self.count

    def abort(self) -> None:
        """Drop all requests in flight."""
        self.lost += sum(self.engine.abort_request(request_id) for request_id in self.requests)
        # Others may have finished in the same step as the last one that was wanted, or in part.
        self.lost += sum(len(sample.drawn) for part in self.parts.values() for sample in part.values())
        self.requests, self.parts = {}, {}


def draw_groups(
    engine: RolloutBackend,
    groups: Mapping[int, Sequence[Prompt]],
    sampling: SamplingParams,
    progress: Callable[[float], object] | None = None,
    ranks: Ranks = ALONE,
) -> dict[int, list[Sample]]:
    """Draw a completion of each prompt.

    Args:
        engine: An idle backend.
        groups: The prompts of the completions of each group, by the number of the group.
        sampling: Sampling parameters.
        progress: Called with the share of the work done since the last call.
        ranks: The ranks, which all call this.

    Returns:
        The samples, sorted by group number.
    """
    engine.sync(ranks)
    drawing = Drawing(engine, groups, sampling)
    try:
        for outputs in engine.run(progress):
            drawing.add(outputs)
    finally:
        drawing.abort()
    return dict(sorted(drawing.done.items()))


def _limited(sample, sampling, longest):
    """Name the limit that ended a completion with tools."""
    if sample.dialogue is None or sample.finish_reason != StopReason.LENGTH or longest is None:
        return sample
    shortened = longest - len(sample.prompt_ids) < sampling.max_tokens
    return sample.replace(finish_reason=StopReason.CONTEXT) if shortened else sample
