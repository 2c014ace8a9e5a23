"""Rows, prompts and completions: the records passed between stages, and the sources of rows."""

from fastgrpo.data.records import Prompt, Sample, TrainerState
from fastgrpo.data.rows import Rows, load_rows
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows, Source

__all__ = [
    "Curriculum",
    "Level",
    "Prompt",
    "Rows",
    "Sample",
    "ShuffledRows",
    "Source",
    "TrainerState",
    "load_rows",
]
