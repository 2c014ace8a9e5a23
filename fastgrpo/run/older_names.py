"""What a saved model says under names that transformers 5 dropped, for programs that read the older ones alone.

transformers 4, and with it many versions of vLLM, takes a `rope_theta` that it does not find for 10,000, so that a
model trained at 1,000,000 answers nonsense without any error (vLLM pull requests 42624, 44158). It refuses a tokenizer
of the class `TokenizersBackend`. transformers 5 reads the older names too, and means the same by them.
"""

import json
from pathlib import Path
from typing import Any


def add_older_names(path: Path) -> None:
    """Write the settings of a saved model and of its tokenizer under the names that transformers 4 reads as well."""
    for name, older in (("config.json", older_config), ("tokenizer_config.json", older_tokenizer)):
        file = path / name
        if file.exists():
            before = json.loads(file.read_text())
            after = older(before)
            if after != before:
                file.write_text(json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """Add the older names to the config of a model: `torch_dtype`, `rope_theta`, `rope_scaling`.

    Rotary parameters that differ among the layers have other older names in each architecture, and stay as they are.
    """
    added, rope = {}, config.get("rope_parameters") or {}
    if "dtype" in config:
        added["torch_dtype"] = config["dtype"]
    if "rope_theta" in rope:
        added["rope_theta"] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            added["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope.get("rope_type", "default") != "default":
            added["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return config | added  # where both are there and differ, transformers 5 goes by the new names


def older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Give the class of a tokenizer and its extra special tokens their older names."""
    changed = dict(config)
    if changed.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(changed.get("extra_special_tokens"), list):  # transformers 4 takes a dict under this name
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    return changed
