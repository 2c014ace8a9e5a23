"""The generation loop: prompts in, completions with the log-probs of their draws out.

It runs the policy's own module through the registered attention: no second copy of the weights, no weight sync, and
nothing of the old weights outlives an optimizer step, because keys and values live inside one `generate`.

Shapes: B prompts, G completions each, R live rows, V vocabulary.
"""

import torch

from fastgrpo.batch import Rollout
from fastgrpo.model import head, hidden_states
from fastgrpo.rollout.sampling import SamplingParams, sample
from fastgrpo.rollout.slots import PrefillAttention, Slots

COMPACT_BELOW = 0.75  # live share of the rows under which finished ones are dropped: a copy against wasted compute
POLL_STEPS = 8  # decode steps between two looks at the GPU's finished flags; on a CPU every step is looked at


class RolloutEngine:
    """Generates from `model` in place. Any causal LM that uses transformers' attention interface."""

    def __init__(self, model, *, max_num_seqs=256):
        """max_num_seqs: completions in flight at once; more wait for the next wave."""
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.model = model
        self.max_num_seqs = max_num_seqs

    @torch.no_grad()
    def generate(self, prompts, num_generations=1, sampling=None, progress=None):
        """G completions of each prompt.

        Args:
            prompts: B lists of token ids, none empty. num_generations: G. sampling: `SamplingParams`.
            progress: called with the number of completions that finished, or None.

        Returns:
            B * G `Rollout`s, those of a prompt side by side.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for max_tokens in the model's context.
        """
        sampling = sampling or SamplingParams()
        if num_generations > self.max_num_seqs:
            raise ValueError(f"num_generations={num_generations} does not fit into max_num_seqs={self.max_num_seqs}")
        self._check(prompts, num_generations, sampling)
        device = self.model.device
        generator = None
        if sampling.seed is not None:
            generator = torch.Generator(device).manual_seed(sampling.seed)
        wave = self.max_num_seqs // num_generations
        rollouts = []
        for start in range(0, len(prompts), wave):
            finished = self._wave(prompts[start : start + wave], num_generations, sampling, generator)
            rollouts += finished
            if progress is not None:
                progress(len(finished))
        return rollouts

    def _check(self, prompts, num_generations, sampling):
        if num_generations < 1:
            raise ValueError(f"num_generations must be at least 1, got {num_generations}")
        context = getattr(self.model.config, "max_position_embeddings", None)
        for i, ids in enumerate(prompts):
            if not len(ids):
                raise ValueError(f"prompt {i} has no tokens")
            if context is not None and len(ids) + sampling.max_tokens > context:
                raise ValueError(
                    f"prompt {i} has {len(ids)} tokens; with max_tokens={sampling.max_tokens} it exceeds the model's "
                    f"context of {context}; shorten the prompt or lower max_completion_length"
                )

    def _wave(self, prompts, num_generations, sampling, generator):
        device = self.model.device
        total = len(prompts) * num_generations
        tokens = torch.zeros(total, sampling.max_tokens, dtype=torch.int64, device=device)
        logps = torch.zeros(total, sampling.max_tokens, dtype=torch.float32, device=device)
        lengths = torch.zeros(total, dtype=torch.int64, device=device)
        stopped = torch.zeros(total, dtype=torch.bool, device=device)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        slots, states = self._prefill(prompts, num_generations)
        rows = torch.arange(total, device=device)  # the completion that each live slot is writing
        positions = slots.prompt_lengths[slots.groups]
        poll = 1 if device.type == "cpu" else POLL_STEPS
        for t in range(sampling.max_tokens):
            drawn, drawn_logps = sample(self._logits(states), sampling, generator)
            live = ~stopped[rows]
            tokens[rows, t] = drawn
            logps[rows, t] = drawn_logps
            lengths[rows] += live
            stopped[rows] |= torch.isin(drawn, stop_ids)
            if t + 1 == sampling.max_tokens:
                break
            if (t + 1) % poll == 0:
                keep = (~stopped[rows]).nonzero()[:, 0]
                if not len(keep):
                    break
                if len(keep) < COMPACT_BELOW * len(rows):
                    slots.compact(keep)
                    rows, positions, drawn = rows[keep], positions[keep], drawn[keep]
            slots.step()
            states = hidden_states(self.model, drawn, positions, slots)
            positions = positions + 1
        return _unpack(tokens, logps, lengths, stopped)

    def _prefill(self, prompts, num_generations):
        """The prompts once each: their keys and values, and the state [R, D] that predicts each first token."""
        device = self.model.device
        lengths = [len(ids) for ids in prompts]
        slots = Slots(lengths, num_generations, device)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        states = hidden_states(self.model, ids, positions, PrefillAttention(lengths, device, slots))
        last = slots.prompt_lengths.cumsum(0) - 1
        return slots, states[last][slots.groups]

    def _logits(self, states):
        """[R, D] -> [R, V] fp32, also from bf16 states: a rounded logit is a wrong log-prob."""
        weight, bias = head(self.model)
        if states.dtype == torch.float32:
            logits = states @ weight.T
        elif states.is_cuda:
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
        else:
            logits = states.float() @ weight.float().T
        return logits if bias is None else logits + bias.float()


def _unpack(tokens, logps, lengths, stopped):
    """The device buffers of a wave -> Rollouts on the host, in one transfer each."""
    tokens, logps, lengths, stopped = (tensor.cpu() for tensor in (tokens, logps, lengths, stopped))
    return [
        Rollout(tokens[i, :n].tolist(), logps[i, :n].clone(), "stop" if stopped[i] else "length")
        for i, n in enumerate(lengths.tolist())
    ]
