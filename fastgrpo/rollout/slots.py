"""Keys and values of a running generation: each prompt's once, each completion's in a slot of its own.

Shapes: B prompts, T longest prompt, R live rows (completions), C capacity of a slot, K key heads, H query heads,
d head width, G the most live rows of one prompt.
"""

import torch
from torch.nn import functional as F

from fastgrpo.attention import PackedAttention

GROW = 64  # tokens by which all slots grow together


class PrefillAttention(PackedAttention):
    """Packed causal attention over the prompts that also hands their keys and values to the slots."""

    def __init__(self, lengths, device, slots):
        super().__init__(lengths, device)
        self.slots = slots

    def attend(self, layer, query, key, value, scaling):
        key, value = self.pad(key), self.pad(value)
        self.slots.prompts[layer] = (key, value)
        return self.attend_padded(self.pad(query), key, value, scaling)


class Slots:
    """The attention context of decoding: one new token a row attends to its prompt and to its own suffix.

    All rows start together, so all suffixes have the same length; `compact` drops rows that have finished. The keys of
    a prompt are read once for all its rows: their queries are laid side by side as one matrix product.
    """

    def __init__(self, lengths, num_generations, device):
        """lengths: tokens of each prompt, on the host; each gets num_generations rows."""
        self.device = device
        self.longest_prompt = max(lengths)
        self.prompt_lengths = torch.tensor(lengths, device=device)
        self.prompts = {}  # layer -> keys, values [B, K, T, d]
        self.suffixes = {}  # layer -> keys, values [R, K, C, d]
        self.length = 0  # tokens in every suffix
        self._arrange(torch.arange(len(lengths), device=device).repeat_interleave(num_generations))

    @property
    def longest(self):
        return self.longest_prompt + self.length

    def _arrange(self, groups):
        """groups: [R] the prompt of each row, in rising order."""
        self.groups = groups
        counts = torch.bincount(groups, minlength=len(self.prompt_lengths))
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(groups), device=self.device) - starts[groups]
        self.width = int(counts.max())
        self.place = groups * self.width + rank  # [R] among B * G
        # [B, G] row at each place; unused places repeat a row that exists, and their results are never read.
        self.row_at = (starts[:, None] + torch.arange(self.width, device=self.device)).clamp(max=len(groups) - 1)
        beyond = torch.arange(self.longest_prompt, device=self.device) >= self.prompt_lengths[:, None]
        bias = torch.zeros(beyond.shape, device=self.device).masked_fill_(beyond, -torch.inf)
        self.prompt_bias = bias[groups][:, None, None] if bool(beyond.any()) else None  # [R, 1, 1, T]

    def compact(self, rows):
        """Keep these rows [R'] (increasing), and the prompts that still have one."""
        groups = self.groups[rows]
        prompts, groups = torch.unique_consecutive(groups, return_inverse=True)
        if len(prompts) < len(self.prompt_lengths):
            self.prompts = {layer: (k[prompts], v[prompts]) for layer, (k, v) in self.prompts.items()}
            self.prompt_lengths = self.prompt_lengths[prompts]
        self.suffixes = {layer: (k[rows], v[rows]) for layer, (k, v) in self.suffixes.items()}
        self._arrange(groups)

    def step(self):
        """Make room for one more token in every slot; to be called before each decode pass."""
        self.length += 1

    def _store(self, layer, key, value):
        """Append key and value [K, R, d]; returns the filled part of both slots, [R, K, length, d]."""
        if layer not in self.suffixes:
            empty = key.new_empty(key.shape[1], key.shape[0], 0, key.shape[2])
            self.suffixes[layer] = (empty, empty)
        if self.suffixes[layer][0].shape[2] < self.length:
            self.suffixes[layer] = tuple(F.pad(old, (0, 0, 0, GROW)) for old in self.suffixes[layer])
        keys, values = self.suffixes[layer]
        keys[:, :, self.length - 1] = key.transpose(0, 1)
        values[:, :, self.length - 1] = value.transpose(0, 1)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def attend(self, layer, query, key, value, scaling):
        """query [H, R, d], key and value [K, R, d] of the new tokens -> [R, H, d]."""
        prompt_keys, prompt_values = self.prompts[layer]  # [B, K, T, d]
        suffix_keys, suffix_values = self._store(layer, key, value)
        heads, rows, width = query.shape
        kv_heads = key.shape[0]
        repeats = heads // kv_heads
        query = (query * scaling).transpose(0, 1).reshape(rows, kv_heads, repeats, width)
        on_prompt = self._spread(query) @ prompt_keys.transpose(-1, -2)  # [B, K, G * repeats, T]
        on_prompt = self._collect(on_prompt, repeats)  # [R, K, repeats, T]
        if self.prompt_bias is not None:
            on_prompt = on_prompt + self.prompt_bias
        on_suffix = query @ suffix_keys.transpose(-1, -2)  # [R, K, repeats, length]
        probs = torch.cat([on_prompt, on_suffix], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
        from_prompt = self._collect(self._spread(probs[..., : self.longest_prompt]) @ prompt_values, repeats)
        out = from_prompt + probs[..., self.longest_prompt :] @ suffix_values
        return out.reshape(rows, heads, width)

    def _spread(self, tensor):
        """Rows side by side under their prompt: [R, K, repeats, x] -> [B, K, G * repeats, x]."""
        prompts, kv_heads = len(self.prompt_lengths), tensor.shape[1]
        return tensor[self.row_at].transpose(1, 2).reshape(prompts, kv_heads, -1, tensor.shape[-1])

    def _collect(self, tensor, repeats):
        """And back: [B, K, G * repeats, x] -> [R, K, repeats, x]."""
        prompts, kv_heads, _, last = tensor.shape
        by_place = tensor.view(prompts, kv_heads, self.width, repeats, last).transpose(1, 2)
        return by_place.reshape(prompts * self.width, kv_heads, repeats, last)[self.place]
