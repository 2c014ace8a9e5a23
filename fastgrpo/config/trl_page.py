"""docs/from-trl.md, made from the list: `python -m fastgrpo.config.trl_page > docs/from-trl.md`, or `make pages`."""

import dataclasses
import textwrap
from typing import Any

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.trl_names import ACCEPTED, IDLE, OLDER, OTHER_DEFAULTS, REFUSED, SAME, TRANSLATED

INTRODUCTION = """# Coming from TRL

This page is made from the code by `make pages`; a test compares the two, and another one compares the list with the
fields of `trl.GRPOConfig` 1.16.

A script written to TRL changes its import:

```python
from fastgrpo import GRPOConfig, GRPOTrainer  # in place of: from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8, bf16=True)
print(args.prompts_per_step, args.dtype)  # 2 bfloat16
```

`GRPOConfig(...)` takes every argument of `trl.GRPOConfig`, with those of transformers' TrainingArguments, and turns it
into the settings of [settings.md](settings.md). An argument is a setting of the same name, a translation, nothing at
all because results do not depend on it, or it is refused with a line that says what to do instead. A value that equals
TRL's default is never refused. An argument and a setting that contradict each other are an error with the numbers of
both, and a setting that has no effect is refused here as elsewhere: `num_train_epochs` beside `max_steps`, for example.
The command line and YAML files take settings alone.

What is not stated has the default of settings.md, which is TRL's but for the ones below; an evaluation looks at
`max_eval_samples` rows and takes place after the last step in any case. Where one of the four arguments of batches is
stated, the others of them have TRL's defaults, and all `steps`, stated or not, count updates as in TRL. Where none of
them is, a step draws `prompts_per_step` groups, 8 where TRL's default makes one, and all `steps` count rollouts: state
`per_device_train_batch_size` in a script that relies on its default.

TRL drops the batch that an epoch's last prompts do not fill. Here it is filled with the first prompts of the next
epoch, so no prompt is left out, and a run of whole epochs may be a step longer.
"""
SAME_INTRODUCTION = """## The same

These are settings of the same name and meaning, with TRL's default:
{}.

These are settings of the same name, too, and there is more to say of them:

| argument | default in TRL | default here | |
|----------|----------------|--------------|-|
"""
TRANSLATED_INTRODUCTION = """## Translated

| argument | what becomes of it |
|----------|--------------------|
"""
IDLE_INTRODUCTION = """## Without effect here

Any value is taken, because results do not depend on it.

| argument | why |
|----------|-----|
"""
REFUSED_INTRODUCTION = """## Refused

TRL's default is taken, and so is what stands behind a name in brackets. Any other value is refused by this line.

| argument | what to do instead |
|----------|--------------------|
"""


def page() -> str:
    """Write the page of TRL's arguments."""
    ours = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    plain = [name for name, text in SAME.items() if not text and name not in OTHER_DEFAULTS]
    same = [
        f"| `{name}` | {_value(OTHER_DEFAULTS.get(name, ours[name]))} | {_value(ours[name])} | {text} |"
        for name, text in SAME.items()
        if name not in plain
    ]
    parts = [
        INTRODUCTION,
        SAME_INTRODUCTION.format(_wrapped(_listed(plain))) + "\n".join(same) + "\n",
        *(
            introduction + "\n".join(f"| {_names(names)} | {text} |" for text, names in groups.items()) + "\n"
            for introduction, groups in (
                (TRANSLATED_INTRODUCTION, TRANSLATED),
                (IDLE_INTRODUCTION, IDLE),
                (REFUSED_INTRODUCTION, REFUSED),
            )
        ),
    ]
    older = f"Earlier versions of TRL and transformers had {_listed(sorted(OLDER))}, which are taken, too."
    parts.append(_wrapped(older) + "\n")
    return "\n".join(parts)


def _names(names: dict[str, Any]) -> str:
    """List arguments, each with the values that are taken beside its default."""
    shown = []
    for name in names:
        values = ", ".join(f"`{value!r}`" for value in ACCEPTED.get(name, ()))
        shown.append(f"`{name}`" + (f" ({values})" if values else ""))
    return ", ".join(shown)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 119, break_on_hyphens=False)


def _value(default: Any) -> str:
    return " ".join(f"`{item}`" for item in default) or "empty" if isinstance(default, tuple) else f"`{default}`"


if __name__ == "__main__":
    print(page(), end="")
