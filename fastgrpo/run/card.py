"""The model card of a checkpoint: README.md with metadata for the Hugging Face hub.

It depends only on the state of the run at that step, so a resumed run writes the same card.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from fastgrpo._version import __version__
from fastgrpo.config.sections import HUB_DATA
from fastgrpo.config.settings import TrainingConfig
from fastgrpo.config.validation import on_resume
from fastgrpo.data.records import TrainerState
from fastgrpo.run.curves import markdown_table

# Settings that the card shows elsewhere, or that are paths.
PLACES = {
    "model_name_or_path", "dataset_name", "dataset_train_split", "train_file", "reward_funcs", "system_prompt",
    "device",
}  # fmt: skip
LONGEST = 80  # characters of a setting's value
PAPER = """\
```bibtex
@article{shao2024deepseekmath,
  title   = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
  author  = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Xiao Bi and Haowei Zhang
             and Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo},
  year    = 2024,
  eprint  = {arXiv:2402.03300}
}
```"""
LOADING = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

`FOLDER` is this folder, or its name on the hub. """
SERVING = "`vllm serve FOLDER` serves it."
SERVING_ADAPTERS = """\
It holds only adapters. With peft installed, these lines also load the base model that `adapter_config.json` names.
Its end tokens may differ: set `model.generation_config = GenerationConfig.from_pretrained(FOLDER)`.
`vllm serve BASE --tokenizer FOLDER --generation-config FOLDER --enable-lora --max-lora-rank {rank} --lora-modules
NAME=FOLDER` serves them."""


def model_card(
    args: TrainingConfig,
    state: TrainerState,
    *,
    name: str,
    base: str,
    rows: int,
    rewards: Sequence[str],
    adapters: bool,
    inputs: Mapping[str, Path],
) -> str:
    """Return the model card of a checkpoint."""
    file = getattr(args, "train_file", None)  # of supervised training
    grpo, data = args.command == "train", file or args.dataset_name or HUB_DATA.get(args.task)
    datasets = [data] if data and on_hub(data, inputs) else None
    head = ModelCardData(
        base_model=base if on_hub(base, inputs) else None,
        datasets=datasets,
        library_name="peft" if adapters else "transformers",
        model_name=name,
        pipeline_tag="text-generation",
        tags=["generated_from_trainer", "fastgrpo", "grpo" if grpo else "sft", *(["lora"] if adapters else [])],
    )
    begun, how = _linked(base, "", inputs), "GRPO" if grpo else "supervised training"
    parts = {
        f"# {name}": f"{begun} was trained by {how} with fastgrpo.",
        "## Data": _data(args, data, rows, rewards, inputs),
        "## Figures": markdown_table([("figure", "value"), *_figures(state)]),
        "## Settings": _settings(args),
        "## How to load it": LOADING + (SERVING_ADAPTERS.format(rank=_vllm_rank(args.lora_r)) if adapters else SERVING),
        "## Versions": "\n".join(f"- {package}: {number}" for package, number in _versions(adapters)),
    }
    if prompt := getattr(args, "system_prompt", None):
        parts["## System prompt"] = f"````text\n{prompt}\n````"
    if grpo:
        parts["## Citation"] = f"GRPO is the method of\n\n{PAPER}"
    text = "\n\n".join(f"{title}\n\n{body}" for title, body in parts.items())
    return ModelCard(f"---\n{head.to_yaml()}\n---\n\n{text}\n").content


def _vllm_rank(rank):
    """Return the smallest `--max-lora-rank` that vLLM allows for a rank; up to 512, it allows powers of 2 from 8."""
    return max(8, 1 << (rank - 1).bit_length())


def on_hub(name: str, inputs: Mapping[str, Path]) -> bool:
    """Return whether a model or data set is a repository on the hub, not a file or folder.

    A folder of that name has priority. `inputs` has the paths at the start of the run, since the working directory may
    have changed.
    """
    repository = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.gguf)(?<!\.jsonl)", name) is not None
    return repository and Path(name) not in inputs.values()


def _linked(name, kind, inputs):
    """Format a repository of the hub as a link, and a path by its last part."""
    if name and on_hub(name, inputs):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    return f"`{Path(name).name}`, a folder or file," if name else "A model that was made in Python"


def _data(args, data, rows, rewards, inputs):
    source = "rows that the task or the caller made"
    if data:
        source = _linked(data, "datasets/", inputs).rstrip(",")
        source += f", split `{args.dataset_train_split}`" * (data != getattr(args, "train_file", None))
    judged = f" Rewards: {', '.join(f'`{reward}`' for reward in rewards)}." if rewards else ""
    return f"{rows:,} training rows: {source}.{judged}"


def _figures(state):
    """Return the lines of the table of figures, with accuracies if measured."""
    figures = [
        ("steps", f"{state.global_step:,} of {state.max_steps:,}"),
        ("passes over the rows", f"{state.epoch:.3g}"),
        ("prompt and completion tokens", f"{state.num_tokens:,}"),
    ]
    if state.accuracy_before is not None:
        figures.append(("held-out accuracy before training", f"{state.accuracy_before:.3f}"))
    if state.accuracy_after is not None:
        figures.append((f"held-out accuracy after step {state.evaluated_at:,}", f"{state.accuracy_after:.3f}"))
    return figures


def _settings(args):
    """List the settings that differ from their defaults and affect results."""
    fields = [f for f in dataclasses.fields(args) if f.name not in PLACES and on_resume(f.name) != "free"]
    given = [(field, getattr(args, field.name)) for field in fields]
    lines = [(f"`{field.name}`", _shown(value)) for field, value in given if value != field.default]
    return markdown_table([("setting", "value"), *lines]) if lines else "All settings have their defaults."


def _shown(value: Any) -> str:
    """Format the value of a setting for a table cell."""
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{text if len(text) <= LONGEST else text[:LONGEST] + '...'}`"


def _versions(adapters):
    packages = ["transformers", "torch", "tokenizers", *(["peft"] if adapters else [])]
    packages += ["datasets"] if find_spec("datasets") else []  # not needed if the rows are lists
    return [("fastgrpo", __version__), *((package, version(package)) for package in packages)]
