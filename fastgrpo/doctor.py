"""python -m fastgrpo.doctor: list installed and missing packages, and the kernels and attention that a run uses here.

--model PATH, with any flags of train, also prints the memory plan of that run. Downloads nothing: PATH must be a
folder, a GGUF file, or a model in the cache of the hub.

Under torchrun, also lists the ranks with their devices, and plans the memory of each device.
"""

import math
import platform
import re
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from fastgrpo.config.command import (
    COMPLETION,
    TRAIN,
    help_page,
    parse_flags,
    pip_line,
    quiet_libraries,
    run_command,
    spelled_out,
)
from fastgrpo.config.fields import settings_class
from fastgrpo.config.recipe import take_flag
from fastgrpo.config.settings import TrainConfig
from fastgrpo.ranks import Ranks, join
from fastgrpo.run.curves import table
from fastgrpo.run.terminal import print_table

# Distributions that training needs, with their purpose.
NEEDED = (
    ("transformers", "models and tokenizers"),
    ("tokenizers", "tokenizers"),
    ("datasets", "data sets of the hub"),
    ("pydantic", "settings"),
    ("tyro", "the command line"),
    ("pyyaml", "recipes and --config"),
    ("tqdm", "progress bars"),
    ("rich", "colors and tables in the terminal"),
    ("matplotlib", "curves.png"),
)
# Optional distributions, with their purpose.
OPTIONAL = (
    ("triton", "the fused kernels on GPUs (without it: the chunked path)"),
    ("flash-attn", "flash-attn's kernels (without it: PyTorch's own FlashAttention)"),
    ("liger-kernel", "fused norms, rotary embedding and SwiGLU on GPUs"),
    ("peft", "--use_peft"),
    ("gguf", "GGUF files (accelerate is needed too)"),
    ("torchao", "--ref_storage int8"),
    ("bitsandbytes", "--load_in_4bit, --ref_storage nf4"),
    ("tensorboard", "--report_to tensorboard"),
    ("wandb", "--report_to wandb"),
    ("trl", "benchmarks against TRL"),
    ("cut-cross-entropy", "benchmarks against Cut Cross-Entropy"),
)
HEAD_WIDTH = 128  # of a typical attention head


@settings_class
class DoctorFlags:
    """The flags that only this command has."""

    model: str | None = None
    """Print the memory plan of a run with this model."""
    check: bool = False
    """Run every kernel in another process, and print its largest error relative to its tolerance."""


@settings_class
class DoctorConfig(DoctorFlags, TrainConfig):
    """The flags of the command, for tab completion: all flags of train, and two more."""


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def machine() -> list[tuple[str, str]]:
    """Describe the machine, and the kernels and attention that run on it."""
    from fastgrpo.loss.dispatch import HAS_TRITON

    rows = [
        ("fastgrpo", installed("fastgrpo") or "a clone that is not installed"),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda or "none: this is a CPU build"),
    ]
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    rows += [(f"GPU {i}", _gpu(i)) for i in gpus]
    if not gpus:
        rows.append(("GPU", "no GPU visible to torch: everything runs on the CPU"))
    rows.append(("kernels", "triton" if gpus and HAS_TRITON else "chunked (plain PyTorch)"))
    return rows + attentions(torch.device("cuda" if gpus else "cpu"))


def _gpu(index):
    """Describe a GPU."""
    from fastgrpo.trainer.memory import gib

    about = torch.cuda.get_device_properties(index)
    return f"{about.name}, sm_{about.major}{about.minor}, {gib(about.total_memory)}"


def companions(ranks: Ranks, device: str) -> tuple[list[tuple[str, str]], float]:
    """Return a table of the ranks with their devices, and the least free memory of a device."""
    place, room = "CPU", math.inf
    if device != "cpu" and torch.cuda.is_available():
        from fastgrpo.rollout.slots import memory_left

        index = torch.cuda.current_device()
        place, room = f"GPU {index}: {_gpu(index)}", memory_left(torch.device("cuda", index))
    told = ranks.gather((f"{socket.gethostname()}, {place}", room), "the device of each rank")
    room = min(room for _, room in told)
    if ranks.size == 1:
        return [], room
    rows = [("ranks", f"{ranks.size}"), ("backend", torch.distributed.distributed_c10d.get_backend_config())]
    return rows + [(f"rank {rank}", place) for rank, (place, _) in enumerate(told)], room


def attentions(device: torch.device) -> list[tuple[str, str]]:
    """Describe the attention of a bfloat16 model, in training and in rollouts."""
    from fastgrpo.policy.varlen import kernel_for
    from fastgrpo.rollout.attention import choose_provider
    from fastgrpo.rollout.slots import MOST_LANES, copied_tokens
    from fastgrpo.trainer.memory import PROMPT_TOKENS

    dtype = torch.bfloat16
    kernel = kernel_for(torch.empty(0, 1, HEAD_WIDTH, device=device, dtype=dtype)).name
    kernel = "torch's, padded within buckets" if kernel in ("cpu", "math") else kernel
    settings = TrainConfig()
    requests = [(PROMPT_TOKENS, [1] * settings.num_generations)] * settings.prompts_per_step
    copied = copied_tokens(requests, MOST_LANES)
    rollouts = choose_provider("auto", device, dtype, HEAD_WIDTH, copied)
    return [("attention in training", kernel), ("attention in rollouts", rollouts)]


def packages() -> Iterator[tuple[str, str]]:
    """List every package that fastgrpo can use, with its version or how to install it."""
    for distribution, purpose in NEEDED + OPTIONAL:
        remedy = TRAIN if (distribution, purpose) in NEEDED else pip_line(distribution)
        yield distribution, installed(distribution) or f"missing, for {purpose}: {remedy}"


def memory(argv: list[str], room: float | None = None, ranks: int = 1) -> str:
    """Plan the memory of a run."""
    from fastgrpo.config.recipe import parse
    from fastgrpo.policy.device import choose_device, choose_dtype
    from fastgrpo.policy.dry_run import unplannable
    from fastgrpo.policy.load import outline
    from fastgrpo.rollout.slots import memory_left
    from fastgrpo.trainer.memory import can_release, plan

    config = parse(argv)
    quiet_libraries()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    model = outline(config.model_name_or_path, config.trust_remote_code)
    obstacle = unplannable(model)
    if obstacle:
        return f"the memory of {config.model_name_or_path} cannot be computed: the model {obstacle}"
    if room is None:
        room = memory_left(device) if device.type == "cuda" else math.inf
    judges = judges_to_come(config, device)
    sizes = {"room": room, "ranks": ranks, "judges": judges, "releases": can_release(config, device)}
    planned = plan(config, model, dtype=dtype, device=device, **sizes)
    each = f" on each of {ranks} devices" if ranks > 1 else ""
    rows = table(planned.rows())
    text = f"memory of {config.model_name_or_path} in {str(dtype).removeprefix('torch.')}{each}\n{rows}"
    try:
        planned.check()
    except ValueError as error:
        text += f"\nthis does not fit: {error}"
    return text


def judges_to_come(config: TrainConfig, device: torch.device) -> int:
    """Count the bytes of the reward models on the device of a run, from their configs. Loads no weights."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from fastgrpo.policy.device import choose_device, choose_dtype
    from fastgrpo.policy.load import loading
    from fastgrpo.rewards import PRM, names_model
    from fastgrpo.rewards.models import auto_class, same_device

    stated, total = config.reward_device, 0
    if stated != "auto" and not same_device(choose_device(stated, "device of reward_model_kwargs"), device):
        return 0
    code = config.trust_remote_code
    for name in config.reward_funcs:
        path = name.removeprefix(PRM)
        if name.startswith(PRM):
            kind, settings = auto_class(path, code, local_files_only=True), {}
        elif names_model(name):
            kind, settings = AutoModelForSequenceClassification, {"num_labels": 1}
        else:
            continue
        with loading(path, "reward model"), torch.device("meta"):
            made = AutoConfig.from_pretrained(path, trust_remote_code=code, local_files_only=True, **settings)
            model = kind.from_config(made, trust_remote_code=code)
        total += sum(parameter.numel() for parameter in model.parameters())
    return total * choose_dtype("auto", device).itemsize


def doctor(argv: list[str]) -> int:
    """On rank 0, print the machine, with --model the memory plan, and with --check the checks of the kernels."""
    if {"-h", "--help"} & {*argv}:
        print(help_page(DoctorFlags, {}, "python -m fastgrpo.doctor", __doc__, everything=True))
        return 0
    if {*COMPLETION} & {*argv}:
        parse_flags(DoctorConfig, argv, prog="python -m fastgrpo.doctor", description=__doc__)
    device = take_flag(argv, "--device")[1] or "auto"
    ranks = join(device)
    others, room = companions(ranks, device)
    if not ranks.lead:
        return 0
    print_table([*machine(), *others, *packages()])
    missing = [distribution for distribution, _ in NEEDED if installed(distribution) is None]
    if missing:
        raise ValueError(f"training needs {', '.join(missing)}: {TRAIN}")
    argv = [re.sub("^--model(?==|$)", "--model_name_or_path", argument) for argument in argv]
    argv, checks = take_flag(spelled_out(argv, DoctorFlags), "--check")
    if checks not in (None, "True", "False"):
        raise ValueError(f"check must be true or false, got {checks!r}")
    if any(argument.startswith("--model_name_or_path") for argument in argv):
        print("\n" + memory(argv, room if ranks.size > 1 else None, ranks.size))
    elif argv:
        raise ValueError("training flags need --model PATH, to plan the memory of a run; add it")
    if checks != "True":
        return 0
    from fastgrpo.kernel_checks import runner

    print()
    return runner.check_all()


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    failed = []
    code = run_command(lambda argv: failed.append(doctor(argv)), argv)
    return code or int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
