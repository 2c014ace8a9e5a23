"""Turns data rows into prompts, and drawn token ids into the completions that reward functions see.

A row is a dict with a `prompt` (a string, or a list of messages) and any columns that the rewards need.
"""

from copy import deepcopy

from transformers import PreTrainedTokenizerBase

from fastgrpo.data.records import Completion, Prompt, Rollout

# What reward functions get from the trainer by name. Every other name may be that of a column.
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


def to_prompt(row: dict, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Tokenize the prompt of a row: a list of messages through the chat template, a string as it is.

    Args:
        row: A data row.
        tokenizer: The policy's tokenizer.

    Returns:
        The `Prompt`, with the row's other columns.

    Raises:
        ValueError: The row has no `prompt`, or its messages are malformed, or there is no chat template for them, or
            reward functions cannot get a column.
    """
    if "prompt" not in row:
        raise ValueError(f"a row has no column 'prompt', only {', '.join(row)}")
    check_columns(row)
    prompt = row["prompt"]
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not isinstance(prompt, list):
        raise ValueError(f"a prompt must be a string or a list of messages, got {prompt!r}")
    elif not prompt or not all(_is_message(message) for message in prompt):
        raise ValueError(
            f"a list of messages must have at least one, each with a role and a content, got {prompt!r:.80}"
        )
    elif tokenizer.chat_template is None:
        raise ValueError("the prompt is a list of messages, but the tokenizer has no chat template; use plain strings")
    else:
        from jinja2 import TemplateError

        try:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(
                f"the tokenizer's chat template refuses the prompt {shortened(prompt)}: {error}; if the template has "
                "no system role, leave the system prompt out"
            ) from None
        ids = ids["input_ids"]
    return Prompt(list(ids), prompt, {name: value for name, value in row.items() if name != "prompt"})


def check_columns(row: dict) -> None:
    """Refuse a row with a column that reward functions cannot get by its name, as a copy.

    Args:
        row: A data row.

    Raises:
        ValueError: A name is no text or one of `RESERVED`, or a value cannot be copied.
    """
    for name, value in row.items():
        if not isinstance(name, str):
            raise ValueError(f"the name of a column must be text, got {name!r}")
        if name in RESERVED:
            raise ValueError(f"the column {name!r} has the name of an argument of reward functions; rename the column")
        try:
            deepcopy(value)
        except Exception as error:  # values of Python rows may be of any class
            raise ValueError(
                f"the column {name!r} holds a value that cannot be copied for reward functions "
                f"({type(error).__name__}: {error}); let them reach it in another way, such as a global variable"
            ) from None


def _is_message(message):
    return isinstance(message, dict) and "role" in message and ("content" in message or "tool_calls" in message)


def shortened(text: str | list, limit: int = 60) -> str:
    """Show the beginning of a prompt or a completion on one line, for an error message.

    Args:
        text: A string, or messages, the last of which is shown.
        limit: How many characters are shown at most.

    Returns:
        The text in quotes.
    """
    if isinstance(text, list) and text:
        text = text[-1].get("content", text[-1]) if isinstance(text[-1], dict) else text[-1]
    shown = repr(str(text))
    return shown if len(shown) <= limit else shown[:limit] + "...'"


def to_completion(prompt: Prompt, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Decode what was drawn for a prompt.

    Args:
        prompt: The prompt.
        rollout: What was drawn.
        tokenizer: The policy's tokenizer.

    Returns:
        A `Completion` without rewards; its content is a string, or a list of one message where the prompt is a list.
    """
    text = tokenizer.decode(rollout.ids, skip_special_tokens=True)
    content = text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
    return Completion(prompt, rollout, content)
