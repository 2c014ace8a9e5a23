"""python -m fastgrpo.doctor: what is installed, what runs on it, and what is missing for what.

With --model PATH and any flags of training, also the memory that such a run would hold. Nothing is downloaded.
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from fastgrpo.config.command import TRAIN, quiet_libraries, run_command
from fastgrpo.run.curves import table

# distribution, what it is for; the first ones are needed
NEEDED = (
    ("transformers", "models and tokenizers"),
    ("tokenizers", "tokenizers"),
    ("datasets", "data sets of the hub"),
    ("tyro", "the command line"),
    ("pyyaml", "recipes and --config"),
    ("tqdm", "progress bars"),
    ("matplotlib", "curves.png"),
)
OPTIONAL = (
    ("triton", "the fused kernels on GPUs (without it: the chunked path)"),
    ("flash-attn", "FlashAttention of its authors (without it: PyTorch's own)"),
    ("liger-kernel", "fused norms, rotary embedding and SwiGLU"),
    ("peft", "--use_peft"),
    ("torchao", "--ref_quantization int8"),
    ("bitsandbytes", "--ref_quantization nf4"),
    ("math-verify", "comparing answers that are expressions"),
    ("tensorboard", "--report_to tensorboard"),
    ("wandb", "--report_to wandb"),
    ("trl", "benchmarks against TRL"),
    ("cut-cross-entropy", "benchmarks against Cut Cross-Entropy"),
)
PROMPT_TOKENS, HEAD_WIDTH = 256, 128  # of a typical prompt, and a typical model


def installed(distribution):
    """The version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def machine():
    """(name, value) of what the code runs on."""
    from fastgrpo.loss.checks import HAS_TRITON

    rows = [
        ("fastgrpo", version("fastgrpo")),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda or "none: this is a CPU build"),
    ]
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    for i in gpus:
        about = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{about.name}, sm_{about.major}{about.minor}, {_gib(about.total_memory)}"))
    if not gpus:
        rows.append(("GPU", "none that torch sees: everything runs on the CPU"))
    rows.append(("kernels", "triton" if gpus and HAS_TRITON else "chunked (plain PyTorch)"))
    return rows + attentions(torch.device("cuda" if gpus else "cpu"))


def attentions(device):
    """(name, value) of the attention that a model in 16 bits on this device would get, in training and in rollouts."""
    from fastgrpo.policy.varlen import kernel_for
    from fastgrpo.rollout.providers import choose_provider

    dtype = torch.bfloat16
    kernel = kernel_for(torch.empty(0, 1, HEAD_WIDTH, device=device, dtype=dtype)).name
    kernel = {"cpu": "torch's, padded within buckets", "math": "torch's, padded within buckets"}.get(kernel, kernel)
    rollouts = choose_provider("auto", device, dtype, HEAD_WIDTH, PROMPT_TOKENS)
    return [("attention in training", kernel), ("attention in rollouts", rollouts)]


def packages():
    """(name, version or what is missing for what) of every package that fastgrpo can use."""
    for distribution, purpose in NEEDED + OPTIONAL:
        remedy = TRAIN if (distribution, purpose) in NEEDED else f"pip install {distribution}"
        yield distribution, installed(distribution) or f"missing, for {purpose}: {remedy}"


def memory(argv):
    """The planned memory of a run with these flags of training, as text."""
    from fastgrpo.config.recipe import parse
    from fastgrpo.policy.load import choose_device, choose_dtype
    from fastgrpo.step.plan import outline, plan

    config = parse(argv)
    quiet_libraries()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    on_gpu = device.type == "cuda"
    model = outline(config.model_name_or_path, config.trust_remote_code)
    parts = plan(config, model, dtype=dtype, device=device, prompt_tokens=PROMPT_TOKENS)
    own = sum(part.bytes for part in parts if not part.ppo)
    rows = [(part.name, f"{_gib(part.bytes):>11}   {part.how}") for part in parts if not part.ppo]
    rows.append(("in all", f"{_gib(own):>11}   without activations"))
    rows += [(f"PPO: {part.name}", f"{_gib(part.bytes):>11}   {part.how}") for part in parts if part.ppo]
    rows.append(
        ("PPO in all", f"{_gib(sum(part.bytes for part in parts)):>11}   with a value model of the policy's size")
    )
    text = f"memory of {config.model_name_or_path} in {str(dtype).removeprefix('torch.')}\n{table(rows)}"
    if on_gpu:
        total = torch.cuda.get_device_properties(device).total_memory
        text += f"\n{'fits into' if own < total else 'does not fit into'} the GPU's {_gib(total)}"
    return text


def _gib(count):
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"


def doctor(argv):
    """Print what there is; raises ValueError where training could not run."""
    print(table([*machine(), *packages()]))
    missing = [distribution for distribution, _ in NEEDED if installed(distribution) is None]
    if missing:
        raise ValueError(f"training needs {', '.join(missing)}: {TRAIN}")
    argv = ["--model_name_or_path" if argument == "--model" else argument for argument in argv]
    argv = [argument.replace("--model=", "--model_name_or_path=", 1) for argument in argv]
    if any(argument.startswith("--model_name_or_path") for argument in argv):
        print("\n" + memory(argv))
    elif argv:
        raise ValueError("flags of training go with --model PATH, for the memory that such a run would hold")


def main(argv=None):
    """Run the command line; returns the exit code: 2 where something that training needs is missing."""
    return run_command(doctor, argv)


if __name__ == "__main__":
    sys.exit(main())
