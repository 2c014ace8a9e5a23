"""Models as reward functions: a `RewardModel` judges prompt and completion, a `ProcessRewardModel` each step.

Texts are sorted by length and batched by tokens including padding, so that a long text does not pad all others. A text
longer than the positions of the model gets None, with one warning, because truncation would change the answer.

Process reward models have two published forms:

- "labels": token classification with 2 labels. The step tag follows each step, and the reward of the step is the
  probability of label 1 at the tag's last token. In models of TRL's PRMTrainer, the tag is the separator of the steps,
  and each step is tokenized by itself. In Qwen2.5-Math-PRM, the tag is the token <extra_0>. The text of an encoder
  begins with its [CLS].
- "tokens": a causal LM. The step tag follows each step, and the reward of the step is the probability of a good token
  against a bad one after the tag. Math-Shepherd (arXiv 2312.08935) reads "PROMPT STEP ки", a line break, "STEP ки"
  and so on, and its tokens are + and -.

Special tokens in a completion, such as <extra_0>, are read as plain text, so that a policy cannot set step tags of its
own.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastgrpo.config.sections import PRM_AGGREGATIONS
from fastgrpo.data.token_text import TokenText
from fastgrpo.policy.device import cast, choose_dtype
from fastgrpo.policy.load import loading
from fastgrpo.policy.micro_batches import by_length
from fastgrpo.rewards.steps import split_steps

BATCH_TOKENS = 16384  # tokens of one forward pass, padding included; a longer text has a pass of its own
QWEN_TAG, SHEPHERD_TAG = "<extra_0>", "ки"
SEQUENCES = "ForSequenceClassification"

logger = logging.getLogger(__name__)


class Judge:
    """A model with its tokenizer, as a reward function. Subclasses define its input and output."""

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
        self.warned = False  # whether a text that is too long was logged
        self.policy_tokenizer = None
        self._prepare()

    def _prepare(self) -> None:
        """Check the tokenizer."""

    def place(self, device: torch.device, policy_tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Move the model to a device, in bf16 on a GPU and in fp32 on a CPU. Quantized weights keep their dtype."""
        self.model.to(device)
        if not getattr(self.model, "is_quantized", False):
            cast(self.model, choose_dtype("auto", device))
        self.policy_tokenizer = policy_tokenizer

    def bytes_to_come(self, device: torch.device) -> int:
        """Return the bytes that `place` will use on a device."""
        quantized = getattr(self.model, "is_quantized", False)
        size = choose_dtype("auto", device).itemsize
        come = sum(p.nbytes if quantized else p.numel() * size for p in self.model.parameters())
        return come - sum(p.nbytes for p in self.model.parameters() if same_device(p.device, device))

    def _judged(self, texts: Sequence[Sequence[int]], read: Callable) -> list:
        """Return `read` of each text, computed in batches. It is None for a text that is empty or too long."""
        results, longest = [None] * len(texts), self._positions()
        fitting = [i for i, ids in enumerate(texts) if 0 < len(ids) <= longest]
        if not self.warned and any(len(ids) > longest for ids in texts):
            self.warned = True
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
        """Return the model's maximum number of tokens. In RoBERTa and the like, positions start after padding_idx."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**63
        for name, module in self.model.named_modules():
            padding = getattr(module, "padding_idx", None)
            if name.endswith("position_embeddings") and padding is not None:
                most = min(most, module.num_embeddings - padding - 1)
        return most

    def _lacks_first(self, text):
        """Return whether an encoder's text lacks its first token, such as [CLS]."""
        return self.tokenizer.cls_token is not None and not text.startswith(self.tokenizer.cls_token)

    def _inputs(self, texts):
        """Pad token ids on the right. Padding is masked, so any token serves if the tokenizer has none."""
        longest = max(map(len, texts))
        fill = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*text, *[fill] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        return {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}


def same_device(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are the same."""
    current = torch.cuda.current_device() if "cuda" == one.type == other.type else 0
    indices = [current if device.index is None else device.index for device in (one, other)]
    return one.type == other.type and indices[0] == indices[1]


class RewardModel(Judge):
    """A reward model with its tokenizer, as a reward function.

    Args:
        model: A sequence classifier with one label, which is set to evaluation mode.
        tokenizer: Its tokenizer; None loads it from the model's folder or repository.
        template: Further arguments of the tokenizer's chat template.
        trust_remote_code: Run Python code that comes with the tokenizer.

    Raises:
        ValueError: The model does not have one label, has no tokenizer, or its tokenizer has no padding token.
    """

    def _prepare(self):
        if self.tokenizer.pad_token_id is None:
            raise ValueError(
                f"reward_funcs: the tokenizer of {self.__name__} has no padding token, and the model computes its "
                "reward before the first padding token; set tokenizer.pad_token to a token that no text has (the end "
                "token ends turns of a chat too), and pass the tokenizer as reward_processing_classes"
            )
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def _check_kind(self, model):
        if not type(model).__name__.endswith(SEQUENCES) or model.config.num_labels != 1:
            raise ValueError(
                f"reward_funcs: {self.__name__} is a {type(model).__name__} with {model.config.num_labels} labels; a "
                "reward model is loaded by AutoModelForSequenceClassification with num_labels=1. A process reward "
                "model is named prm:DIR, or made by fastgrpo.rewards.models.ProcessRewardModel. To use the output of "
                "another model, write a function f(prompts, completions, **columns)"
            )

    @classmethod
    def load(cls, path: str, **settings: Any) -> "RewardModel":
        """Load a reward model and its tokenizer from a folder or a hub id, with arguments of `RewardModel`."""
        code = settings.get("trust_remote_code", False)
        with loading(path, "reward model"):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, trust_remote_code=code, output_loading_info=True
            )
        if info["missing_keys"]:  # transformers initializes them at random
            lacking = ", ".join(sorted(info["missing_keys"]))
            raise ValueError(
                f"reward_funcs: {path} is not a reward model: its files lack {lacking}; name a sequence "
                "classifier with one label, or prm: in front of a process reward model"
            )
        return cls(model, **settings)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float | None]:
        """Return the model's logit for each completion after its prompt, texts or lists of messages.

        It is None if together they exceed the model's context. Raises ValueError if prompts are messages and the
        tokenizer has no chat template.
        """
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if not texts:
            return []
        if any(isinstance(text, list) for text in texts):
            if self.tokenizer.chat_template is None:
                raise ValueError(
                    f"the prompts are lists of messages, but the tokenizer of the reward model {self.__name__} has no "
                    "chat template; pass a tokenizer with one as reward_processing_classes"
                )
            render = self.tokenizer.apply_chat_template
            texts = [render(t, tokenize=False, **self.template) if isinstance(t, list) else t for t in texts]
        # An encoder reads [CLS] TEXT [SEP]; the template of a chat writes what other models need.
        ids = [self.tokenizer(text=t, add_special_tokens=self._lacks_first(t))["input_ids"] for t in texts]
        return self._judged(ids, lambda inputs, _: self.model(**inputs).logits[:, 0].float().tolist())


class ProcessRewardModel(Judge):
    """A process reward model with its tokenizer, as a reward function.

    It logs the rewards of steps with `log_steps`, for process_rewards "token", and as the column NAME/steps.

    Args:
        model: A token classifier with 2 labels, the second of which means a right step, or a causal LM. It is put into
            evaluation mode.
        tokenizer: Its tokenizer; None loads it from the model's folder or repository.
        template: Further arguments of the tokenizer's chat template.
        trust_remote_code: Run Python code that comes with the tokenizer.
        separator: Separates the steps of a completion.
        aggregation: Combines the rewards of steps: "min", "mean", "last" or "product".
        step_tag: Follows each step in the text that the model reads. None is "ки" for a causal LM. For a token
            classifier, None is <extra_0> if the tokenizer has it, else the separator.
        good_token: The token of a causal LM that means a right step.
        bad_token: The token of a causal LM that means a wrong step.

    Raises:
        ValueError: The model, its tokenizer or an argument does not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        *,
        separator: str = "\n\n",
        aggregation: str = "min",
        step_tag: str | None = None,
        good_token: str = "+",
        bad_token: str = "-",
    ) -> None:
        super().__init__(model, tokenizer, template, trust_remote_code)
        if aggregation not in PRM_AGGREGATIONS:
            raise ValueError(f"aggregation must be one of {', '.join(PRM_AGGREGATIONS)}, got {aggregation!r}")
        if not separator:
            raise ValueError("separator must not be empty: it separates the steps of a completion")
        self.separator, self.aggregation = separator, aggregation
        if step_tag is None:
            tag_known = QWEN_TAG in self.tokenizer.get_vocab()
            step_tag = SHEPHERD_TAG if self._by_tokens else QWEN_TAG if tag_known else separator
        self.step_tag = step_tag
        if self._by_tokens:
            self._prepare_tokens(good_token, bad_token)
        elif not self._ids(step_tag):
            raise ValueError(f"step_tag {step_tag!r} of {self.__name__} has no tokens in its tokenizer")

    @property
    def _by_tokens(self):
        return self.model.get_output_embeddings() is not None

    def _check_kind(self, model):
        if model.get_output_embeddings() is not None or (
            getattr(model.config, "num_labels", None) == 2 and not type(model).__name__.endswith(SEQUENCES)
        ):
            return
        raise ValueError(
            f"reward_funcs: {self.__name__} is a {type(model).__name__}; a process reward model is a token "
            "classifier with 2 labels (AutoModelForTokenClassification), or a causal LM that writes a good or a bad "
            "token after each step. A sequence classifier with one label is a reward model: name it without prm:"
        )

    def _prepare_tokens(self, good_token, bad_token):
        """Find the ids of the good and the bad token. Raises ValueError if one does not exist."""
        self.choices = []
        for name, text in (("good_token", good_token), ("bad_token", bad_token)):
            ids = self._ids(text)
            if not ids or self.tokenizer.decode(ids[-1:]).strip() != text.strip():
                raise ValueError(
                    f"{name}={text!r} is not one token of {self.__name__}, but {len(ids)}; name the token that the "
                    "model writes after a step, with its leading space if it has one"
                )
            self.choices.append(ids[-1])  # some tokenizers add a token for a leading space
        if None in self._text_with_tags("1", ["1", "1"])[1]:
            raise ValueError(
                f"step_tag {self.step_tag!r} does not end in a token of {self.__name__}; name the text that the "
                "model was trained to read after each step"
            )

    @classmethod
    def load(cls, path: str, **settings: Any) -> "ProcessRewardModel":
        """Load a process reward model and its tokenizer from a folder or a hub id, with arguments of the class."""
        code = settings.get("trust_remote_code", False)
        auto = auto_class(path, code)
        with loading(path, "process reward model"):
            model = auto.from_pretrained(path, trust_remote_code=code)
        return cls(model, **settings)

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence[list[int]] = (),
        log_extra: Callable | None = None,
        log_steps: Callable | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the reward of each completion, from 0 to 1.

        It is None for a completion without steps, or one that with its prompt exceeds the model's context.
        `log_extra` gets the column NAME/steps. `log_steps` gets ends and rewards of the steps if the policy's tokenizer
        is known (`place`), as with process_rewards=token.
        """
        written = [_drawn(completion) for completion in completions]
        split = [[step for text in texts for step in split_steps(text, self.separator)] for texts in written]
        build = self._text_with_tags if self._by_tokens else self._ids_with_tags
        texts = [
            build(prompt, [text for text, _ in of_one]) if of_one else ([], [])
            for prompt, of_one in zip(prompts, split, strict=True)
        ]
        places = [at for _, at in texts]
        rewards = self._judged(
            [ids for ids, _ in texts], lambda inputs, indices: self._read(inputs, [places[i] for i in indices])
        )
        if log_extra is not None:
            log_extra(f"{self.__name__}/steps", rewards)
        if log_steps is not None and self.policy_tokenizer is not None:
            text, found = TokenText(self.policy_tokenizer), []
            for ids, texts, of_one, of_model in zip(completion_ids, written, split, rewards, strict=True):
                ends = _ends_in(self.policy_tokenizer.decode(ids, skip_special_tokens=True), texts, of_one)
                found.append((text.counts(ids, ends), of_model) if of_model and ends else ([], []))
            log_steps(*_one_step_a_token(found))
        return [aggregate(of_one, self.aggregation) if of_one else None for of_one in rewards]

    def _ids(self, text, plain=False):
        """Return the ids of a text. If `plain`, special tokens in it are read as text."""
        if not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]

    def _ids_with_tags(self, prompt, steps):
        """Return the ids of a prompt and its steps, each followed by the tag, and the positions of the tags' ends."""
        if isinstance(prompt, list) and self.tokenizer.chat_template is not None:
            text = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **self.template
            )
            first = self.tokenizer.cls_token_id if self._lacks_first(text) else None
        else:
            text, first = _text(prompt), self.tokenizer.bos_token_id
            first = self.tokenizer.cls_token_id if first is None else first
        return self._joined([*([] if first is None else [first]), *self._ids(text)], steps)

    def _joined(self, ids, steps):
        """Append steps to ids, each followed by the tag. Return the ids, and the positions of the tags' last tokens."""
        tag, places = self._ids(self.step_tag), []
        for step in steps:
            ids = [*ids, *self._ids(step, plain=True), *tag]
            places.append(len(ids) - 1)
        return ids, places

    def _text_with_tags(self, prompt, steps):
        """Return the ids of Math-Shepherd's text, and the positions of the tags' last tokens."""
        text, ends = _text(prompt), []
        steps = [f"{' ' if i == 0 else chr(10)}{step} " for i, step in enumerate(steps)]
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        spelt = any(token in step for token in special for step in steps)
        if spelt and self.step_tag in special:
            return self._joined(self.tokenizer(text)["input_ids"], steps)
        for step in steps:
            text += f"{step}{self.step_tag}"
            ends.append(len(text) - 1)
        tokens = self.tokenizer(text, return_offsets_mapping=True, split_special_tokens=spelt)
        # A character may span several tokens, one for each of its bytes.
        spans = tokens["offset_mapping"]
        of_ends = [[at for at, (start, after) in enumerate(spans) if start <= end < after] for end in ends]
        return tokens["input_ids"], [max(of_one, default=None) for of_one in of_ends]

    def _read(self, inputs, places):
        """Return the step rewards of each text in a batch."""
        if not self._by_tokens:
            probabilities = self.model(**inputs)[0].float().softmax(-1)[..., 1]
            return [probabilities[i, at].tolist() for i, at in enumerate(places)]
        # The head gets only the tags: logits of all tokens would be large.
        texts = [i for i, of_one in enumerate(places) for _ in of_one]
        tags = [at for of_one in places for at in of_one]
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda module, states: (states[0][texts, tags].unsqueeze(0), *states[1:])
        )
        try:
            logits = self.model(**inputs).logits
        finally:
            hook.remove()
        good = iter(logits[0, :, self.choices].float().softmax(-1)[:, 0].tolist())
        return [[next(good) for _ in of_one] for of_one in places]


def auto_class(path: str, trust_remote_code: bool = False, local_files_only: bool = False) -> type:
    """Find the class of transformers that loads a process reward model."""
    with loading(path, "config of the process reward model"):
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    named = (getattr(config, "architectures", None) or ["(none)"])[0]
    if named.endswith("ForTokenClassification"):
        return AutoModelForTokenClassification
    if named.endswith(("ForCausalLM", "LMHeadModel")):
        return AutoModelForCausalLM
    if "AutoModel" in (getattr(config, "auto_map", None) or {}):  # such as Qwen2.5-Math-PRM's own class
        return AutoModel
    raise ValueError(
        f"reward_funcs: prm:{path} is a {named}; a process reward model is a token classifier with 2 labels "
        "(...ForTokenClassification) or a causal LM (...ForCausalLM). A sequence classifier with one label is a reward "
        "model: name it without prm:"
    )


def aggregate(steps: Sequence[float], how: str) -> float:
    """Combine the rewards of steps into one."""
    makers = {"min": min, "last": lambda rewards: rewards[-1], "product": math.prod}
    return sum(steps) / len(steps) if how == "mean" else makers[how](steps)


def _text(messages):
    """Return a text, or the text of messages without the system message."""
    if isinstance(messages, str):
        return messages
    return "\n".join(m["content"] or "" for m in messages if m["role"] != "system")


def _drawn(completion):
    """Return the texts of the policy's turns in a completion."""
    if isinstance(completion, str):
        return [completion]
    return [message["content"] or "" for message in completion if message["role"] == "assistant"]


def _ends_in(decoded, texts, steps):
    """Return where the steps of texts end in the decoded completion, or an empty list if one of them is not there.

    The completion also has thoughts, tool calls and answers. A thought may repeat a step, so search from the end.
    """
    if len(texts) == 1 and (start := decoded.rfind(texts[0])) >= 0:
        return [start + end for _, end in steps]
    ends, start = [], len(decoded)
    for step, _ in reversed(steps):
        start = decoded.rfind(step, 0, start)
        if start < 0:
            return []
        ends.insert(0, start + len(step))
    return ends


def _one_step_a_token(found):
    """Join steps that end in the same token, and keep the reward of the last one."""
    kept = [dict(zip(ends, rewards, strict=True)) for ends, rewards in found]
    return [list(of_one) for of_one in kept], [list(of_one.values()) for of_one in kept]
