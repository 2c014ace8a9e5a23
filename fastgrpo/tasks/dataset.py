"""Prompts of any data set with a `prompt` column; rewards from --reward_funcs module:function."""

from fastgrpo.data.load import load_rows
from fastgrpo.data.sources import ShuffledRows
from fastgrpo.tasks import Task


def build(config, tokenizer):
    """Rows as they are; with --system_prompt, it goes before the prompt, as a system message or as text.

    Raises:
        ValueError: no data set, no train split, or a curriculum, which this task has not.
    """
    if config.curriculum_iters:
        raise ValueError("task=dataset draws its rows alone: curriculum_iters goes with --task gsm8k")
    if config.dataset_name is None:
        raise ValueError("task=dataset needs --dataset_name: a hub id, a .jsonl file, or a folder of them")
    splits = [
        load_rows(config.dataset_name, config.dataset_config, split, columns=("prompt",))
        for split in (config.dataset_train_split, config.dataset_test_split)
    ]
    if splits[0] is None:
        raise ValueError(f"{config.dataset_name} has no split {config.dataset_train_split!r}")
    train, test = (
        None if rows is None else [_with_system(row, config.system_prompt) for row in rows] for rows in splits
    )
    return Task(ShuffledRows(train, seed=config.seed, shuffle=config.shuffle_dataset), test, [])


def _with_system(row, system_prompt):
    if system_prompt is None or "prompt" not in row:
        return row
    if isinstance(row["prompt"], str):
        return {**row, "prompt": f"{system_prompt}\n\n{row['prompt']}"}
    return {**row, "prompt": [{"role": "system", "content": system_prompt}, *row["prompt"]]}
