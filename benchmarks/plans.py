"""Predicts which runs of Qwen2.5 and Llama 3.1 fit which GPUs, and how many completions they generate at the same time.

    python -m benchmarks.plans

prints the table of docs/memory.md. Nothing is measured: each figure is from `fastgrpo.trainer.memory`.
"""

from unittest import mock

import torch

from benchmarks.scale import outlined
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.trainer.memory import MemoryPlan, plan

ROOMS = {24: 23.5, 40: 39.4, 80: 79.1, 141: 139.7}  # GB of a GPU, and GiB that are free before a run
LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
LONG = LORA | {"lora_r": 32, "prompts_per_step": 1, "num_generations": 8, "max_completion_length": 20_000}
RUNS = {  # name of the row -> model and settings
    "0.5B": ("0.5B", {}), "1.5B": ("1.5B", {}), "7B": ("7B", {}), "7B, LoRA": ("7B", LORA),
    "7B, fsdp2_offload": ("7B", {"parallel": "fsdp2_offload"}),
    "8B, LoRA of rank 32, 8 completions of 20,000 tokens": ("8B", LONG),
    "32B, LoRA in 4 bits, 6,144 tokens": ("32B", LORA | {"load_in_4bit": True, "max_completion_length": 6144}),
}  # fmt: skip
STEP = {"prompts_per_step": 64, "num_generations": 16, "max_completion_length": 1024, "use_liger_kernel": True}


def planned(name: str, gigabytes: int, releases: bool = True, **settings: object) -> MemoryPlan:
    """Plan a run of `RUNS` in bf16 on an NVIDIA GPU of compute capability 9.0 with this many GB."""
    model, own = RUNS[name]
    config, room = GRPOConfig(**{**STEP, **own, **settings}), int(ROOMS[gigabytes] * 2**30)
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)):
        device = torch.device("cuda")
        return plan(config, outlined(model), dtype=torch.bfloat16, device=device, room=room, releases=releases)


def cell(made: MemoryPlan) -> str:
    """Describe a plan: completions at the same time, tokens of a micro-batch, recomputed layers, and memory."""
    if not made.fits:
        return "does not fit"
    layers = f", {made.recomputed} recomputed" if made.recomputed else ""
    return f"{made.lanes:,}; {made.tokens:,}{layers}; {made.needed / 2**30:.1f} GiB"


def row(name: str) -> str:
    """Format the plans of a run on each GPU."""
    return f"| {name} | " + " | ".join(cell(planned(name, gigabytes)) for gigabytes in ROOMS) + " |"


def table() -> str:
    """Format the plans as a Markdown table."""
    lines = ["| run | " + " | ".join(f"{gigabytes} GB" for gigabytes in ROOMS) + " |", "|---|" + "---|" * len(ROOMS)]
    return "\n".join([*lines, *map(row, RUNS)])


if __name__ == "__main__":
    print(table())
