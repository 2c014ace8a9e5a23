"""How many completions fit: keys and values against the memory that is free.

Shapes: R lanes (completions in flight), C capacity of a lane in tokens, P prompts, T longest prompt, G most lanes of
one prompt.
"""

from dataclasses import dataclass

import psutil
import torch

PROMPTS_A_GROUP = 2  # prompts kept for each full group of lanes: of some groups only a straggler is left
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # lanes of a CUDA graph
NEAR = 0.8  # share of the lanes and prompts that would fit, from which what is there is kept
ROUND = 16  # prompts are rounded up to this many tokens, so that a slightly longer one does not move everything


@dataclass(frozen=True)
class Geometry:
    """How much is kept: R lanes of C tokens, and P prompts of T tokens with at most G lanes each.

    With flat slots each lane holds its prompt too, T + C tokens, and no prompt is kept apart.
    """

    lanes: int
    capacity: int
    prompts: int
    longest_prompt: int
    group: int
    flat: bool

    @property
    def lane_tokens(self):
        return self.capacity + self.longest_prompt * self.flat

    @property
    def tokens(self):
        """Keys and values are kept for this many tokens."""
        return self.lanes * self.lane_tokens + self.prompts * self.longest_prompt * (not self.flat)

    def holds(self, prompt_length, limits):
        """Whether a group of len(limits) completions could be seated."""
        return (
            prompt_length <= self.longest_prompt
            and max(limits) <= self.capacity
            and len(limits) <= min(self.group, self.lanes)
        )


def fit(requests, max_num_seqs, token_bytes, budget, flat):
    """The geometry for these requests: as many lanes as they fill, max_num_seqs allows and the budget holds.

    Args:
        requests: (prompt length, limits of the completions) of each. token_bytes: of one token's keys and values.
            budget: bytes.

    Raises:
        ValueError: not even one group fits; with the numbers.
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


def settled(old, new, requests, token_bytes, budget):
    """The geometry to go on with where `new` fits the requests and `old` is there: a change costs the graphs.

    `old` where it is as large; else both at once, so that training and evaluation do not take turns; where the budget
    does not hold both, `old` if it holds the requests and is not much smaller, else `new`.
    """
    if old.flat != new.flat:
        return new
    sizes = "lanes", "capacity", "prompts", "longest_prompt", "group"
    both = Geometry(*(max(getattr(old, size), getattr(new, size)) for size in sizes), old.flat)
    if both.tokens * token_bytes <= budget:
        return both
    near = old.lanes >= NEAR * new.lanes and old.prompts >= NEAR * new.prompts
    return old if near and all(old.holds(*request) for request in requests) else new


def kv_token_bytes(config, dtype):
    """Bytes of one token's keys and values in all layers of a model with this transformers config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim(config) * dtype.itemsize


def head_dim(config):
    """Width of a head of a model with this transformers config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_budget(device, utilization, reserved=0):
    """Bytes that keys and values may take: this share of the device's memory that is free now and not reserved."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has cached and does not use is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return int(max(free - reserved, 0) * utilization)


def bucket(lanes, geometry):
    """Lanes of the CUDA graph that serves this many."""
    return min(next((size for size in BUCKETS if size >= lanes), geometry.lanes), geometry.lanes)
