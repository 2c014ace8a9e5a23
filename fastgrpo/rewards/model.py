"""What reward models of all kinds share: their tokenizer, their device, and passes over texts of similar lengths.

Texts are sorted by length and batched by a budget of tokens with their padding, so that a long text does not pad all
others. A text that is longer than the positions of the model is not judged: a reward for a part of an answer would be
that of another answer. It gets None, and a warning says so once.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.policy.device import choose_dtype
from fastgrpo.policy.load import loading

BATCH_TOKENS = 16384  # tokens of one forward pass, padding included; a longer text has a pass of its own

logger = logging.getLogger(__name__)


class Judge:
    """A model with its tokenizer, as a reward function. A subclass says what the model reads and returns.

    Attributes:
        name_or_path: Where the model came from; empty where it was made in memory.
    """

    pooled = False  # it stays in the trainer's process, with its device

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.name_or_path = getattr(model.config, "_name_or_path", "")
        self.__name__ = self.name_or_path.rstrip("/").split("/")[-1] or type(model).__name__
        self._check_kind(model)
        if tokenizer is None:
            if not self.name_or_path:
                raise ValueError(
                    f"reward_funcs: {self.__name__} was made in memory and has no tokenizer to load; pass "
                    "reward_processing_classes"
                )
            with loading(self.name_or_path, "tokenizer"):
                tokenizer = AutoTokenizer.from_pretrained(self.name_or_path, trust_remote_code=trust_remote_code)
        self.model, self.tokenizer, self.template = model.eval(), tokenizer, template or {}
        self.model.config.use_cache = False  # each text is read once
        self.told = False  # whether a text that is too long has been told of

    def _check_kind(self, model) -> None:
        """Refuse a model of another kind."""

    def place(self, device: torch.device, policy_tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Move the model to a device, in bf16 on a GPU and in fp32 on a CPU; quantized weights stay as they are."""
        self.model.to(device)
        if not getattr(self.model, "is_quantized", False):
            self.model.to(choose_dtype("auto", device))
        self.policy_tokenizer = policy_tokenizer

    def bytes_to_come(self, device: torch.device) -> int:
        """Count the bytes that `place` will take on a device."""
        quantized = getattr(self.model, "is_quantized", False)
        size = choose_dtype("auto", device).itemsize
        come = sum(p.nbytes if quantized else p.numel() * size for p in self.model.parameters())
        return come - sum(p.nbytes for p in self.model.parameters() if same_device(p.device, device))

    def _judged(self, texts: Sequence[Sequence[int]], read: Callable) -> list:
        """Pass token ids through the model."""
        results, longest = [None] * len(texts), self._positions()
        fitting = [i for i, ids in enumerate(texts) if 0 < len(ids) <= longest]
        if not self.told and any(len(ids) > longest for ids in texts):
            self.told = True
            logger.warning(
                "the reward model %s has %d positions, and a prompt with its completion takes %d tokens: such "
                "completions get no reward from it; lower max_completion_length, or use a model for longer texts",
                self.__name__, longest, max(map(len, texts)),
            )  # fmt: skip
        for batch in by_length([len(texts[i]) for i in fitting], BATCH_TOKENS):
            indices = [fitting[at] for at in batch]
            for i, result in zip(indices, read(self._inputs([texts[i] for i in indices]), indices), strict=True):
                results[i] = result
        return results

    def _positions(self):
        """Return how many tokens the model can read.

        The positions of RoBERTa and its kin begin behind that of padding, so no text has the first padding_idx + 1.
        """
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**63
        for name, module in self.model.named_modules():
            padding = getattr(module, "padding_idx", None)
            if name.endswith("position_embeddings") and padding is not None:
                most = min(most, module.num_embeddings - padding - 1)
        return most

    def _lacks_first(self, text):
        """Tell whether the model is an encoder, whose texts begin with [CLS] or its like, and a text does not."""
        return self.tokenizer.cls_token is not None and not text.startswith(self.tokenizer.cls_token)

    def _inputs(self, texts):
        """Pad token ids on the right. What pads is not attended to, so any token will do where there is none for it."""
        longest = max(map(len, texts))
        fill = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*text, *[fill] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        return {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}


def by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put texts of similar lengths into batches."""
    batches, longest = [], 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return batches


def same_device(one: torch.device, other: torch.device) -> bool:
    """Tell whether two devices are one."""

    def number(device):
        return torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index or 0

    return one.type == other.type and number(one) == number(other)
