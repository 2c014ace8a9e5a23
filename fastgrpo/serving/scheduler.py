"""Runs the engine in one thread, and hands tokens to the event loop as they are drawn.

Other threads never touch the engine: they post functions, which the engine's thread calls between two steps. This is a
thread of the scheduler, or the one that calls `turn`.

Requests start first come, first served. Completions in flight must have the same temperature, filters, penalty and stop
tokens. A request with other parameters waits until the engine is idle, and so do all later requests. No request
starves, but clients with the same sampling parameters share the engine better.
"""

import asyncio
import dataclasses
import logging
import math
import queue
import secrets
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fastgrpo.data.records import StopReason
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams, filter_logps

logger = logging.getLogger(__name__)
PAUSES = ("abort", "wait", "keep")  # what a pause does with completions in flight; `keep` stops them where they are
SCORED_ROWS = 256  # rows of logits at a time in `score`
EXCLUDED = -9999.0  # the log-prob of tokens that the filters exclude, as in vLLM; JSON has no infinity


class Busy(Exception):
    """Too many requests are unfinished."""


@dataclass(frozen=True)
class Part:
    """Further tokens of a completion, their log-probs under the sampling distribution, and why it ended, or None."""

    ids: list[int]
    logps: list[float]
    reason: str | None
    version: str


@dataclass(frozen=True)
class Scores:
    """Log-probs of the tokens of a sequence after the first one, and the likeliest tokens at their places."""

    logps: list[float]
    top: list[list[tuple[int, float]]]
    version: str  # of the weights


@dataclass(eq=False)
class Job:
    """n completions of a prompt."""

    prompt_ids: list[int]
    n: int
    sampling: SamplingParams
    draw_key: int = 0  # determines the draws together with the seed
    watched: bool = False  # whether to deliver tokens before the request has finished
    ended: bool = False  # set by the receiver if it needs no further tokens
    seen: int = 0  # delivered tokens of each completion
    deliver: Callable[[Any], object] | None = None
    request_id: int | None = None


class Scheduler:
    """Admits requests to an idle engine made with `continuous`, and delivers its tokens. `close` ends it.

    If `max_requests` are unfinished, `run` raises `Busy`. A thread runs the engine if `threaded`, otherwise `turn` does
    in the caller's thread.
    """

    def __init__(self, engine: RolloutEngine, max_requests: int = 1024, threaded: bool = True):
        self.engine, self.max_requests, self.open = engine, max_requests, 0
        self.version, self.paused = "0", None  # the version of the weights; the mode of a pause
        self.counts = Counter()  # finished requests by reason, and tokens of prompts and completions
        self._posted, self._waiting, self._running = queue.SimpleQueue(), deque(), {}
        self._scoring, self._drained, self._shared = deque(), [], None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True) if threaded else None
        if threaded:
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return not self._closed if self._thread is None else self._thread.is_alive()

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of running and of waiting requests."""
        waiting = len(self._waiting) + len(self.engine.waiting)
        return len(self._running) - len(self.engine.waiting), waiting

    def close(self, reason: str = "the server is shutting down") -> None:
        """Abort all requests, and end the thread if there is one."""
        ended, self._closed = self._closed, True
        if self._thread is not None:
            self._posted.put(lambda: None)
            self._thread.join()
        elif not ended:
            self._receive(wait=False)
            self._end(reason)

    def updated(self, version: str) -> None:
        """Go on with new weights. Completions in flight keep the keys and values of their earlier tokens."""
        self._hand_over({request_id: job.seen for request_id, job in self._running.items()})
        self.version = version
        if self._running:
            self.engine.weights.hold(math.inf)

    def turn(self, wait: bool = False) -> None:
        """Call what other threads posted, or `wait` for it, and run one step of the engine."""
        self._receive(wait)
        if self.paused != "keep":
            self._score_one()
            self._step()

    def check_room(self, count: int) -> None:
        """Raise if this many requests cannot be taken."""
        if not self.alive:
            raise RuntimeError("the engine has stopped; the log of the server has the error")
        if self.open + count > self.max_requests:
            raise Busy(f"{self.open} of at most {self.max_requests} requests are unfinished; try again later")

    async def run(self, jobs: Sequence[Job]) -> AsyncIterator[tuple[Job, list[Part]]]:
        """Run jobs, and yield further parts of their completions until all have finished.

        A job whose `ended` is set by the receiver is aborted, and so are all if the iterator is closed.
        """
        self.check_room(len(jobs))
        loop, events, left = asyncio.get_running_loop(), asyncio.Queue(), set(jobs)
        self.open += len(jobs)
        try:
            for job in jobs:
                job.deliver = partial(_call, loop, events.put_nowait)
                self._posted.put(partial(self._add, job))
            while left:
                job, parts = await events.get()
                if isinstance(parts, Exception):
                    left.discard(job)
                    raise parts
                if job not in left:
                    continue
                yield job, parts
                if job.ended or all(part.reason for part in parts):
                    left.discard(job)
                    self._posted.put(partial(self._cancel, job, StopReason.STOP))
        finally:
            self.open -= len(jobs)
            for job in left:
                self._posted.put(partial(self._cancel, job))

    async def score(self, ids: list[int], sampling: SamplingParams, top: int) -> Scores:
        """Compute the log-probs of given tokens, and the `top` likeliest tokens at each place."""
        self.check_room(0)
        future = Future()
        self._posted.put(partial(self._scoring.append, (future, ids, sampling, top)))
        return await asyncio.wrap_future(future)

    async def pause(self, mode: str) -> None:
        """Start no further requests until `resume`; `wait` returns when those in flight have finished."""
        self.check_room(0)
        future = Future()
        self._posted.put(partial(self._pause, mode, future))
        await asyncio.wrap_future(future)

    def resume(self) -> None:
        """Start requests again."""
        self._posted.put(self._resume)

    def _work(self):
        reason = "the engine stopped; the log of the server has the error"
        try:
            while not self._closed:
                frozen = self.paused == "keep"
                busy = self._running or self._scoring or self._drained or (self._waiting and self.paused is None)
                self.turn(wait=frozen or not busy)
            reason = "the server is shutting down"
        finally:
            self._end(reason)

    def _end(self, reason):
        for job in (*self._waiting, *self._running.values()):
            job.deliver((job, RuntimeError(reason)))
        self._waiting.clear()
        self._running.clear()
        while self._scoring:
            future, *_ = self._scoring.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(reason))
        while self._drained:
            _settle(self._drained.pop())
        self.engine.abort_all()

    def _receive(self, wait):
        """Call the posted functions."""
        while True:
            try:
                function = self._posted.get(block=wait)
            except queue.Empty:
                return
            function()
            wait = False

    def _add(self, job):
        self._waiting.append(job)

    def _cancel(self, job, reason=StopReason.ABORTED):
        if job in self._waiting:
            self._waiting.remove(job)
        elif self._running.pop(job.request_id, None) is not None:
            self.counts["prompt_tokens"] += len(job.prompt_ids)
            self.counts["generation_tokens"] += self.engine.abort_request(job.request_id)
        else:
            return
        self.counts[f"finished_{reason}"] += job.n

    def _pause(self, mode, future):
        self.paused = mode
        if mode == "abort":
            self._hand_over({request_id: job.seen for request_id, job in self._running.items()})
            for job in [*self._running.values()]:
                self._cancel(job)
                job.deliver((job, [Part([], [], StopReason.ABORTED, self.version)] * job.n))
        if mode == "wait" and self._running:
            self._drained.append(future)
        else:
            _settle(future)

    def _resume(self):
        self.paused = None
        while self._drained:
            _settle(self._drained.pop())

    def _step(self):
        """Start waiting requests, decode, and hand over what was drawn."""
        while self._waiting and self.paused is None and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft())
        if not self._running:
            while self._drained:
                _settle(self._drained.pop())
            return
        try:
            outputs = self.engine.step()
            self.engine.check_finite(outputs)
        except Exception as error:
            self._fail(error)
            return
        for request_id, samples in outputs.items():
            job = self._running.pop(request_id)
            self.counts["prompt_tokens"] += len(job.prompt_ids)
            for sample in samples:
                self.counts[f"finished_{sample.finish_reason}"] += 1
                self.counts["generation_tokens"] += len(sample.ids)
            ended = [(each.ids[job.seen :], each.sampler_logps[job.seen :], each.finish_reason) for each in samples]
            self._deliver(job, ended)
        try:
            self._hand_over({request_id: job.seen for request_id, job in self._running.items() if job.watched})
        except Exception as error:
            self._fail(error)

    def _hand_over(self, seen):
        """Deliver the further tokens of running requests."""
        for request_id, parts in self.engine.progress(seen).items():
            job = self._running[request_id]
            if any(ids for ids, *_ in parts):
                job.seen += max(len(ids) for ids, *_ in parts)
                self._deliver(job, parts)

    def _fits(self, job):
        """Return whether a request may start beside those in flight."""
        mine = job.sampling.distribution, job.sampling.stop_token_ids
        if not self._running:
            self._shared = mine
        return mine == self._shared

    def _start(self, job):
        sampling = job.sampling
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        try:
            job.request_id = self.engine.add_request(job.prompt_ids, job.n, sampling, draw_key=job.draw_key)
            self._running[job.request_id] = job
        except ValueError as error:
            job.deliver((job, error))

    def _deliver(self, job, parts):
        if not all(logps.isfinite().all() for _, logps, _ in parts):
            self._cancel(job)
            job.deliver((job, RuntimeError("the model computed log-probs that are not finite")))
            return
        job.deliver((job, [Part(ids, logps.tolist(), reason, self.version) for ids, logps, reason in parts]))

    def _fail(self, error):
        """Abort the running requests, or if none could start, the first one."""
        logger.exception("a step of the engine failed")
        starting = {request.request_id for request in self.engine.waiting}
        failed = [number for number in self._running if number not in starting] or [*self._running][:1]
        for number in failed:
            job = self._running.pop(number)
            self.engine.abort_request(number)
            self.counts["failed"] += 1
            job.deliver((job, RuntimeError(f"the engine failed: {error}")))

    def _score_one(self):
        if self._scoring:
            future, *asked = self._scoring.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(score(self.engine, *asked, self.version))
                except Exception as error:
                    logger.exception("scoring a prompt failed")
                    future.set_exception(RuntimeError(f"the engine failed: {error}"))


def _settle(future):
    if future.set_running_or_notify_cancel():
        future.set_result(None)


def _call(loop, function, *arguments):
    """Call a function in an event loop, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        logger.debug("the event loop of a request is closed")


@torch.inference_mode()
def score(engine: RolloutEngine, ids: list[int], sampling: SamplingParams, top: int, version: str) -> Scores:
    """Compute the log-probs of the tokens after the first under a sampling distribution, and the likeliest tokens."""
    policy, temperature = engine.policy, sampling.temperature or 1.0
    filters = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")} if sampling.temperature else {}
    engine.weights.hold(math.inf)
    tokens = torch.tensor(ids, device=policy.device)
    positions = torch.arange(len(ids), device=policy.device)
    logps, tops = [], []
    with engine.weights.packed.in_use() as product:
        states = engine.weights.states(tokens, positions, PackedAttention([len(ids)], policy.device))
        for start in range(0, len(ids) - 1, SCORED_ROWS):
            rows = states[start : min(start + SCORED_ROWS, len(ids) - 1)]
            everything = filter_logps((policy.logits(rows, product) / temperature).log_softmax(-1), **filters)
            everything = everything.log_softmax(-1) if filters else everything
            targets = tokens[start + 1 : start + 1 + len(rows)]
            own = everything.gather(-1, targets[:, None])[:, 0].clamp(min=EXCLUDED)
            if own.isnan().any():
                raise ValueError("the model computed log-probs that are not finite")
            logps += own.tolist()
            likeliest = everything.topk(min(top, everything.shape[-1]), dim=-1)
            pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            tops += [[(i, p) for i, p in zip(*row, strict=True) if p > -math.inf] for row in pairs]
    return Scores(logps, tops, version)
