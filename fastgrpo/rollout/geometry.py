"""How many lanes and prompt slots fit into the memory that is free.

Shapes: R lanes, C most tokens of a completion, P prompt slots, T most tokens of a prompt, G most lanes of one prompt.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from fastgrpo.policy.model import head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Prompt slots for each full group of lanes. One would not do: a group with one completion left still needs its prompt.
PROMPTS_A_GROUP = 2
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # numbers of lanes of CUDA graphs
NEAR = 0.8  # the present geometry is kept if it has at least this share of the lanes and prompt slots that would fit
ROUND = 16  # T is rounded up to a multiple of this, so that a slightly longer prompt needs no new slots


@dataclass(frozen=True)
class Geometry:
    """The numbers and sizes of the slots that hold keys and values.

    Attributes:
        lanes: R, the completions in flight at once.
        capacity: C, most tokens of a completion.
        prompts: P, the prompt slots. With flat slots, only the number of groups in flight at once.
        longest_prompt: T, most tokens of a prompt.
        group: G, most lanes of one prompt.
        flat: Whether the slot of each lane holds a copy of its prompt before the completion, T + C tokens together. If
            not, a prompt's keys and values lie once in a slot of their own, and a lane's slot holds C tokens.
    """

    lanes: int
    capacity: int
    prompts: int
    longest_prompt: int
    group: int
    flat: bool

    @property
    def lane_tokens(self) -> int:
        """Tokens that the slot of a lane holds."""
        return self.capacity + self.longest_prompt * self.flat

    @property
    def tokens(self) -> int:
        """Tokens that all slots together hold."""
        return self.lanes * self.lane_tokens + self.prompts * self.longest_prompt * (not self.flat)

    def holds(self, prompt_length: int, limits: list[int]) -> bool:
        """Tell whether a group fits if all lanes are free.

        Args:
            prompt_length: Tokens of the prompt.
            limits: Most tokens of each completion of the group.

        Returns:
            Whether it fits.
        """
        return (
            prompt_length <= self.longest_prompt
            and max(limits) <= self.capacity
            and len(limits) <= min(self.group, self.lanes)
        )


def fit(
    requests: list[tuple[int, list[int]]], max_num_seqs: int, token_bytes: int, budget: int, flat: bool
) -> Geometry:
    """Choose the geometry with the most lanes that these requests fill and the limits allow.

    Args:
        requests: Tokens of the prompt of each request, and most tokens of each of its completions.
        max_num_seqs: Most lanes.
        token_bytes: Bytes of one token's keys and values in all layers.
        budget: Most bytes of all slots.
        flat: Whether a lane's slot holds a copy of its prompt.

    Returns:
        The geometry.

    Raises:
        ValueError: The budget does not hold one group.
    """
    group = max(len(limits) for _, limits in requests)
    capacity = max(max(limits) for _, limits in requests)
    longest = -max(length for length, _ in requests) // ROUND * -ROUND

    def geometry(lanes):
        prompts = min(len(requests), PROMPTS_A_GROUP * -(-lanes // group))
        return Geometry(lanes, capacity, prompts if lanes > group else 1, longest, group, flat)

    wanted = min(max_num_seqs, sum(len(limits) for _, limits in requests))
    for lanes in range(wanted, group - 1, -1):
        if geometry(lanes).tokens * token_bytes <= budget:
            return geometry(lanes)
    raise ValueError(
        f"one group of {group} completions of up to {capacity} tokens and its prompt of {longest} needs "
        f"{geometry(group).tokens * token_bytes / 2**30:.2f} GiB for keys and values, and {budget / 2**30:.2f} GiB are "
        "allowed: lower num_generations or max_completion_length, or raise rollout_memory_utilization"
    )


def settled(
    old: Geometry, new: Geometry, requests: list[tuple[int, list[int]]], token_bytes: int, budget: int
) -> Geometry:
    """Choose the geometry to go on with, given the present one and the one that fits the next requests best.

    A change of geometry costs the CUDA graphs. So the choice is the larger of the two in every size, if the budget
    holds that: then training and evaluation, which alternate, share one geometry. Otherwise it is the present one if it
    holds the requests and is not much smaller than the new one, and else the new one.

    Args:
        old: The present geometry.
        new: The geometry that fits the requests best.
        requests: Tokens of the prompt of each request, and most tokens of each of its completions.
        token_bytes: Bytes of one token's keys and values in all layers.
        budget: Most bytes of all slots.

    Returns:
        The geometry.
    """
    if old.flat != new.flat:
        return new
    sizes = "lanes", "capacity", "prompts", "longest_prompt", "group"
    both = Geometry(*(max(getattr(old, size), getattr(new, size)) for size in sizes), old.flat)
    if both.tokens * token_bytes <= budget:
        return both
    near = old.lanes >= NEAR * new.lanes and old.prompts >= NEAR * new.prompts
    return old if near and all(old.holds(*request) for request in requests) else new


def kv_token_bytes(config: "PretrainedConfig", dtype: torch.dtype) -> int:
    """Count the bytes of one token's keys and values in all layers of a model.

    Args:
        config: The model's transformers config.
        dtype: Dtype of keys and values.

    Returns:
        Bytes.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim(config) * dtype.itemsize


def kv_budget(device: torch.device, utilization: float, reserved: int = 0) -> int:
    """Count the bytes that keys and values may take, a share of what is free now.

    Args:
        device: Where keys and values lie. For a CPU, the memory of the host counts.
        utilization: The share, in (0, 1].
        reserved: Bytes of the free memory that others will take.

    Returns:
        Bytes.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has cached and does not use is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return int(max(free - reserved, 0) * utilization)


def bucket(lanes: int, geometry: Geometry) -> int:
    """Choose the number of lanes of the CUDA graph that serves at least so many.

    Args:
        lanes: Lanes in use.
        geometry: The geometry, whose number of lanes is the most.

    Returns:
        The smallest of `BUCKETS` that is large enough, or all lanes.
    """
    return min(next((size for size in BUCKETS if size >= lanes), geometry.lanes), geometry.lanes)
