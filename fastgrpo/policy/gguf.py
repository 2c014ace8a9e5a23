"""GGUF files: a model and its tokenizer in one file, with quantized weights, for llama.cpp.

transformers dequantizes the weights into the dtype of the run, so that they can be trained. Checkpoints are ordinary
transformers folders. A GGUF file is named by its path, or by a folder that holds only this file.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.policy.device import GGUF

NEEDED = ("gguf", "accelerate")  # packages of the extra `gguf`, which transformers needs
PLAIN = ("config.json", "adapter_config.json")  # a folder with one of them is an ordinary transformers folder
ENDS = ("<end_of_turn>", "<|end|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")  # tokens that end a turn
TOKENS, EOS = "tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id"
WANTED = (TOKENS, EOS, "general.architecture")
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def find_gguf(path: str | Path) -> Path | None:
    """Return the GGUF file of a path, or None."""
    path = Path(path)
    if os.path.isdir(path):  # unlike pathlib, False for a name that is too long
        files = [] if any((path / name).exists() for name in PLAIN) else sorted(path.iterdir())
        files = [file for file in files if file.suffix.lower() == GGUF]
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{path} holds {len(files)} GGUF files ({names}); pass the path of one of them")
        file = files[0] if files else None
    else:
        file = path if path.suffix.lower() == GGUF else None
        if file is not None and not file.is_file():
            raise ValueError(f"no such GGUF file: {file}")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if file is not None and missing:
        raise ValueError(
            f"{file} is a GGUF file, which needs packages that are not installed ({', '.join(missing)}); pip install "
            "'fastgrpo[gguf]'"
        )
    return file


def source_of(path: str | Path) -> tuple[str | Path, dict[str, str]]:
    """Return the path and keyword arguments for transformers' `from_pretrained`."""
    file = find_gguf(path)
    return (path, {}) if file is None else (file.parent, {"gguf_file": file.name})


def unpacked(gguf: dict[str, str]) -> dict[str, Any]:
    """Return the keyword arguments with which transformers dequantizes all weights of a GGUF file."""
    if not gguf:
        return {}
    from transformers import GgufConfig  # missing in older releases, which can load all other models

    return {**gguf, "quantization_config": GgufConfig(dequantize=True)}


def complete(model: PreTrainedModel, path: str | Path) -> None:
    """Add the tokens that end a turn to the generation config, which transformers 5.17 does not read from GGUF files.

    transformers also drops scaled rotary frequencies, except for gpt-oss: for a file with them, raise ValueError.
    """
    from gguf import GGUFReader

    reader = GGUFReader(find_gguf(path))
    fields = {name: field.contents() for name, field in reader.fields.items() if name in WANTED or "rope" in name}
    arch = fields["general.architecture"]
    scaled = any(tensor.name.startswith(("rope_freqs", "rope_factors")) for tensor in reader.tensors)
    if arch != "gpt-oss" and (scaled or fields.get(f"{arch}.rope.scaling.type", "none") != "none"):
        raise ValueError(
            f"{path} has scaled rotary frequencies, which transformers would drop; use the model's folder with "
            ".safetensors files"
        )
    if arch != "gpt-oss":  # its <|end|> ends only the reasoning
        ends = {i for i, token in enumerate(fields.get(TOKENS, ())) if token in ENDS} | {fields.get(EOS)}
        model.generation_config.eos_token_id = sorted(ends - {None})


def set_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the special tokens of a tokenizer from the ids in its GGUF file.

    transformers 5.17 sets a Llama's EOS token to its BOS token (`GGUFLlamaConverter.tokenizer`), so completions would
    never end.
    """
    for name in SPECIAL:
        token = tokenizer.init_kwargs.pop(f"{name}_id", None)
        if token is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    tokenizer.clean_up_tokenization_spaces = False  # transformers sets it for a Llama, warns and then ignores it
