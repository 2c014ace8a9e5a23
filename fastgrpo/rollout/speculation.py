"""Speculative decoding without a draft model and without loss: what to draft, and what of it was drawn.

Each token of each completion has a random number of its own (`sampling.uniforms`), so what would be drawn at a position
does not depend on how it came to be computed. A pass computes the newest token of a lane and its drafted tokens; a
token is drawn at each of these positions with the position's own number; and the lane keeps what was drawn up to the
first token that differs from the draft. These are the tokens and log-probs of one step each, except that products of
other shapes round otherwise: log-probs differ in their last digits, and a draw may differ where its random number lies
that close to the border between two tokens, as in a batch of another size.

The drafts of a rollout follow from its requests alone, since nothing is kept from one rollout to the next. A resumed
run therefore drafts, rounds and draws what it would have without the interruption.

Shapes: n lanes in use, k most drafted tokens of a lane, N rows of a pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from fastgrpo.rollout.drafts import PROMPT_LOOKUP_MAX, Followers, Odds, worth_verifying
from fastgrpo.rollout.lanes import Lanes
from fastgrpo.rollout.running import Group, Running

MOST_LANES = 16  # with more lanes in use, a drafted token costs about what it yields


@dataclass(eq=False)
class Texts:
    """What a group has written.

    Attributes:
        followers: What followed each context.
        of: The prompt and the tokens of each completion, by its number.
    """

    followers: Followers = field(default_factory=Followers)
    of: dict[int, list[int]] = field(default_factory=dict)


class Speculation:
    """Drafts tokens for the lanes of an engine, and counts how many of them are accepted."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.most = num_speculative_tokens
        self.begin()

    def begin(self) -> None:
        """Forget all, because a rollout begins: it drafts the same whatever was drawn before."""
        self.odds, self.texts = Odds(), WeakKeyDictionary()  # of the groups in flight
        self.drafted = self.accepted = self.saved = 0

    def drafts(self, running: Sequence[Running | None], lanes: Lanes, steps: int) -> list[list[int] | None] | None:
        """Draft tokens, as many as are worth a pass.

        Returns:
            [n] the drafted tokens of each lane, or None for a lane without a completion in flight. None alone where a
            decode step is better.
        """
        finished = lanes.finished[: len(running)].tolist()
        live = [i for i, completion in enumerate(running) if completion and not finished[i]]
        if not 0 < len(live) <= MOST_LANES:
            return None
        guessed = [self._guess(running[i], lanes.tokens[i], steps) for i in live]
        counts = worth_verifying([chances for _, chances in guessed])
        if not any(counts):
            return None
        drafts = [None] * len(running)
        for lane, (tokens, _), count in zip(live, guessed, counts, strict=True):
            drafts[lane] = tokens[:count]
        return drafts

    def _guess(self, completion, tokens, steps):
        """Read on in the texts of a group. Returns up to k tokens that may come next, and the chance of each."""
        group, number, drawn = completion.group, completion.number, completion.drawn(steps)
        texts = self._texts(group)
        text = texts.of.setdefault(number, [*group.request.prompt_ids])
        prompt = len(group.request.prompt_ids)
        self._read(texts, text, tokens[len(text) - prompt : drawn].tolist())
        drafted, chances, chance = [], [], 1.0
        # One token is drawn after the drafted ones, and the limit counts it.
        while len(drafted) < min(self.most, group.request.limits[number] - drawn - 1):
            guess = texts.followers.guess(text[-PROMPT_LOOKUP_MAX:] + drafted)
            if guess is None:
                break
            chance *= self.odds.of(guess.kind)
            drafted.append(guess.token)
            chances.append(chance)
        return drafted, chances

    def _texts(self, group: Group) -> Texts:
        """Return what a group has written, with the rest of its finished completions."""
        prompt = group.request.prompt_ids
        if group not in self.texts:
            self.texts[group] = Texts()
            self.texts[group].followers.add(prompt, 1)
        texts = self.texts[group]
        for number, rollout in group.done.items():
            text = texts.of.setdefault(number, [*prompt])
            self._read(texts, text, rollout.ids[len(text) - len(prompt) :])
        return texts

    def _read(self, texts, text, tokens):
        """Read new tokens of a text. Each is guessed first, so that odds are known where nothing is drafted, too."""
        for token in tokens:
            guess = texts.followers.guess(text)
            if guess is not None:
                self.odds.note(guess, token)
            text.append(token)
            texts.followers.add(text, len(text) - 1)

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """Count what came of a pass."""
        self.drafted += drafted
        self.accepted += accepted
        self.saved += tokens

    def metrics(self, lane_steps: int) -> dict[str, float]:
        """Return what was measured in the present rollout."""
        return {
            "rollout/draft_acceptance_rate": self.accepted / max(self.drafted, 1),
            "rollout/tokens_per_step": 1 + self.saved / max(lane_steps, 1),
        }


class Verification:
    """The rows of a pass that draws at the newest token and at the drafted tokens of each lane."""

    def __init__(self, drafts: Sequence[Sequence[int] | None], lanes: Lanes) -> None:
        self.live = [lane for lane, tokens in enumerate(drafts) if tokens is not None]
        self.drafts = [drafts[lane] for lane in self.live]
        device, counts = lanes.token.device, [1 + len(tokens) for tokens in self.drafts]
        self.lanes = torch.tensor(self.live, device=device)  # [live lanes]
        self.owners = self.lanes.repeat_interleave(torch.tensor(counts, device=device))  # [N]
        self.offsets = torch.tensor([j for count in counts for j in range(count)], device=device)
        newest = lanes.token[self.lanes].tolist()
        rows = [[first, *tokens] for first, tokens in zip(newest, self.drafts, strict=True)]
        self.ids = torch.tensor([token for tokens in rows for token in tokens], device=device)
        self.positions = lanes.position[self.owners] + self.offsets
        self.uniforms = lanes.uniforms[self.owners, lanes.length[self.owners] + self.offsets]

    def seen(self, lanes: Lanes) -> torch.Tensor:
        """Return the tokens that a repetition penalty counts at each row: those of its lane, and the drafts before it.

        Returns:
            [N, V] bool.
        """
        seen, row = lanes.seen[self.owners], 0
        for tokens in self.drafts:
            for j, token in enumerate(tokens, 1):
                seen[row + j : row + 1 + len(tokens), token] = True
            row += 1 + len(tokens)
        return seen

    def accepted(self, drawn: Sequence[int], stop_ids: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Compare what was drawn with what was drafted.

        Args:
            drawn: [N] the token that was drawn at each row.
            stop_ids: Tokens that end a completion.
        """
        counts, rows, accepted, row = [], [], 0, 0
        for tokens in self.drafts:
            count = 1
            while count <= len(tokens) and drawn[row + count - 1] == tokens[count - 1] not in stop_ids:
                count += 1
            last = drawn[row + count - 1]
            accepted += count - 1 + (count <= len(tokens) and last == tokens[count - 1])
            counts.append(count)
            rows += range(row, row + count)
            row += 1 + len(tokens)
        return counts, rows, accepted
