"""GGUF files: a model and its tokenizer in one file, with quantized weights, as llama.cpp reads them.

transformers reads such a file and unpacks the weights into the precision of the run, so that they can be trained.
Checkpoints are ordinary folders of transformers. A GGUF file is given by its path, or by a folder that holds only it.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

SUFFIX = ".gguf"
NEEDED = ("gguf", "accelerate")  # packages of the extra `gguf` with which transformers reads GGUF files
PLAIN = ("config.json", "adapter_config.json")  # a folder that has one of them is an ordinary folder of transformers
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def find_gguf(path: str | Path) -> Path | None:
    """Find the GGUF file that a path stands for."""
    path = Path(path)
    if os.path.isdir(path):  # where pathlib raises an error for a name that is too long, this says no
        files = [] if any((path / name).exists() for name in PLAIN) else sorted(path.iterdir())
        files = [file for file in files if file.suffix.lower() == SUFFIX]
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{path} holds {len(files)} GGUF files ({names}); give the path of one of them")
        file = files[0] if files else None
    else:
        file = path if path.suffix.lower() == SUFFIX else None
        if file is not None and not file.is_file():
            raise ValueError(f"no such GGUF file: {file}")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if file is not None and missing:
        raise ValueError(
            f"{file} is a GGUF file, and the packages that read it are not all installed ({', '.join(missing)} is "
            "missing): pip install 'fastgrpo[gguf]'"
        )
    return file


def source_of(path: str | Path) -> tuple[str | Path, dict[str, str]]:
    """Return the path and the keyword arguments by which transformers loads a model."""
    file = find_gguf(path)
    return (path, {}) if file is None else (file.parent, {"gguf_file": file.name})


def unpacked(gguf: dict[str, str]) -> dict[str, Any]:
    """Return the keyword arguments by which transformers unpacks all weights of a GGUF file."""
    if not gguf:
        return {}
    from transformers import GgufConfig  # older releases, which read all other models, do not have it

    return {**gguf, "quantization_config": GgufConfig(dequantize=True)}


def set_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer the special tokens whose ids its GGUF file names.

    transformers 5.17 takes the end token of a Llama for its first token (`GGUFLlamaConverter.tokenizer`), and would
    never end a completion.
    """
    for name in SPECIAL:
        token = tokenizer.init_kwargs.pop(f"{name}_id", None)
        if token is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    tokenizer.clean_up_tokenization_spaces = False  # transformers sets it for a Llama, warns and then ignores it
