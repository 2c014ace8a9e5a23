"""The slow backend: transformers' `generate`, for models that the engine does not support, and for comparisons."""

from contextlib import contextmanager

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from fastgrpo.data.records import Sample
from fastgrpo.rollout.backend import RolloutBackend
from fastgrpo.rollout.sampling import OFF, SamplingParams, filter_logps


@contextmanager
def _plain(model):
    """Hide the model's generation config, from which `generate` would take defaults.

    Its filters, for example, would override the settings of the run.
    """
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class DrawRecorder(LogitsProcessor):
    """Applies the repetition penalty, and records the log-prob of each draw and the mass that the filters kept.

    transformers calls the processors with the logits of a step before it draws. The drawn token is the last one in the
    next call, so the recorder keeps the logits of one step. Log-probs are taken before the penalty, so the recorder
    applies it rather than transformers.
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
        if self.sampling.filters:
            filters = {name: getattr(self.sampling, name) for name, _ in OFF}
            self.kept.append((logps - drawn).exp() * filter_logps(self.drawn_from, **filters).exp().sum(-1))


class HFBackend(RolloutBackend):
    """Draws waiting groups with transformers' `generate`, as many at once as max_num_seqs allows.

    The seed of the first request seeds the whole batch. Unlike in the engine, the draws of a group therefore depend on
    the other groups of the batch.
    """

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
        try:
            with self.policy.gather():
                outputs = self._generate(requests, count)
        except BaseException:
            self.waiting.extendleft(reversed(requests))
            raise
        for request in requests:
            del self.unfinished[request.request_id]
        return outputs

    def _generate(self, requests, count):
        sampling, device = requests[0].sampling, self.policy.device
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(requests):  # padded on the left, so that completions begin at one position
            ids[i] = request.prompt_ids[0]  # padding with a prompt token leaves the repetition penalty unchanged
            ids[i, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, longest - len(request.prompt_ids) :] = 1
        recorder = DrawRecorder(sampling)
        settings = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            settings |= {"do_sample": True, "min_p": sampling.min_p or None}
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _plain(self.policy.module):
            torch.manual_seed(sampling.seed % 2**64)
            sequences = self.policy.module.generate(
                ids.to(device).repeat_interleave(count, 0),
                attention_mask=mask.to(device).repeat_interleave(count, 0),
                generation_config=GenerationConfig(
                    max_new_tokens=max(max(request.limits) for request in requests),
                    eos_token_id=list(sampling.stop_token_ids) or None,
                    pad_token_id=0,
                    **settings,
                ),
                logits_processor=LogitsProcessorList([recorder]),
            )
        recorder.close(sequences)
        drawn = sequences[:, longest:].tolist()
        logps = torch.stack(recorder.logps, 1).cpu()
        kept = torch.stack(recorder.kept, 1).cpu() if recorder.kept else None
        limits = [(request.prompt_ids, limit) for request in requests for limit in request.limits]
        rollouts = [
            self._rollout(prompt_ids, i, drawn[i], limit, sampling, logps, kept)
            for i, (prompt_ids, limit) in enumerate(limits)
        ]
        return {request.request_id: rollouts[i * count : (i + 1) * count] for i, request in enumerate(requests)}

    @staticmethod
    def _rollout(prompt_ids, i, ids, limit, sampling, logps, kept):
        stops = [t for t, token in enumerate(ids[:limit]) if token in sampling.stop_token_ids]
        n = stops[0] + 1 if stops else min(limit, len(ids))
        own = logps[i, :n].clone()
        drawn_from = own if kept is None else own - kept[i, :n].log()  # log q = log p - log kept
        reason = "stop" if stops else "length"
        return Sample(prompt_ids, ids[:n], logps=own, sampler_logps=drawn_from, finish_reason=reason)
