"""docs/settings.md and docs/from-trl.md: `make settings` writes them from the fields and the tables of TRL's names."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable

from fastgrpo.config.fields import allowed, hints, own_fields, sections_of, title
from fastgrpo.config.settings import GRPOConfig, SelectionConfig, SFTConfig, TrainConfig
from fastgrpo.config.trl import ACCEPTED, IDLE, OLDER, OTHER_DEFAULTS, REFUSED, SAME, TRANSLATED
from fastgrpo.config.validation import CONDITIONS, on_resume

INTRODUCTION = """# Settings

`make settings` writes this page from the code.

A setting has one name everywhere: `GRPOConfig(beta=0.04)` in Python, `--beta 0.04` on the command line, and
`beta: 0.04` in the YAML file of `--config FILE`. In the tables, N is the value of the setting. On the command line,
write booleans as True or False, and lists with spaces (`--reward_weights 1 0.5`). A flag overrides the file. The file
overrides the recipe of the task in `fastgrpo/recipes/`. The recipe overrides the default below.

The tables list the settings of `python -m fastgrpo.train`. The last two add those of `sft` and `distill`.

A setting has an effect only under its condition; elsewhere, a changed value is an error. The last column says whether a
resumed run may change a setting. Three settings depend on the value: `ref_storage` cannot change from or to int8 or
nf4. Only the device in `reward_model_kwargs` can change. `rollout_backend` can change between fast and eager, with a
warning.
"""
RESUME = {
    "same": "a change is an error",
    "free": "the setting can change",
    "inexact": "the setting can change, with a warning: the run then does not continue bit for bit",
}
FROM_TRL = """# Coming from TRL

`make settings` writes this page from the code. It covers `trl.GRPOConfig` of TRL 1.16.

To run a TRL script, change its import:

```python
from fastgrpo import GRPOConfig, GRPOTrainer  # before: from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8, bf16=True)
print(args.prompts_per_step, args.dtype)  # 2 bfloat16
```

`GRPOConfig` takes every argument of `trl.GRPOConfig`, including those of TrainingArguments. Each argument is a setting
of the same name, is translated, has no effect, or is refused with a remedy. Defaults are TRL's, except those below. A
value that turns something off, or equals TRL's default, is never refused. A contradiction between an argument and a
setting is an error. The command line and YAML files take only [settings](settings.md). `HfArgumentParser` and
`TrlParser` read `GRPOConfig`: `TrlParser((ScriptArguments, GRPOConfig))`.

**State the batch size.** If a script states one of TRL's four batch arguments, the others have TRL's defaults. All
`*_steps` then count updates, as in TRL. If it states none, a step draws `prompts_per_step` groups: 8, where TRL's
default draws one. All `*_steps` then count steps, that is rollouts.

**Epochs.** TRL drops the last incomplete batch of an epoch. Here the first prompts of the next epoch fill it. A run of
whole epochs may therefore be one step longer.

**Evaluation** uses the first `max_eval_samples` rows, and always runs after the last step.
"""
SAME_INTRODUCTION = """## The same

Settings with TRL's name, meaning and default:
{}.

Settings with TRL's name and a difference:

| argument | default in TRL | default here | |
|----------|----------------|--------------|-|
"""
TRANSLATED_INTRODUCTION = """## Translated

| argument | translation |
|----------|-------------|
"""
IDLE_INTRODUCTION = """## Without effect

Any value is accepted.

| argument | why |
|----------|-----|
"""
REFUSED_INTRODUCTION = """## Refused

None, False, 0, an empty value, and the values in brackets are accepted. Any other value is an error with this remedy.

| argument | remedy |
|----------|--------|
"""
DIFFERENCES = """## Behaviour that differs

| in TRL | here |
|--------|------|
"""
# Behaviour of TRL's trainer -> the behaviour here.
DIFFERS = [
    (
        "`loss_type=cispo` trains with an `epsilon_high` below 1",
        "an error: the cap of CISPO multiplies the gradient; state an `epsilon_high` of at least 1",
    ),
    (
        "`loss_type=luspo` with token ratios, and `vespo` with sequence ratios, warn and train",
        "an error: the formula is a different one",
    ),
    ("`generation_kwargs` with `num_beams` trains", "an error: beams are not samples of the policy"),
    (
        "training continues with a warning if every function returns None for all completions",
        'an error; `reward_errors="skip"` makes it a warning',
    ),
    (
        "a reward tokenizer without a padding token pads with its end token",
        "an error: the reward would be read at the end of an earlier turn",
    ),
    (
        "adapters with dropout, DoRA and other peft options train",
        "an error that names the option: the policy that trains must be the one that drew",
    ),
    ("prompt tuning trains", "an error: pass a `LoraConfig`"),
    (
        "a `PeftModel` with trained adapters trains with a KL to itself",
        "an error: the reference is the model without adapters; merge them first",
    ),
    ("`eval_loss` is logged", "not logged; use `eval_reward` and `eval_accuracy`"),
    ("callbacks receive `on_substep_end` and `on_optimizer_step`", "not called; a warning says so"),
    ("`train()` overwrites an earlier run in `output_dir`", "an error; resume, or set `overwrite_output_dir`"),
    ("`save_model(output_dir)` writes into the run folder", "writes to `final/` in it"),
    ("`optimizers=` replaces the optimizer", "an error that names the settings to use"),
    ("`trainer.accelerator` exists", "does not exist; use `is_world_process_zero()`"),
    ("`tools`, `environment_factory`, `rollout_func`, `use_vllm`", "refused by name"),
]
HEADER = (
    "| flag | default | meaning | allowed | condition | on resume |\n"
    "|------|---------|---------|---------|-----------|-----------|"
)

TITLES = {SFTConfig: "Supervised training", SelectionConfig: "Distillation"}


def page() -> str:
    """Return the page of all settings."""
    rules = "\n".join(f"- *{rule}*: {meaning}." for rule, meaning in RESUME.items())
    return "\n\n".join([INTRODUCTION + "\n" + rules, *map(_table, sections())]) + "\n"


def sections() -> list[type]:
    """Return the sections of `TrainConfig`, and those that SFT and distillation add."""
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
    """Format a default as on the command line."""
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in default) or "empty"
    line_break = isinstance(default, str) and "\n" in default
    return f"`${default!r}`" if line_break else f"`{default}`"  # as bash reads a line break


def from_trl() -> str:
    """Return the page of TRL's arguments."""
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
    differs = "\n".join(f"| {theirs} | {ours} |" for theirs, ours in DIFFERS)
    older = f"Arguments of earlier versions of TRL and transformers are accepted too: {_listed(sorted(OLDER))}."
    parts = [
        FROM_TRL,
        DIFFERENCES + differs + "\n",
        SAME_INTRODUCTION.format(_wrapped(_listed(plain))) + "\n".join(same) + "\n",
    ]
    return "\n".join([*parts, *(f"{introduction}{rows}\n" for introduction, rows in groups), _wrapped(older) + "\n"])


def _names(names: Iterable[str]) -> str:
    """List arguments, each with its accepted values."""
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
