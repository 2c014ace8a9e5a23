"""One GRPO step after another: prompts -> rollouts -> rewards -> advantages -> updates."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import Completion, Stateful, Step
from fastgrpo.data.sources import Source
from fastgrpo.data.token_text import TokenText
from fastgrpo.policy.reference import make_reference
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Rewards, rewards_settings
from fastgrpo.rewards.finding import found, prm_options
from fastgrpo.rewards.overlong import shaping
from fastgrpo.run.curves import PANELS, Panel
from fastgrpo.run.log import RunLog
from fastgrpo.trainer.base import Trainer
from fastgrpo.trainer.collect import Experience, ExperienceMaker, logged_groups, sample_rows, to_sample
from fastgrpo.trainer.given import advice, refuse_given, refuse_images
from fastgrpo.trainer.update import AdaptiveEntropy, GRPOUpdate, Updated

Reward = Callable | PreTrainedModel | str


class GRPOTrainer(Trainer):
    """Trains a causal LM by GRPO, under TRL's names.

    Args:
        model: A folder, hub id or GGUF file, or a transformers causal LM, which is trained in place, or peft's
            `PeftModel` of one, whose adapters are trained.
        reward_funcs: A reward or a list of them: a function `f(prompts, completions, **columns) -> list[float | None]`
            (see `Rewards`), a model of sequence classification with one label, or a name: the folder or hub id
            (ORG/MODEL) of such a model, prm: with that of a process reward model, or module:function.
        args: The settings; None for the defaults.
        train_dataset: Rows with a `prompt` column (a list of dicts, a datasets.Dataset, a pandas.DataFrame), or a
            `Source` of them. An IterableDataset is read as far as the max_steps of the run can need. All rows are
            checked here.
        eval_dataset: Held-out rows, or a dict of them by name, which are checked here too, or None for no evaluation.
            Of an IterableDataset max_eval_samples rows are read.
        processing_class: The tokenizer; None loads the model's.
        reward_processing_classes: The tokenizers of reward models, one for each of reward_funcs; None, also in the
            list, loads the model's.
        callbacks: Callbacks of transformers, as instances or classes.
        optimizers: TRL's name for an optimizer and a scheduler, which are refused.
        quantization_config: TRL's name for a quantized model, which is refused.
        peft_config: A `peft.LoraConfig`, which stands for the settings use_peft, lora_r, lora_alpha and
            lora_target_modules.
        tools: TRL's name for functions that the model calls, which are refused.
        rollout_func: TRL's name for a function that draws, which is refused.
        environment_factory: TRL's name for environments, which are refused.
        log: A `RunLog` that has claimed its folder already. None makes one from args.
        panels: What the picture of the run shows.

    Raises:
        ValueError: An argument or a setting cannot be used; the message names it and the remedy.
    """

    config_class, title = GRPOConfig, "GRPO"
    shown: ClassVar = {"reward": "reward", "accuracy": "accuracy", "kl": "kl", "length": "completions/mean_length"}

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Source | Iterable[dict] | None = None,
        eval_dataset: Iterable[dict] | Mapping[str, Iterable[dict]] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        log: RunLog | None = None,
        panels: Sequence[Panel] = PANELS,
    ):
        refuse_given(
            optimizers,
            quantization_config=quantization_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.tokenizers_of_rewards = reward_processing_classes
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, log, panels, callbacks,
            peft_config,
        )  # fmt: skip

    @property
    def reward_funcs(self) -> list[Callable]:
        """The rewards as functions; a reward model is a `RewardModel`."""
        return self.rewards.functions[: self.rewards.judges]

    @property
    def reward_processing_classes(self) -> list[PreTrainedTokenizerBase | None]:
        """The tokenizer of each reward model, and None for each function."""
        return [getattr(function, "tokenizer", None) for function in self.reward_funcs]

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The frozen reference; None at beta 0, and where the reference is the policy without its adapters."""
        apart = self.reference is not None and self.reference.policy is not self.policy
        return self.reference.policy.module if apart else None

    def _make_rewards(self, reward_funcs):
        template, code = self.args.template_kwargs, self.args.trust_remote_code
        functions = found(
            reward_funcs, self.tokenizers_of_rewards, template, code, prm_options(self.args, reward_funcs)
        )
        return Rewards(functions, self.args.reward_weights, shaping=shaping(self.args), **rewards_settings(self.args))

    def _check_rows(self, train_rows):
        for rows in (train_rows, *self.held_out.values()):
            refuse_images(rows)
        super()._check_rows(train_rows)

    def _advice(self):
        return advice(self.args)

    def _prepare(self):
        args = self.args
        self.sampling = dataclasses.replace(
            self.sampling,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )
        self.make_experience = ExperienceMaker(
            self.source, self.tokenizer, self.engine, self.rewards, self.sampling, args, self.timer, self.ranks
        )
        self.reference = make_reference(
            self.policy, args.beta, device=args.ref_device, quantization=args.ref_quantization,
            moving=args.sync_ref_model,
        )  # fmt: skip
        self.token_text = TokenText(self.tokenizer)
        self.entropy = AdaptiveEntropy(args) if args.use_adaptive_entropy else None
        self.update = GRPOUpdate(
            self.policy,
            self.reference,
            self.updater,
            args.objective,
            temperature=args.temperature,
            updates_per_rollout=args.updates_per_rollout,
            num_iterations=args.num_iterations,
            top_entropy_quantile=args.top_entropy_quantile,
            off_policy_mask_threshold=args.off_policy_mask_threshold,
            entropy=self.entropy,
            backward_tolerance=args.head_backward_tolerance,
        )

    def parts(self) -> dict[str, Stateful]:
        """Return the parts of the run that have state, by the names that a checkpoint gives them."""
        by_steps = self.args.process_rewards == "token"
        own = {
            "reference": self.reference,
            "entropy": self.entropy,
            "experience": self.make_experience if by_steps else None,
        }
        return super().parts() | {name: part for name, part in own.items() if part is not None}

    def _most_rows(self):
        args, most = self.args, super()._most_rows()
        batches = args.max_num_gen_batches if args.dynamic_sampling else 1
        return most and args.max_steps * batches * args.oversampled(args.prompts_per_step)

    def _step(self, step, logged):
        experience = self.make_experience(self.state)
        corrected = self.args.importance_sampling_mode is not None
        samples = [[to_sample(experience.completions[i], i, corrected) for i in group] for group in experience.trained]
        updated = self.update(samples, with_entropy=logged)
        if self.args.sync_ref_model and step % self.args.ref_model_sync_steps == 0:
            self.reference.sync(self.policy, self.args.ref_model_mixup_alpha)
        values = updated.metrics | experience.metrics | self.source.metrics()
        news = self.source.observe(values["accuracy"])
        if news:
            self.log.say(f"step {step}: {news}")
        if logged:
            self._log_samples(step, experience, updated)
        tokens = sum(len(completion.rollout.ids) for completion in experience.completions)
        return Step(values, updated.norms, experience.taken, tokens, experience.num_tokens)

    def _log_samples(self, step, experience, updated):
        """Write the completions of some groups to samples.jsonl, and show them where log_completions asks for it."""
        size = self.args.num_generations
        groups = logged_groups(len(experience.completions) // size, size, self.args.logging_samples)
        indices = (group * size + i for group in groups for i in range(size))
        completions = with_ratios(experience, updated, indices, self.ranks)
        if self.ranks.lead:
            rows = list(sample_rows(step, completions, size, groups, self.token_text))
            self.log.samples(rows)
            if self.args.log_completions:
                self.log.completions(step, rows, self.args.num_completions_to_print)


def with_ratios(
    experience: Experience, updated: Updated, indices: Iterable[int], ranks: Ranks = ALONE
) -> list[Completion]:
    """Note in completions that were trained on which ratios the last update saw."""
    completions, needed = list(experience.completions), {*indices}
    mine = {
        sample.index: (sample.ratios.tolist(), sample.clipped.nonzero()[:, 0].tolist())
        for sample in updated.samples
        if sample.ratios is not None and sample.index in needed
    }
    for known in ranks.gather(mine, "the ratios of the samples that are logged"):
        for index, (ratios, clipped) in known.items():
            completions[index] = dataclasses.replace(completions[index], ratios=ratios, clipped=clipped)
    return completions
