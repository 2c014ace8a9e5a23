"""Reward models: a sequence classifier with one label judges prompt and completion, called as a reward function is."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.policy.load import loading
from fastgrpo.rewards.model import Judge


class RewardModel(Judge):
    """A reward model with its tokenizer, as a reward function.

    Args:
        model: A sequence classifier with one label. It is put into evaluation mode.
        tokenizer: Its tokenizer; None loads the one from where the model came from.
        template: Further arguments of the tokenizer's chat template.
        trust_remote_code: Whether Python code that comes with the tokenizer may run.

    Raises:
        ValueError: The model has not one label, there is no tokenizer, or the tokenizer has no padding token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, template, trust_remote_code)
        if self.tokenizer.pad_token_id is None:
            raise ValueError(
                f"reward_funcs: the tokenizer of {self.__name__} has no padding token, and the model reads its reward "
                "before the first one; set tokenizer.pad_token to a token that no text has (the end token ends turns "
                "of a chat too), and pass the tokenizer as reward_processing_classes"
            )
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def _check_kind(self, model):
        if not type(model).__name__.endswith("ForSequenceClassification") or model.config.num_labels != 1:
            raise ValueError(
                f"reward_funcs: {self.__name__} is a {type(model).__name__} with {model.config.num_labels} labels; a "
                "reward model is loaded by AutoModelForSequenceClassification with num_labels=1. A process reward "
                "model is named prm:DIR, or made by fastgrpo.rewards.process_model.ProcessRewardModel. What another "
                "model says is a reward by way of a function f(prompts, completions, **columns) of your own"
            )

    @classmethod
    def load(cls, path: str, **settings: Any) -> "RewardModel":
        """Load a reward model and its tokenizer.

        Args:
            path: A folder or a hub id.
            settings: Arguments of `RewardModel`.

        Returns:
            The reward model.

        Raises:
            ValueError: It cannot be loaded, or for the reasons of `RewardModel`.
        """
        code = settings.get("trust_remote_code", False)
        with loading(path, "reward model"):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, trust_remote_code=code, output_loading_info=True
            )
        if info["missing_keys"]:  # transformers makes them at random, another time others
            lacking = ", ".join(sorted(info["missing_keys"]))
            raise ValueError(
                f"reward_funcs: {path} is no reward model, for its files lack {lacking}; name a sequence "
                "classifier with one label, or prm: in front of a process reward model"
            )
        return cls(model, **settings)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float | None]:
        """Judge completions.

        Args:
            prompts: Texts, or lists of messages.
            completions: The same kind, one for each prompt.
            columns: What else reward functions get.

        Returns:
            The model's logit for each completion after its prompt; None where both together are longer than the model
            can read.

        Raises:
            ValueError: The prompts are messages, and the tokenizer has no chat template.
        """
        texts = self._texts(prompts, completions)

        def read(inputs, indices):
            return self.model(**inputs).logits[:, 0].float().tolist()

        # An encoder reads [CLS] TEXT [SEP]; the template of a chat writes what other models need.
        special = bool(texts) and self._lacks_first(texts[0])
        return self._judged(self.tokenizer(text=texts, add_special_tokens=special)["input_ids"] if texts else [], read)

    def _texts(self, prompts, completions):
        """Return prompt and completion of each as one text."""
        if prompts and isinstance(prompts[0], list):
            if self.tokenizer.chat_template is None:
                raise ValueError(
                    f"the prompts are lists of messages, and the tokenizer of the reward model {self.__name__} has no "
                    "chat template; pass one that has as reward_processing_classes"
                )
            return [
                self.tokenizer.apply_chat_template(prompt + completion, tokenize=False, **self.template)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
        return [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
