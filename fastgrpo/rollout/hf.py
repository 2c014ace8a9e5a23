"""The slow backend: transformers' `generate`, for models that the engine does not support, and for comparisons."""

import math
import random
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from fastgrpo.data.records import Sample, StopReason, Turn
from fastgrpo.rollout.backend import Request, RolloutBackend
from fastgrpo.rollout.sampling import OFF, SamplingParams, filter_logps

READS_PADDING = "minimax", "recurrent_gemma", "xlstm"  # their recurrent layers do not ignore padding


@contextmanager
def _plain(model):
    """Hide the model's generation config, whose filters, for example, `generate` would add to the run's settings."""
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class DrawRecorder(LogitsProcessor):
    """Applies the repetition penalty, and records the log-prob of each draw and the mass that the filters kept.

    transformers calls the processors with the logits of a step before it samples. The sampled token is the last one in
    the next call, so the recorder keeps the logits of one step. Log-probs are taken before the penalty, so the recorder
    applies the penalty rather than transformers.
    """

    def __init__(self, sampling: SamplingParams):
        self.sampling = sampling
        self.previous, self.drawn_from, self.logps, self.kept = None, None, [], []

    def __call__(self, input_ids, scores):
        self.close(input_ids)
        temperature = self.sampling.temperature or 1.0
        self.previous = self.drawn_from = torch.log_softmax(scores.float() / temperature, dim=-1)
        if self.sampling.penalizes:
            scores = RepetitionPenaltyLogitsProcessor(float(self.sampling.repetition_penalty))(input_ids, scores)
            self.drawn_from = torch.log_softmax(scores.float() / temperature, dim=-1)
        return scores

    def close(self, sequences: torch.Tensor) -> None:
        """Record the log-probs of the last column of tokens [S, T], drawn from the previous step's logits."""
        if self.previous is None:
            return
        logps, drawn = (all_logps.gather(-1, sequences[:, -1:])[:, 0] for all_logps in (self.previous, self.drawn_from))
        self.logps.append(logps)
        if self.sampling.differs:
            filters = {name: getattr(self.sampling, name) for name, _ in OFF} if self.sampling.filters else {}
            self.kept.append((logps - drawn).exp() * filter_logps(self.drawn_from, **filters).exp().sum(-1))


@dataclass(eq=False)
class Lane:
    """A completion in progress: its tokens, a mask of the drawn tokens, and their log-probs."""

    request: Request
    number: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[torch.Tensor] = field(default_factory=list)
    sampler_logps: list[torch.Tensor] = field(default_factory=list)
    versions: list[torch.Tensor] = field(default_factory=list)
    answer: Future[Turn] | None = None
    sample: Sample | None = None  # set when it has ended

    @property
    def left(self) -> int:
        """How many more tokens it may have."""
        return self.request.limits[self.number] - len(self.ids)

    def draw(
        self, ids: list[int], logps: torch.Tensor, kept: torch.Tensor | None, versions: torch.Tensor | None = None
    ) -> None:
        """Add drawn tokens up to the first stop token. Pass the turn to the dialogue, or end."""
        stops = [t for t, token in enumerate(ids[: self.left]) if token in self.request.sampling.stop_token_ids]
        n = stops[0] + 1 if stops else min(self.left, len(ids))
        self.ids, self.mask = self.ids + ids[:n], self.mask + [1] * n
        self.logps.append(logps[:n])
        if versions is not None:
            self.versions.append(versions[:n])
        if kept is not None:
            self.sampler_logps.append(logps[:n] - kept[:n].log())  # log q = log p - log kept
        if stops and self.request.dialogues:
            self.answer = self.request.dialogues[self.number].answer(ids[:n], self.left - 1)
        else:
            self.end(StopReason.STOP if stops else StopReason.LENGTH)

    def resume(self) -> None:
        """Wait for the answer, and append it or end."""
        turn, self.answer = self.answer.result(), None
        if turn.reason is not None:
            self.end(turn.reason)
        self.ids, self.mask = self.ids + turn.ids, self.mask + [0] * len(turn.ids)

    def end(self, reason: StopReason) -> None:
        """Make the sample."""
        dialogue = self.request.dialogues and self.request.dialogues[self.number]
        if dialogue:
            dialogue.close(reason)
        logps = torch.cat(self.logps)
        self.sample = Sample(
            self.request.prompt_ids, self.ids, logps=logps,
            sampler_logps=torch.cat(self.sampler_logps) if self.sampler_logps else logps,
            finish_reason=reason, tool_mask=None if all(self.mask) else self.mask, dialogue=dialogue,
            versions=torch.cat(self.versions) if self.versions else None,
        )  # fmt: skip


class HFBackend(RolloutBackend):
    """Draws waiting groups with transformers' `generate`, as many at once as max_num_seqs allows.

    A batch has one seed, which is made from its first request. Unlike in the engine, the draws of a group therefore
    depend on the other groups of the batch. Completions with tools are generated turn by turn, and `generate` computes
    earlier turns again. A turn begins when the tools of all completions have returned.
    """

    MOST = 256  # fewer than in the engine, because `generate` does not plan its memory

    def _stop(self, request):
        raise AssertionError("no request runs between two steps")

    @torch.no_grad()
    def step(self) -> dict[int, list[Sample]]:
        """Draw all completions of the waiting groups that fit into one batch."""
        if not self.waiting:
            return {}
        count, requests = len(self.waiting[0].limits), []
        while self.waiting and len(self.waiting[0].limits) == count:
            if (len(requests) + 1) * count > self.max_num_seqs:
                break
            requests.append(self.waiting.popleft())
        lanes = [Lane(request, number) for request in requests for number in range(count)]
        drawing, turn = lanes, 0
        try:
            with self.policy.gather():
                while drawing:
                    self._generate(drawing, turn)
                    drawing, turn = [lane for lane in drawing if lane.sample is None], turn + 1
                    for lane in drawing:
                        lane.resume()
                    drawing = [lane for lane in drawing if lane.sample is None]
        except BaseException:
            for lane in lanes:
                if lane.request.dialogues and lane.sample is None:
                    lane.request.dialogues[lane.number].close(StopReason.ABORTED)
            self.waiting.extendleft(reversed(requests))
            raise
        for request in requests:
            del self.unfinished[request.request_id]
        samples = [lane.sample for lane in lanes]
        return {request.request_id: samples[i * count : (i + 1) * count] for i, request in enumerate(requests)}

    def _generate(self, lanes, turn):
        """Draw one turn of each lane."""
        # `generate` draws equally many tokens for all lanes; those that would exceed the context come later.
        most, context = max(lane.left for lane in lanes), self.policy.context or math.inf
        fits = [len(lane.request.prompt_ids) + len(lane.ids) + most <= context for lane in lanes]
        if any(fits) and not all(fits):
            for which in (True, False):
                self._generate([lane for lane, fit in zip(lanes, fits, strict=True) if fit is which], turn)
            return
        lengths = [len(lane.request.prompt_ids) + len(lane.ids) for lane in lanes]
        if len({*lengths}) > 1 and self.policy.shape.model_type in READS_PADDING:
            for length in sorted({*lengths}):
                self._generate([lane for lane, n in zip(lanes, lengths, strict=True) if n == length], turn)
            return
        sampling, device = lanes[0].request.sampling, self.policy.device
        before = [lane.request.prompt_ids + lane.ids for lane in lanes]
        longest = max(map(len, before))
        ids = torch.zeros(len(lanes), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, known in enumerate(before):  # padded on the left, so that turns begin at one position
            ids[i] = known[0]  # padding with a prompt token leaves the repetition penalty unchanged
            ids[i, longest - len(known) :] = torch.tensor(known)
            mask[i, longest - len(known) :] = 1
        recorder = DrawRecorder(sampling)
        settings = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            settings |= {"do_sample": True, "min_p": sampling.min_p or None}
        first = lanes[0]  # differs between the batches of a step, and between ranks
        seed = random.Random(f"{sampling.seed % 2**64} {first.request.draw_key} {first.number} {turn}").getrandbits(63)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _plain(self.policy.module):
            torch.manual_seed(seed)
            sequences = self.policy.module.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=GenerationConfig(
                    max_new_tokens=most,
                    eos_token_id=list(sampling.stop_token_ids) or None,
                    pad_token_id=0,
                    **settings,
                ),
                logits_processor=LogitsProcessorList([recorder]),
            )
        recorder.close(sequences)
        logps = torch.stack(recorder.logps, 1).cpu()
        kept = torch.stack(recorder.kept, 1).cpu() if recorder.kept else [None] * len(lanes)
        for i, lane in enumerate(lanes):
            lane.draw(sequences[i, longest:].tolist(), logps[i].clone(), kept[i])
