"""docs/settings.md and docs/from-trl.md: `make settings` writes them from the fields and the tables of TRL's names."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable

from fastgrpo.config.fields import allowed, hints, own_fields, sections_of
from fastgrpo.config.settings import GRPOConfig, SelectionConfig, SFTConfig, TrainConfig
from fastgrpo.config.trl import ACCEPTED, IDLE, OLDER, OTHER_DEFAULTS, REFUSED, SAME, TRANSLATED
from fastgrpo.config.validation import CONDITIONS, on_resume

INTRODUCTION = """# Settings

A setting has one name everywhere: `GRPOConfig(beta=0.04)` in Python, `--beta 0.04` on the command line, and
`beta: 0.04` in the YAML file of `--config FILE`. In the tables, N is the value of the setting. On the command line,
write booleans as True or False, and lists with spaces (`--reward_weights 1 0.5`).

A flag overrides the file, the file overrides the recipe of the task (`fastgrpo/recipes/TASK.yaml`), and the recipe
overrides the default in the tables. `python -m fastgrpo.train --task TASK --help-all` prints the defaults of a task.

Some settings have an effect only under a condition. If it does not hold, passing another value than the default raises
an error.

When a run resumes, another value of a setting raises an error, with these exceptions:

- These can change: {free}.
- These can change, with a warning that the run is no longer bit-identical to an uninterrupted one: {inexact}.
"""
# Settings of which only some values can change on resume, and what can change.
BY_VALUE = {
    "rollout_backend": "`rollout_backend` between auto, fast and eager",
    "ref_storage": "`ref_storage` between None and cpu",
    "reward_model_kwargs": "the device in `reward_model_kwargs`",
    "parallel": "`parallel`, and the number of processes",
}
FROM_TRL = """# Coming from TRL

This page covers `trl.GRPOConfig` of TRL 1.16. To run a TRL script, change its import:

```python
from fastgrpo import GRPOConfig, GRPOTrainer  # before: from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8, bf16=True)
print(args.prompts_per_step, args.dtype)  # 2 bfloat16
```

`GRPOConfig` takes every argument of `trl.GRPOConfig`, including those of TrainingArguments. An argument is a setting of
the same name, is translated, has no effect, or is not supported. An argument that is not supported raises an error that
says what to use instead. Its default in TRL, or a value that turns it off, raises no error. An argument and a setting
that contradict each other raise an error. Defaults are TRL's, except those below. The command line and YAML files take
only [settings](settings.md). `HfArgumentParser` and `TrlParser` work: `TrlParser((ScriptArguments, GRPOConfig))`.

**Set the batch size.** TRL has four batch arguments: `per_device_train_batch_size`, `gradient_accumulation_steps`,
`steps_per_generation` and `generation_batch_size`.

- If a script sets one of them, the others have TRL's defaults, and all `*_steps` arguments count updates, as in TRL.
- If it sets none, a step has `prompts_per_step` prompts (8; TRL's default is 1), and all `*_steps` arguments count
  steps. A step is one rollout with its updates.

**Epochs.** TRL drops the last incomplete batch of an epoch. Here the first prompts of the next epoch fill it. The last
epoch may therefore add one step.

**Evaluation** uses the first `max_eval_samples` rows, and always runs after the last step.
"""
SAME_INTRODUCTION = """## Same name, with a difference

Arguments that are in none of the tables below have the same name, meaning and default here. The arguments of the next
table have the same name, but another default or meaning:

| argument | difference |
|----------|------------|
"""
TRANSLATED_INTRODUCTION = """## Translated

| argument | translation |
|----------|-------------|
"""
IDLE_INTRODUCTION = """## Without effect

You can pass any value.

| argument | why |
|----------|-----|
"""
REFUSED_INTRODUCTION = """## Not supported

You can pass None, False, 0, an empty value, and the values in brackets. Any other value raises an error with this text.

| argument | what to do |
|----------|------------|
"""
DIFFERENCES = """## Behaviour that differs

| in TRL | here |
|--------|------|
"""
# Behaviour of TRL's trainer -> the behaviour here.
DIFFERS = [
    (
        "`loss_type=vespo` with sequence ratios trains with a warning",
        "an error: in its paper, vespo has a ratio per token",
    ),
    ("`generation_kwargs` with `num_beams` trains", "an error: beams are not samples of the policy"),
    (
        "a reward tokenizer without a padding token pads with its end token",
        "an error, because the end of an earlier turn would then look like padding, and the reward is that of the last "
        "token before the padding; set another padding token",
    ),
    (
        "adapters can have dropout, DoRA, `modules_to_save`, `target_parameters` or other options of peft",
        "an error that names the option: the trained policy must be the one that generated the completions, and "
        "checkpoints and `merged/` hold LoRA of linear layers only",
    ),
    ("prompt tuning trains", "an error: pass a `LoraConfig`"),
    (
        "if `model` is a `PeftModel` with trained adapters, the reference includes them",
        "an error: the reference is the model without adapters; merge them first",
    ),
    ("`eval_loss` is a mean over batches", "all completions of an evaluation are one batch"),
    ("callbacks receive `on_substep_end` and `on_optimizer_step`", "not called; a warning says so"),
    ("`train()` overwrites an earlier run in `output_dir`", "an error; resume, or set `overwrite_output_dir`"),
    ("`save_model(output_dir)` writes into the run folder", "writes into its folder `final/`"),
    ("`optimizers=` replaces the optimizer", "an error that names the settings to use"),
    ("`trainer.accelerator` exists", "does not exist; use `is_world_process_zero()`"),
    ("`tools`, `environment_factory`, `rollout_func` and `use_vllm` exist", "an error that names the argument"),
]
HEADER = "| flag | default | meaning | allowed |\n|------|---------|---------|---------|"

# Tables: title, note below it, and sections.
_DATA = "The names that begin with `dataset_` are settings of commands and not of `GRPOConfig`, as in TRL."
_ONLY = "These settings exist only in `python -m fastgrpo.{}`, or have another default there."
TABLES = [
    ("Data", _DATA, ("PromptConfig", "DatasetConfig", "TrainSplitConfig", "TestSplitConfig", "OrderConfig")),
    ("Model", "", ("ModelConfig", "LoadingConfig")),
    ("Rollout", "", ("CompletionConfig", "RolloutConfig", "TokenFilterConfig", "EngineConfig")),
    ("Rewards", "", ("RewardFunctionsConfig", "RewardConfig")),
    ("Advantage", "", ("AdvantageConfig",)),
    ("Objective", "", ("ObjectiveConfig",)),
    ("Reference", "", ("ReferenceConfig",)),
    ("Updates", "", ("UpdatesConfig", "OptimizerConfig")),
    ("Evaluation", "", ("EvaluationConfig",)),
    ("Parallel", "", ("ParallelConfig",)),
    ("Run", "", ("RunConfig", "SamplesConfig", "OutputConfig")),
    ("Supervised training", _ONLY.format("sft"), ("SFTConfig",)),
    ("Distillation", _ONLY.format("distill"), ("SelectionConfig",)),
]


def page() -> str:
    """Return the page of all settings."""
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in BY_VALUE]
    free, inexact = (_listed(name for name in names if on_resume(name) == rule) for rule in ("free", "inexact"))
    text = INTRODUCTION.format(free=free, inexact=", ".join([inexact, *BY_VALUE.values()]))
    introduction = "\n".join(map(_item, text.splitlines()))
    return "\n\n".join([introduction, *(_table(*table) for table in TABLES)]) + "\n"


def _item(line):
    """Wrap a line of the introduction if it is an item with a list of names."""
    return textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) if line.startswith("- ") else line


def _table(words, note, names):
    known = {section.__name__: section for section in (*sections_of(TrainConfig), SFTConfig, SelectionConfig)}
    rows = "\n".join(_row(known[name], field) for name in names for field in own_fields(known[name]))
    return "\n\n".join(filter(None, [f"## {words}", note, f"{HEADER}\n{rows}"]))


def _row(section, field):
    meaning, limits = field.metadata["help"], allowed(hints(section)[field.name])
    if field.name in CONDITIONS:
        meaning += f" Condition: {CONDITIONS[field.name][0]}."
    cells = (f"`--{field.name}`", _value(field.default), meaning, limits)
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
    theirs = {name: _value(OTHER_DEFAULTS.get(name, default)) for name, default in ours.items()}
    plain = [name for name, text in SAME.items() if not text and theirs[name] == _value(ours[name])]
    same = {}  # difference -> names
    for name in (name for name in SAME if name not in plain):
        default = f"Default: {_value(ours[name])} (TRL: {theirs[name]}). " if theirs[name] != _value(ours[name]) else ""
        same.setdefault(default + SAME[name], []).append(name)
    rows = [f"| {_listed(names)} | {text.strip()} |" for text, names in same.items()]
    groups = [
        (introduction, "\n".join(f"| {_names(row[0].split())} | {row[-1]} |" for row in rows))
        for introduction, rows in (
            (TRANSLATED_INTRODUCTION, TRANSLATED), (IDLE_INTRODUCTION, IDLE), (REFUSED_INTRODUCTION, REFUSED),
        )
    ]  # fmt: skip
    differs = "\n".join(f"| {theirs} | {ours} |" for theirs, ours in DIFFERS)
    older = f"The tables include arguments of earlier versions of TRL and transformers: {_listed(sorted(OLDER))}."
    parts = [
        FROM_TRL,
        DIFFERENCES + differs + "\n",
        SAME_INTRODUCTION + "\n".join(rows) + "\n",
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
