"""Device and dtype of a model, and checks of its path and of optional packages."""

import logging
import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

from fastgrpo.config.command import pip_line

logger = logging.getLogger(__name__)
GGUF = ".gguf"  # suffix of a model in one file
MODULES = {"torchao": "torchao.quantization", "tensorboard": "torch.utils.tensorboard"}  # else the package itself


def choose_device(name: str = "auto", setting: str = "device") -> torch.device:
    """Return the device that a setting names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{setting} must be cuda, cuda:N, cpu or auto, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{setting}={name!r} needs a GPU, but torch sees no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{setting}={name!r} does not exist: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a setting names; auto is bf16 on GPUs that have it (the optimizer has fp32 masters)."""
    if name == "auto":
        emulated = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if device.type == "cuda" and not emulated else torch.float32
    return getattr(torch, name)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model, but not its buffers: bf16 rotary frequencies give angles wrong by radians."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def check_folder(path: str) -> None:
    """Raise ValueError if a model's path names no folder and no GGUF file. Hub ids are not looked up."""
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not path or (is_path and not os.path.isdir(path) and not path.lower().endswith(GGUF)):
        raise ValueError(f"no such model folder: {path or '(an empty name)'}")
    if os.path.isfile(os.path.join(path, "metrics.jsonl")):
        raise ValueError(f"{path} is the folder of a run; name a model in it, such as checkpoint-STEP, final or merged")


def check_packages(config: Any) -> None:
    """Raise ValueError if settings need a package that is missing."""
    needed = {"peft": ("use_peft", "'fastgrpo[lora]'")} if config.use_peft else {}
    needed |= {name: (f"report_to {name}", name) for name in config.report_to if name != "none"}
    storage = getattr(config, "ref_storage", None)
    if getattr(config, "load_in_4bit", False):
        needed["bitsandbytes"] = ("load_in_4bit", "'fastgrpo[quantization]'")
    if storage in ("int8", "nf4"):
        package = "torchao" if storage == "int8" else "bitsandbytes"
        needed[package] = (f"ref_storage={storage}", "'fastgrpo[quantization]'")
    if getattr(config, "optim", None) == "adamw_8bit":
        needed["bitsandbytes"] = ("optim=adamw_8bit", "'fastgrpo[quantization]'")
    for package, (setting, source) in needed.items():
        if package_obstacle(MODULES.get(package, package)):
            raise ValueError(f"{setting} needs {package}, which is missing or does not load: pip install {source}")


@cache
def package_obstacle(module: str) -> str | None:
    """Import a package. Return why it cannot be used, as a predicate ("needs ..."), or None.

    A compiled package that was built for another version of torch is installed, but fails on import. This is also
    logged once, because "auto" settings continue without the package.
    """
    root = module.partition(".")[0]
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        # flash-attn 4 also installs a package `flash_attn`, but without the modules of flash-attn 2
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"needs the package: {pip_line(module)}"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        obstacle = f"{root} is installed but does not load ({reason}); remove it, then {pip_line(module)}"
        logger.warning("%s", obstacle)
        return f"needs a package that loads: {obstacle}"
    return None
