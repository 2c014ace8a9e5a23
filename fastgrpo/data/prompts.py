"""Rows -> a stream of prompts, with a cursor that can be saved and restored.

A row is a dict with a `prompt` (a string, or a list of messages) and any columns the rewards need. A source gives rows
by `take(n)`, hears by `observe(accuracy)` how the policy fared on them, and can save and restore its place.
"""

from tqdm import tqdm

from fastgrpo.data.records import Prompt


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
