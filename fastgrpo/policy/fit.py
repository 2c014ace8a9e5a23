"""Checks that prompts fit the policy. All rows are checked before the first step, not in the middle of a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import join_turns, shortened, to_examples
from fastgrpo.data.records import Prompt, Sample
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks

BAR = {"delay": 2, "leave": False, "dynamic_ncols": True}  # settings of the progress bar


def check_prompts(prompts: Iterable[Prompt], policy: Policy, max_tokens: int) -> None:
    """Raise if a prompt does not fit the policy."""
    for prompt in prompts:
        policy.check_prompt(prompt.ids, max_tokens, f"the prompt {shortened(prompt.prompt)}", "max_completion_length")


def _refuse_unknown(text, ids, tokenizer, name="prompt"):
    """Raise if characters of a text were tokenized as the end token, as by `character_tokenizer`."""
    end = tokenizer.eos_token
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if end is None or getattr(model, "unk_token", None) != end or not isinstance(text, str) or end in text:
        return
    if tokenizer.eos_token_id in ids:
        unknown = "".join(sorted({*text} - tokenizer.get_vocab().keys()))
        raise ValueError(
            f"the {name} {shortened(text)} has characters without a token: {unknown!r}; remove them, or use a "
            "tokenizer that has them"
        )


def prompts_of(
    rows: Sequence[dict] | Rows,
    source: Any,
    policy: Policy,
    max_tokens: int,
) -> Iterator[Prompt]:
    """Tokenize every row with a `fastgrpo.tools.prompts.Prompts`, and check its prompt."""
    return as_rows(rows, "data").each(_fitting(source, policy, max_tokens))


def _fitting(source, policy, max_tokens):
    def fitting(row):
        prompt = source(row)
        check_prompts([prompt], policy, max_tokens)
        _refuse_unknown(prompt.prompt, prompt.ids, source.tokenizer)
        return prompt

    return fitting


def check_rows(
    rows: Sequence[dict] | Rows,
    source: Any,
    policy: Policy,
    max_tokens: int,
    shown: bool = True,
    ranks: Ranks = ALONE,
    checks: Iterable[Callable[[dict], None]] = (),
) -> None:
    """Check every row, each rank its share of them.

    `source` is a `fastgrpo.tools.prompts.Prompts`, and `checks` are further functions that raise for a wrong row.
    """
    checks, turns = (_fitting(source, policy, max_tokens), *checks), cycle(range(ranks.size))

    def checked(row):
        for check in checks if next(turns) == ranks.rank else ():
            check(row)

    for _ in tqdm(as_rows(rows, "data").each(checked), desc="check prompts", total=len(rows), disable=not shown, **BAR):
        pass


def examples_of(
    rows: Sequence[dict] | Rows,
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy,
    stops: Sequence[int],
    shown: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Sample]:
    """Tokenize every row for supervised training, and check that each example fits the policy."""

    def fitting(row):
        examples = join_turns(to_examples(row, tokenizer, stops, template_kwargs))
        for example in examples:
            policy.check_ids([*example.prompt_ids, *example.ids], "the example")
            what = f"the example has {len(example)} tokens, which"
            policy.check_length(len(example), what, "shorten or remove it")
        if row.get("messages") is None:
            _refuse_unknown(row["prompt"], examples[0].prompt_ids, tokenizer)
            _refuse_unknown(row["completion"], examples[0].ids[:-1], tokenizer, "completion")  # the last one ends it
        return examples

    checked = as_rows(rows, "data").each(fitting)
    for examples in tqdm(checked, "tokenize", len(rows), disable=not shown, **BAR):
        yield from examples
