"""docs/settings.md and docs/from-trl.md: `make settings` writes them from the fields and the table of TRL's names."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable

from fastgrpo.config.fields import allowed, hints, own_fields, sections_of, title
from fastgrpo.config.settings import GRPOConfig, SelectionConfig, SFTConfig, TrainConfig
from fastgrpo.config.trl import ACCEPTED, IDLE, OLDER, OTHER_DEFAULTS, REFUSED, SAME, TRANSLATED
from fastgrpo.config.validation import CONDITIONS, on_resume

INTRODUCTION = """# Settings

This page is made from the code by `make settings`; a test compares the two.

A setting has the same name in Python (`GRPOConfig(beta=0.04)`), on the command line (`--beta 0.04`) and in a YAML file
(`beta: 0.04`, read by `--config FILE`). On the command line, True and False are written out (`--gradient_checkpointing
False`), and a list is written with spaces (`--reward_weights 1 0.5`). A flag overrides the file of `--config FILE`, the
file overrides the recipe that the task ships in `fastgrpo/recipes/`, and the recipe overrides the default below. These
are the settings of `python -m fastgrpo.train`; the last tables list what `python -m fastgrpo.sft` and `python -m
fastgrpo.distill` have in addition. `--help-all` shows which of these settings a command takes.

A setting that is changed where it has no effect is refused. "On resume" says whether a run that continues from a
checkpoint may change the setting. Besides, `ref_storage` must stay if it was or becomes int8 or nf4, and so must all of
`reward_model_kwargs` but its device. `rollout_backend` may change between fast and eager, with a warning.
"""
RESUME = {
    "same": "must stay the same",
    "free": "may change",
    "inexact": "may change, with a warning, because the run then does not continue bit for bit",
}
FROM_TRL = """# Coming from TRL

This page is made from the code by `make settings`; tests compare it with the code, and the list with the fields of
`trl.GRPOConfig` 1.16.

A script written to TRL changes its import:

```python
from fastgrpo import GRPOConfig, GRPOTrainer  # in place of: from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8, bf16=True)
print(args.prompts_per_step, args.dtype)  # 2 bfloat16
```

`GRPOConfig(...)` takes every argument of `trl.GRPOConfig`, with those of transformers' TrainingArguments, and turns it
into the settings of [settings.md](settings.md). An argument is a setting of the same name, is translated, does nothing
because results do not depend on it, or is refused with a line that says what to do instead. A value that turns
something off, or equals TRL's default, is never refused. An argument and a setting that contradict each other are an
error with the numbers of both. A setting that has no effect is refused here too: `num_train_epochs` beside `max_steps`,
for example. The command line and YAML files take only settings. `HfArgumentParser` and `TrlParser` read `GRPOConfig` as
they read TRL's: `TrlParser((ScriptArguments, GRPOConfig))`.

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

These are settings of the same name too, with a difference:

| argument | default in TRL | default here | |
|----------|----------------|--------------|-|
"""
TRANSLATED_INTRODUCTION = """## Translated

| argument | translation |
|----------|-------------|
"""
IDLE_INTRODUCTION = """## Without effect here

Any value is taken, because results do not depend on it.

| argument | why |
|----------|-----|
"""
REFUSED_INTRODUCTION = """## Refused

A value that turns the argument off (None, False, 0 or empty) is taken, and so are the values in brackets behind a name.
Any other value is refused with this line.

| argument | what to do instead |
|----------|--------------------|
"""
HEADER = (
    "| flag | default | meaning | allowed | has an effect only where | on resume |\n"
    "|------|---------|---------|---------|-------------------------|-----------|"
)

TITLES = {SFTConfig: "Supervised training", SelectionConfig: "Distillation"}


def page() -> str:
    """Write the page of all settings."""
    rules = "\n".join(f"- *{rule}*: the setting {meaning}." for rule, meaning in RESUME.items())
    return "\n\n".join([INTRODUCTION + "\n" + rules, *map(_table, sections())]) + "\n"


def sections() -> list[type]:
    """Find the sections of `TrainConfig`, and what supervised training and distillation add to them."""
    return [*sections_of(TrainConfig), SFTConfig, SelectionConfig]


def _table(section):
    words = TITLES.get(section) or title(section)
    rows = "\n".join(_row(section, field) for field in own_fields(section))
    return f"## {words}\n\n{section.__doc__.splitlines()[0]}\n\n{HEADER}\n{rows}"


def _row(section, field):
    meaning, limits = field.metadata["help"], allowed(hints(section)[field.name])
    condition, _ = CONDITIONS.get(field.name, ("", None))
    cells = (f"`--{field.name}`", _value(field.default), meaning, limits, condition, on_resume(field.name))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(default):
    """Show a default as it is written on the command line."""
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in default) or "empty"
    line_break = isinstance(default, str) and "\n" in default
    return f"`${default!r}`" if line_break else f"`{default}`"  # as bash reads a line break


def from_trl() -> str:
    """Write the page of TRL's arguments."""
    ours = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    plain = [name for name, text in SAME.items() if not text and name not in OTHER_DEFAULTS]
    same = [
        f"| `{name}` | {_value(OTHER_DEFAULTS.get(name, ours[name]))} | {_value(ours[name])} | {text} |"
        for name, text in SAME.items()
        if name not in plain
    ]
    groups = [
        (introduction, "\n".join(f"| {_names(row[0].split())} | {row[-1]} |" for row in rows))
        for introduction, rows in (
            (TRANSLATED_INTRODUCTION, TRANSLATED), (IDLE_INTRODUCTION, IDLE), (REFUSED_INTRODUCTION, REFUSED),
        )
    ]  # fmt: skip
    older = f"Earlier versions of TRL and transformers had {_listed(sorted(OLDER))}, which are taken, too."
    parts = [FROM_TRL, SAME_INTRODUCTION.format(_wrapped(_listed(plain))) + "\n".join(same) + "\n"]
    return "\n".join([*parts, *(f"{introduction}{rows}\n" for introduction, rows in groups), _wrapped(older) + "\n"])


def _names(names: Iterable[str]) -> str:
    """List arguments, each with the values that are taken."""
    shown = []
    for name in names:
        values = ", ".join(f"`{value!r}`" for value in ACCEPTED.get(name, ()))
        shown.append(f"`{name}`" + (f" ({values})" if values else ""))
    return ", ".join(shown)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 119, break_on_hyphens=False)


if __name__ == "__main__":
    print(from_trl() if sys.argv[1:] == ["from-trl"] else page(), end="")
