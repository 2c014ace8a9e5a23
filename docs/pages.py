"""docs/settings.md and docs/from-trl.md: `make settings` writes them from the fields and the tables of TRL's names."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable

from fastgrpo.config.fields import allowed, hints, own_fields, sections_of
from fastgrpo.config.settings import GRPOConfig, SelectionConfig, SFTConfig, TrainConfig
from fastgrpo.config.trl import ACCEPTED, IDLE, OTHER_DEFAULTS, REFUSED, SAME, TRANSLATED
from fastgrpo.config.validation import CONDITIONS, on_resume

INTRODUCTION = """# Settings

A setting has one name everywhere: `GRPOConfig(beta=0.04)` in Python, `--beta 0.04` on the command line, and
`beta: 0.04` in a YAML file (`--config FILE`). In the tables, N is the value of the setting. On the command line, write
booleans as True or False, and lists with spaces (`--reward_weights 1 0.5`).

A value comes from the first of these that states it: the flag; the YAML file; the recipe of the task
(`fastgrpo/recipes/TASK.yaml`); the default in the tables. `python -m fastgrpo.train --task TASK --help-all` prints the
defaults of a task.

If a condition in the tables is false, any value other than the default raises an error.

A resumed run must have the settings of the original run, with two exceptions:

- These settings can change: {free}, and the folder that holds the model or a data file.
- These can change too, but a warning says that the run is then not bit-identical to an uninterrupted one: {inexact}.
"""
# Settings that can change on resume in part -> the possible change.
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

`GRPOConfig` accepts every argument of `trl.GRPOConfig` and of `transformers.TrainingArguments`. The tables below state
which arguments are translated, have no effect, or are not supported. All others are [settings](settings.md). The
command line and YAML files accept only settings. If an argument contradicts a setting, an error says so.
`HfArgumentParser` and `TrlParser` work, but without TRL's `ModelConfig` and `GRPOScriptArguments`, whose settings
`GRPOConfig` has.

**Set the batch size.**

- If a script sets `per_device_train_batch_size`, `gradient_accumulation_steps`, `steps_per_generation` or
  `generation_batch_size`, the others have TRL's defaults, and all `*_steps` arguments count updates, as in TRL.
- If not, a step has `prompts_per_step` prompts (8; TRL's default is 1), and all `*_steps` arguments except
  `warmup_steps` count steps. A step is one rollout with its updates.

**Epochs.** TRL drops the last batch of an epoch if it is incomplete. fastgrpo fills it with the first prompts of the
next epoch, so the last epoch may have one more step.

**Evaluation** uses the first `max_eval_samples` rows, and always runs after the last step.
"""
SAME_INTRODUCTION = """## Same name, with a difference

These arguments have another default or meaning in fastgrpo. Arguments that no table lists have the name, default and
meaning of TRL.

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

You can pass None, False, 0, empty values, and values in brackets. Any other value raises an error with the row's text.

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
        "`loss_type=vespo` with `importance_sampling_level=sequence` trains with a warning",
        "an error: vespo already weights whole sequences; use `importance_sampling_level=token`",
    ),
    ("`generation_kwargs` with `num_beams` trains", "an error: beams are not samples of the policy"),
    (
        "a reward tokenizer without a padding token pads with its end token",
        "an error: set a padding token that no text contains",
    ),
    (
        "adapters can have dropout, DoRA, `modules_to_save`, `target_parameters` or other options of peft",
        "an error: checkpoints support only LoRA of linear layers",
    ),
    ("prompt tuning trains", "an error: pass a `LoraConfig`"),
    (
        "if `model` is a `PeftModel` with trained adapters, the reference includes them",
        "an error: save the merged model, and pass its folder",
    ),
    ("`reward_std` is over all completions of a step", "the mean over groups of the group's standard deviation"),
    ("`eval_loss` is a mean over batches", "`eval_loss` treats all completions of an evaluation as one batch"),
    ("reward functions may log a metric as `accuracy`", "an error: `accuracy` exists; choose another name"),
    ("callbacks receive `on_substep_end` and `on_optimizer_step`", "not called; a warning says so"),
    ("`train()` overwrites an earlier run in `output_dir`", "an error; resume, or set `overwrite_output_dir`"),
    ("`save_model(output_dir)` writes into the run folder", "writes into its folder `final/`"),
    ("scripts may change `args`", "an error; pass all settings to `GRPOConfig`"),
    ("subclasses may override `compute_loss` and other internal methods", "an error"),
    ("`optimizers=` replaces the optimizer", "an error that names the settings to use"),
    (
        "`trainer.accelerator`, `reward_funcs`, `reward_weights`, `tools` and `environments` exist",
        "missing; use `is_world_process_zero()`",
    ),
]
HEADER = "| flag | default (allowed values) | meaning |\n|------|--------------------------|---------|"

# Tables: title, note below it, and sections.
_DATA = "As in TRL, `GRPOConfig` has no settings whose names begin with `dataset_`; only commands have them."
_ONLY = "`python -m fastgrpo.{}` adds these settings, or gives them another default."
TABLES = [
    (
        "Data",
        _DATA,
        ("PromptConfig", "TemplateConfig", "DatasetConfig", "TrainSplitConfig", "TestSplitConfig", "OrderConfig"),
    ),
    ("Model", "", ("ModelConfig", "LoadingConfig")),
    ("Rollout", "", ("CompletionConfig", "RolloutConfig", "TokenFilterConfig", "EngineConfig")),
    ("Tools", "", ("ToolsConfig",)),
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
    default = _value(field.default) + (f" ({limits})" if limits else "")
    cells = (f"`--{field.name}`", default, meaning)
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
    parts = [
        FROM_TRL,
        DIFFERENCES + differs + "\n",
        SAME_INTRODUCTION + "\n".join(rows) + "\n",
    ]
    return "\n".join([*parts, *(f"{introduction}{rows}\n" for introduction, rows in groups)])


def _names(names: Iterable[str]) -> str:
    """List arguments, each with its accepted values."""
    shown = []
    for name in names:
        values = ", ".join(f"`{value!r}`" for value in ACCEPTED.get(name, ()))
        shown.append(f"`{name}`" + (f" ({values})" if values else ""))
    return ", ".join(shown)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(from_trl() if sys.argv[1:] == ["from-trl"] else page(), end="")
