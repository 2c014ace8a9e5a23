"""Makes the prompts of rows, and starts their completions: with tools, each has a dialogue of its own."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastgrpo.data.prompts import checked_row, to_prompt
from fastgrpo.data.records import Prompt, Sample
from fastgrpo.data.turns import TurnBuilder
from fastgrpo.tools.dialogue import Dialogue, dialogue_metrics
from fastgrpo.tools.environments import Environments, seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# An environment may write the whole prompt, in its reset; rows then need none.
NO_PROMPT = {"prompt": [{"role": "user", "content": ""}]}


class Prompts:
    """Tokenizes the prompts of rows, and starts their completions.

    Raises ValueError if the chat template cannot be used with tools. `stop_token_ids` end a turn, and `max_turns`
    limits the drawn turns of a completion (None does not). The environments are seeded by `seed`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_kwargs: Mapping[str, Any] | None = None,
        environments: Environments | None = None,
        stop_token_ids: Sequence[int] = (),
        max_turns: int | None = None,
        seed: int = 0,
    ):
        self.tokenizer, self.template_kwargs, self.environments = tokenizer, template_kwargs, environments
        self.max_turns, self.seed, self.builders = max_turns, seed, {}
        for name, box in environments.boxes.items() if environments else ():
            self.builders[name] = TurnBuilder(tokenizer, box.schemas, template_kwargs or {}, stop_token_ids)

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        config: Any,
        environments: Environments | None,
        stop_token_ids: Sequence[int],
    ) -> "Prompts":
        """Create an instance from settings."""
        calls = getattr(config, "max_tool_calling_iterations", None)  # supervised training has no tools
        turns = None if calls is None else calls + 1
        return cls(tokenizer, config.template_kwargs, environments, stop_token_ids, turns, config.seed)

    def __call__(self, row: Mapping[str, Any]) -> Prompt:
        """Tokenize the prompt of a row, with the tools."""
        if self.environments is None:
            return to_prompt(row, self.tokenizer, self.template_kwargs)
        written = self.environments.resets and row.get("prompt") is None  # tables have None for a missing value
        prompt, columns = checked_row({**row, **NO_PROMPT} if written else row)
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        self.environments.arguments({"prompt": prompt, **columns})  # the check
        return Prompt(self.builders[self.environments.name_of(row)].prompt(prompt), prompt, columns)

    def start(self, prompts: Mapping[int, Prompt], count: int, *place: int) -> dict[int, list[Prompt]]:
        """Start `count` completions of each prompt.

        `place` (step, batch) and the numbers of prompt and completion seed the environments. Prompts differ within a
        group if the resets return different texts.
        """
        if self.environments is None:
            return {i: [prompt] * count for i, prompt in prompts.items()}
        wanted = [(i, number) for i in prompts for number in range(count)]
        rows = [{"prompt": prompts[i].prompt, **prompts[i].columns} for i, _ in wanted]
        seeds = [seed_of(self.seed, *place, i, number) for i, number in wanted]
        groups, episodes = {i: [] for i in prompts}, self.environments.start(rows, seeds)
        for (i, _), episode in zip(wanted, episodes, strict=True):
            builder, prompt = self.builders[episode.name], prompts[i]
            ids = prompt.ids if episode.messages is prompt.prompt else builder.prompt(episode.messages)
            dialogue = Dialogue(episode, builder, ids, self.max_turns)
            groups[i].append(dataclasses.replace(prompt, ids=ids, prompt=episode.messages, dialogue=dialogue))
        return groups

    def finish(self, groups: Mapping[int, Iterable[Prompt]]) -> None:
        """Return the environments of completions to the pool, after their rewards."""
        if self.environments is not None:
            self.environments.give_back(p.dialogue.episode for group in groups.values() for p in group)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Measure the dialogues of a step."""
        if self.environments is None:
            return {}
        names = dict.fromkeys(name for box in self.environments.boxes.values() for name in box.tools)
        return dialogue_metrics(samples, names)
