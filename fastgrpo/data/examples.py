"""Turns rows for supervised training into token ids: what is given, and what is learned.

A row has a `prompt` and a `completion`, both text or both lists of messages; or `messages`, a conversation whose
assistant messages are learned, each after all that came before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief

from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import shortened, to_prompt


@dataclass(frozen=True)
class Example:
    """A prompt and the completion that is learned after it.

    Attributes:
        prompt_ids: Token ids of the prompt.
        completion_ids: Token ids of the completion, with the token that ends it.
    """

    prompt_ids: list[int]
    completion_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def is_example(row: dict) -> bool:
    """Tell whether a row has something to learn, beyond a prompt.

    Args:
        row: A row.

    Returns:
        Whether it has a `completion` or `messages`.
    """
    return "completion" in row or "messages" in row


def to_examples(row: dict, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Tokenize a row for supervised training.

    Args:
        row: A row with `prompt` and `completion`, or with `messages`.
        tokenizer: The policy's tokenizer. Messages go through its chat template.

    Returns:
        One example for a row with a completion, and one for each assistant message of a row with messages.

    Raises:
        ValueError: The row has neither, a text is empty or of another type, or the chat template writes a conversation
            otherwise than its beginning, so that prompt and completion cannot be told apart.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with a prompt and a completion, got {brief(row)}")
    if "messages" in row:
        return _of_messages(row["messages"], tokenizer)
    for name in ("prompt", "completion"):
        if name not in row:
            raise ValueError(
                f"the row has no column {name!r}, only {', '.join(map(str, row))}; supervised training needs a prompt "
                "and a completion, or messages"
            )
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        if not isinstance(completion, list) or len(completion) != 1:
            raise ValueError(
                "the prompt is a list of messages, so the completion must be a list with one assistant message, got "
                f"{brief(completion)}"
            )
        return [_of_turn(prompt, completion[0], tokenizer)]
    if not isinstance(completion, str):
        raise ValueError(f"the completion must be a string where the prompt is one, got {brief(completion)}")
    ids = to_prompt({"prompt": prompt}, tokenizer).ids
    return [Example(ids, _completion_ids(completion, tokenizer))]


def _completion_ids(completion, tokenizer):
    """Tokenize a completion that is plain text, as a policy would draw it: without a token of the beginning."""
    if not completion:
        raise ValueError("the completion is empty; leave out rows that teach nothing")
    return [*to_prompt({"prompt": completion}, _WithoutSpecials(tokenizer)).ids, tokenizer.eos_token_id]


class _WithoutSpecials:
    """A tokenizer that adds no special tokens to a text."""

    chat_template = None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text):
        return self.tokenizer(text, add_special_tokens=False)


def _of_messages(messages, tokenizer):
    """Make an example of each assistant message of a conversation."""
    if not isinstance(messages, list):
        raise ValueError(f"messages must be a list of messages, got {brief(messages)}")
    turns = [i for i, m in enumerate(messages) if i and isinstance(m, dict) and m.get("role") == "assistant"]
    if not turns:
        raise ValueError("the messages have no assistant message after the first one, so there is nothing to learn")
    return [_of_turn(messages[:i], messages[i], tokenizer) for i in turns]


def _of_turn(before, message, tokenizer):
    """Make an example of one assistant message and what came before it."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise ValueError(f"the completion must be a message with the role assistant, got {brief(message)}")
    prompt = to_prompt({"prompt": before}, tokenizer).ids
    to_prompt({"prompt": [*before, message]}, tokenizer)  # refuses a message that is none
    whole = list(tokenizer.apply_chat_template([*before, message], tokenize=True, return_dict=True)["input_ids"])
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise ValueError(
            f"the chat template writes the conversation before {shortened([message])} otherwise where the answer "
            "follows, so prompt and completion cannot be told apart; give them as text"
        )
    learned = whole[len(prompt) :]
    ends = [i for i, token in enumerate(learned) if token == tokenizer.eos_token_id]
    return Example(prompt, learned[: ends[-1] + 1] if ends else learned)  # templates write a line break after the end
