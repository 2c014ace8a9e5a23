"""Rows -> a stream of prompts, with a cursor that can be saved and restored.

A row is a dict with a `prompt` (a string, or a list of messages) and any columns the rewards need. A source gives rows
by `take(n)`, hears by `observe(accuracy)` how the policy fared on them, and can save and restore its place.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from fastgrpo.policy.batch import Prompt


class ShuffledRows:
    """Rows in epochs, each in a random order of its own."""

    def __init__(self, rows, *, seed=0, shuffle=True):
        if not len(rows):
            raise ValueError("the data set has no rows")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.drawn = 0
        self._cached = (None, None)

    def __len__(self):
        return len(self.rows)

    def take(self, count):
        """The next `count` rows."""
        start, self.drawn = self.drawn, self.drawn + count
        return [self.rows[self._order(n // len(self.rows))[n % len(self.rows)]] for n in range(start, self.drawn)]

    def _order(self, epoch):
        """Indices of the rows in this epoch's order; the one in use is kept."""
        if self._cached[0] != epoch:
            order = list(range(len(self.rows)))
            if self.shuffle:
                random.Random(f"{self.seed}-{epoch}").shuffle(order)
            self._cached = (epoch, order)
        return self._cached[1]

    def observe(self, accuracy):
        """Accuracy changes nothing here."""
        return False

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


@dataclass(frozen=True)
class Level:
    """A stage of a curriculum: left when the mean accuracy of `WINDOW` steps reaches until_accuracy, or after
    until_steps; the last level is never left."""

    name: str
    source: ShuffledRows
    until_accuracy: float | None = None
    until_steps: int | None = None


class Curriculum:
    """Levels in order, each drawn from until it is left."""

    WINDOW = 3

    def __init__(self, levels):
        self.levels = levels
        self.level, self.recent, self.steps = 0, [], 0

    @property
    def name(self):
        return self.levels[self.level].name

    @property
    def rows(self):
        """Of all levels."""
        return [row for level in self.levels for row in level.source.rows]

    def __len__(self):
        return len(self.levels[-1].source)

    def take(self, count):
        """The next `count` rows of the current level."""
        return self.levels[self.level].source.take(count)

    def observe(self, accuracy):
        """Count a step on the current level, and move on where it is done. Returns whether it moved."""
        level = self.levels[self.level]
        self.steps += 1
        self.recent = [*self.recent, accuracy][-self.WINDOW :]
        able = (
            level.until_accuracy is not None
            and len(self.recent) == self.WINDOW
            and sum(self.recent) / self.WINDOW >= level.until_accuracy
        )
        if self.level + 1 < len(self.levels) and (able or self.steps == level.until_steps):
            self.level, self.recent, self.steps = self.level + 1, [], 0
            return True
        return False

    def state_dict(self):
        return {
            "level": self.level,
            "recent": self.recent,
            "steps": self.steps,
            "sources": [level.source.state_dict() for level in self.levels],
        }

    def load_state_dict(self, state):
        self.level, self.recent, self.steps = state["level"], state["recent"], state["steps"]
        for level, source in zip(self.levels, state["sources"], strict=True):
            level.source.load_state_dict(source)


def load_rows(name, config=None, split="train", columns=()):
    """Rows of a .jsonl file, of SPLIT.jsonl in a folder, or of a hub data set.

    A file serves its own split: for another one, SPLIT.jsonl beside it is looked up.

    Args:
        columns: names that every row must have.

    Returns:
        A sequence of dicts, or None where there is no such split.

    Raises:
        ValueError: no such data set, no rows, or a row that is not a JSON object with these columns (file and line are
            named).
    """
    path = Path(name)
    if path.is_dir():
        path = path / f"{split}.jsonl"
    elif path.suffix == ".jsonl":
        if not path.exists():
            raise ValueError(f"no such file: {path}")
        if split != "train":
            path = path.with_name(f"{split}.jsonl")
    elif path.is_file():
        raise ValueError(f"{path} is not a .jsonl file: write one JSON object a line, with a `prompt` column")
    else:
        return _load_from_hub(name, config, split, columns)
    if not path.exists():
        return None
    rows = read_jsonl(path, columns)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _load_from_hub(name, config, split, columns):
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        reason = " ".join(str(error).split())[:300]
        if reason.startswith("Unknown split"):
            return None
        raise ValueError(
            f"data set {name!r} cannot be loaded ({reason}); name a hub id, a .jsonl file, or a folder with "
            f"{split}.jsonl"
        ) from error
    missing = [column for column in columns if column not in getattr(rows, "column_names", columns)]
    if missing:
        raise ValueError(f"data set {name!r} has no column {missing[0]!r}, only {', '.join(rows.column_names)}")
    return rows


def read_jsonl(path, columns=()):
    """A list of dicts, one a line, each with these columns; empty lines are passed over."""
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8: {error}") from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
            for column in columns:
                if column not in row:
                    raise ValueError(f"{path}:{number}: the row has no column {column!r}, only {', '.join(row)}")
            rows.append(row)
    return rows


def to_prompt(row, tokenizer):
    """A row -> `Prompt`: a list of messages through the chat template, a string as it is.

    Raises:
        ValueError: no `prompt` column, or messages that are none, or without a chat template.
    """
    if "prompt" not in row:
        raise ValueError(f"a row has no column 'prompt', only {', '.join(row)}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not isinstance(prompt, list):
        raise ValueError(f"a prompt must be a string or a list of messages, got {prompt!r}")
    elif not prompt or not all(_is_message(message) for message in prompt):
        raise ValueError(f"a prompt of messages must have some, each with a role and a content, got {prompt!r:.80}")
    elif tokenizer.chat_template is None:
        raise ValueError("the prompt is a list of messages, but the tokenizer has no chat template; use plain strings")
    else:
        from jinja2 import TemplateError

        try:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(
                f"the tokenizer's chat template refuses the prompt {shortened(prompt)}: {error}; a template that knows "
                "no system role takes no system prompt"
            ) from None
        ids = ids["input_ids"]
    return Prompt(list(ids), prompt, {name: value for name, value in row.items() if name != "prompt"})


def _is_message(message):
    return isinstance(message, dict) and "role" in message and ("content" in message or "tool_calls" in message)


def check_prompts(prompts, model, max_tokens, limit="max_completion_length"):
    """Refuse what the model cannot hold: a prompt that leaves no room for max_tokens, or a token without an embedding.

    limit: the name of the setting that is max_tokens.

    Raises:
        ValueError: naming the prompt by its beginning.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    embeddings = model.get_input_embeddings().weight.shape[0]
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"the prompt {shortened(prompt.prompt)} has no tokens")
        if context is not None and len(prompt.ids) + max_tokens > context:
            raise ValueError(
                f"the prompt {shortened(prompt.prompt)} has {len(prompt.ids)} tokens; with {limit} "
                f"{max_tokens} it exceeds the model's context of {context}; shorten the prompt or the completions"
            )
        if max(prompt.ids) >= embeddings:
            raise ValueError(
                f"the prompt {shortened(prompt.prompt)} has the token id {max(prompt.ids)}, but the model has only "
                f"{embeddings} embeddings; use the tokenizer that the model was trained with"
            )


def check_rows(rows, tokenizer, model, max_tokens):
    """Look at every row before the first step, so that none ends the run in the middle: see `to_prompt` and
    `check_prompts`."""
    for row in tqdm(rows, desc="check prompts", delay=2, leave=False):
        check_prompts([to_prompt(row, tokenizer)], model, max_tokens)


def shortened(text, limit=60):
    """How an error message shows a prompt or a completion: on one line, its beginning."""
    if isinstance(text, list) and text:
        text = text[-1].get("content", text[-1]) if isinstance(text[-1], dict) else text[-1]
    shown = repr(str(text))
    return shown if len(shown) <= limit else shown[:limit] + "...'"


def to_completion(prompt, ids, tokenizer):
    """Completion ids -> what reward functions see: a string, or a message list where the prompt was one."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
