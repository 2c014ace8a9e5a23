"""The folder of a run, and what is saved in it: models in Hugging Face format."""

import re
import shutil
from pathlib import Path

RUNS = Path("runs")
RUN_FILES = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "summary.json",
    "checkpoint-*",
    "warm-start",
    "tensorboard",
)


def claim_output_dir(output_dir, task, overwrite=False):
    """Create and return the folder of a new run.

    Args:
        output_dir: the folder, or None for the next free runs/TASK-N. overwrite: delete what an earlier run left in
            it (and nothing else).

    Raises:
        ValueError: the folder is not empty and may not be overwritten, or is a file.
    """
    if output_dir is None:
        RUNS.mkdir(exist_ok=True)
        taken = [re.fullmatch(rf"{re.escape(task)}-(\d+)", path.name) for path in RUNS.iterdir()]
        number = max((int(match[1]) for match in taken if match), default=0) + 1
        path = RUNS / f"{task}-{number}"
        path.mkdir()  # raises where another run has just claimed it
        return path
    path = Path(output_dir)
    if path.is_file():
        raise ValueError(f"output_dir {path} is a file; name a folder")
    if path.exists() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"output_dir {path} is not empty; choose another, or pass --overwrite_output_dir True")
        for pattern in RUN_FILES:
            for old in path.glob(pattern):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    path.mkdir(parents=True, exist_ok=True)
    return path


def save_model(path, model, tokenizer):
    """Weights (safetensors), config and tokenizer, as `AutoModelForCausalLM.from_pretrained` reads them."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_checkpoint(run_dir, step, model, tokenizer):
    """run_dir/checkpoint-STEP. Returns its path."""
    path = run_dir / f"checkpoint-{step}"
    save_model(path, model, tokenizer)
    return path
