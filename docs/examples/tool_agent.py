"""SmolLM2-135M learns to add with a tool: python -m fastgrpo.recipes.smollm2 models/smollm2-135m, then this file."""

import random
import re
import sys

from fastgrpo import GRPOConfig, GRPOTrainer


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def shown(a, b):  # a dialogue that shows the use of the tool
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
    ]


def right(completions, answer, **columns):  # the number after the last = of the last message
    said = [re.findall(r"=\s*(\d+)", messages[-1]["content"] or "") for messages in completions]
    return [float(numbers[-1:] == [str(number)]) for numbers, number in zip(said, answer, strict=True)]


draw = random.Random(0).randrange
rows = [
    {"prompt": [*shown(3, 9), *shown(214, 140), *shown(40, 2), {"role": "user", "content": f"What is {a} + {b}?"}],
     "answer": a + b}
    for a, b in ((draw(1000), draw(1000)) for _ in range(352))
]  # fmt: skip
config = GRPOConfig(
    output_dir="runs/tool-agent", max_steps=int(sys.argv[2]) if len(sys.argv) > 2 else 40, prompts_per_step=8,
    num_generations=8, max_completion_length=96, learning_rate=5e-6, logging_steps=1, overwrite_output_dir=True,
)  # fmt: skip
model = sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m"
GRPOTrainer(model, right, config, rows[:-32], rows[-32:], tools=[add]).train()
