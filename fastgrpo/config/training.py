"""Settings of training alone: the policy, the rollout of a step, the optimizer, and what a run leaves behind."""

from dataclasses import dataclass, replace
from typing import Any

from fastgrpo.config.fields import Interval, Keywords, When, documented, keywords, setting
from fastgrpo.config.sections import MIN_P, REPETITION_PENALTY
from fastgrpo.loss.interval import BACKWARD_TOLERANCE, TEMPERATURE

WITH_ADAPTERS = When("use_peft is True", lambda settings: settings.use_peft)
ON_GSM8K = When("task is gsm8k", lambda settings: settings.task == "gsm8k")
WITH_RESUME = When("resume_from_checkpoint is set", lambda settings: settings.resume_from_checkpoint is not None)
WITH_REFILLS = When("dynamic_sampling is True", lambda settings: settings.dynamic_sampling)
WITH_WARMUP = When(
    "lr_scheduler_type is not constant (constant_with_warmup is the one with a warmup)",
    lambda settings: settings.lr_scheduler_type != "constant",
)
BY_EPOCHS = When(
    "max_steps is -1 (a task's recipe may have set it: pass --max_steps -1)", lambda settings: settings.max_steps == -1
)
WITH_BEST = When("metric_for_best_model is set", lambda settings: settings.metric_for_best_model is not None)
RESUME_IGNORE = ("data", "model")  # what a resumed run may find changed
COUNT = Interval(at_least=1)


@documented
@dataclass(frozen=True)
class ModelConfig:
    """Which policy is trained, and which of its weights."""

    model_name_or_path: str | None = setting(
        None,
        "Folder, hub id or GGUF file of the causal LM to train. None is the task's own small model, where it has one.",
    )
    use_liger_kernel: bool | None = setting(
        None,
        "Use liger-kernel's fused norms, rotary embedding and SwiGLU in the policy and the reference. None uses them "
        "on a GPU where the package is installed.",
        resume="inexact",
    )
    gradient_checkpointing: bool | str = setting(
        "auto",
        "Recompute the layers in the backward pass, which takes less memory and about a third more time. auto does so "
        "on a CPU, and on a GPU unless the activations of all layers fit beside everything else.",
        choices=("auto", True, False),
        resume="inexact",
    )
    use_peft: bool = setting(
        False,
        "Train low-rank adapters (LoRA, without dropout) in a frozen model; the reference then takes no memory.",
    )
    lora_r: int = setting(
        16, "Rank of LoRA's adapters: the inner width of their two factors.", within=COUNT, active=WITH_ADAPTERS
    )
    lora_alpha: int = setting(
        32, "The adapters' output is multiplied by lora_alpha / lora_r.", within=COUNT, active=WITH_ADAPTERS
    )
    lora_target_modules: tuple[str, ...] = setting(
        (),
        "Linear layers that get an adapter: their names, or all-linear. Empty is peft's choice for the architecture.",
        active=WITH_ADAPTERS,
    )


@documented
@dataclass(frozen=True)
class TrainingDataConfig:
    """Which prompts are trained on, and in what order."""

    dataset_train_split: str = setting("train", "Split of the data set whose prompts are trained on.")
    shuffle_dataset: bool = setting(True, "Draw the prompts in a new random order in every epoch.")


@documented
@dataclass(frozen=True)
class CurriculumConfig:
    """Whether easier prompts come first."""

    curriculum_iters: int = setting(
        0,
        "Draw plain sums in the task's template for this many steps before its own problems; 0 turns it off.",
        within=Interval(at_least=0),
        active=ON_GSM8K,
    )


@documented
@dataclass(frozen=True)
class RolloutConfig:
    """How the completions of a step are drawn."""

    prompts_per_step: int = setting(
        8, "Number of prompts of a step; the completions of each make up one group.", within=COUNT
    )
    num_generations: int = setting(
        8, "Number of completions of each prompt: the group size G.", within=Interval(at_least=2)
    )
    temperature: float = setting(
        1.0,
        "Temperature at which completions are drawn and every log-prob is computed.",
        within=replace(TEMPERATURE, why="the completions of a greedy group are all the same"),
    )
    min_p: float | None = setting(
        None,
        "Never draw a token whose probability is below this share of the likeliest token's. None turns it off.",
        within=MIN_P,
    )
    repetition_penalty: float = setting(
        1.0,
        "Divide the positive logits of tokens that the prompt or the completion holds already by this number, and "
        "multiply the negative ones by it, before a token is drawn; 1 turns it off.",
        within=REPETITION_PENALTY,
    )
    dynamic_sampling: bool = setting(
        False,
        "Drop groups whose rewards are all equal, which teach nothing, and draw new prompts in their place, batch "
        "after batch (DAPO, arXiv 2503.14476).",
    )
    max_num_gen_batches: int = setting(
        10,
        "Largest number of batches of prompts that a step draws. If groups are still missing then, the first of the "
        "dropped groups are used after all.",
        within=COUNT,
        active=WITH_REFILLS,
    )
    oversampling_factor: float = setting(
        1.0,
        "Start this many times as many groups as a step needs, and abort those that finish last. This favours short "
        "completions; 1 turns it off.",
        within=Interval(at_least=1),
    )


@documented
@dataclass(frozen=True)
class UpdatesConfig:
    """How the completions of a step are learned from."""

    updates_per_rollout: int = setting(
        1, "Number of minibatches that the groups of a rollout are split into; each makes one update.", within=COUNT
    )
    num_iterations: int = setting(1, "Number of passes over the completions of a rollout (mu in GRPO).", within=COUNT)
    head_backward_tolerance: float = setting(
        0.0,
        "Largest share of a token's gradient by its logits that the head's backward pass may leave out, by leaving out "
        "entries of the vocabulary that hold at most this share of the probability beside the token drawn. 0 is exact; "
        "with 0.01 a model of 49,152 tokens kept about a quarter of them (docs/measurements.md).",
        within=BACKWARD_TOLERANCE,
    )


@documented
@dataclass(frozen=True)
class OptimizerConfig:
    """How long the policy is trained, and how its weights move."""

    max_steps: int = setting(
        -1,
        "Number of steps of the run, each with one rollout; -1 makes num_train_epochs passes over the prompts.",
        within=Interval(at_least=-1),
        resume="inexact",
    )
    num_train_epochs: float = setting(
        3.0,
        "Number of passes over the prompts that make up the run; it may be a fraction.",
        within=Interval(above=0, at_most=10**6),
        active=BY_EPOCHS,
        resume="inexact",
    )
    learning_rate: float = setting(1e-6, "Learning rate of AdamW after the warmup.", within=Interval(above=0))
    lr_scheduler_type: str = setting(
        "linear",
        "How the learning rate moves after the warmup: any schedule of transformers that needs no metric, such as "
        "linear, cosine, constant or constant_with_warmup.",
    )
    lr_scheduler_kwargs: Keywords | None = setting(
        None,
        "Further arguments of the schedule, as a dictionary or its JSON text, for example "
        '{"min_lr_rate": 0.1} for cosine_with_min_lr.',
    )
    warmup_steps: float = setting(
        0,
        "Number of updates over which the learning rate rises linearly from 0. A number below 1 stands for a share of "
        "all updates.",
        within=Interval(at_least=0),
        active=WITH_WARMUP,
    )
    max_grad_norm: float = setting(
        1.0,
        "Largest norm of the gradient; a longer gradient is scaled down to it. 0 turns it off.",
        within=Interval(at_least=0),
    )
    weight_decay: float = setting(
        0.0, "Weight decay of AdamW, which acts on matrices alone.", within=Interval(at_least=0)
    )
    adam_beta1: float = setting(
        0.9, "Decay rate of AdamW's first moment, the mean of the gradient.", within=Interval(at_least=0, below=1)
    )
    adam_beta2: float = setting(
        0.999,
        "Decay rate of AdamW's second moment, the mean of the squared gradient.",
        within=Interval(at_least=0, below=1),
    )
    adam_epsilon: float = setting(
        1e-8, "Number that AdamW adds to the root of the second moment.", within=Interval(above=0)
    )
    max_tokens_per_microbatch: int = setting(
        16384,
        "Largest number of tokens of one forward and backward pass. Memory grows with it; the result does not "
        "depend on it.",
        within=COUNT,
        resume="inexact",
    )
    share_prompt: bool = setting(
        True,
        "Compute the prompt once for all of its completions in forward and backward passes. The result does not depend "
        "on it.",
        resume="inexact",
    )

    @property
    def schedule_kwargs(self) -> dict[str, Any]:
        """The further arguments of the schedule by name."""
        return keywords("lr_scheduler_kwargs", self.lr_scheduler_kwargs)


@documented
@dataclass(frozen=True)
class SamplesConfig:
    """What a run keeps of the completions that it draws."""

    logging_samples: int = setting(
        64,
        "Largest number of completions that samples.jsonl keeps of a logged step: whole groups, evenly spread over the "
        "step's; one group in any case.",
        within=COUNT,
        resume="free",
    )
    log_completions: bool = setting(
        False,
        "Show the completions that samples.jsonl keeps of each logged step as a table in the terminal and to the "
        "trackers of report_to that have tables, and write them to completions/completions_STEP.parquet.",
        resume="free",
    )
    num_completions_to_print: int | None = setting(
        None,
        "Largest number of completions in the terminal's table. None shows all that are kept.",
        within=COUNT,
        active=When("log_completions is True", lambda settings: settings.log_completions),
        resume="free",
    )


@documented
@dataclass(frozen=True)
class RunConfig:
    """What a run writes, how often it does so, and from which checkpoint it continues."""

    output_dir: str | None = setting(
        None, "Folder of the run. None makes a new numbered folder runs/TASK-N.", resume="free"
    )
    overwrite_output_dir: bool = setting(
        False, "Delete what an earlier run left in output_dir before this one begins.", resume="free"
    )
    logging_steps: int = setting(
        10, "Number of steps whose metrics are averaged into one line of metrics.jsonl.", within=COUNT, resume="free"
    )
    logging_first_step: bool = setting(False, "Write a line of metrics.jsonl after the first step, too.", resume="free")
    disable_tqdm: bool = setting(False, "Show no progress bars.", resume="free")
    eval_steps: int | None = setting(
        None,
        "Number of steps between two evaluations on held-out prompts. The start of a run is evaluated unless "
        "eval_on_start is False, the end in any case, and None evaluates only there.",
        within=COUNT,
        resume="free",
    )
    eval_on_start: bool = setting(True, "Evaluate on held-out prompts before the first step.", resume="free")
    save_steps: int | None = setting(
        500,
        "Number of steps between two checkpoints. One is also saved after the last step, and on SIGINT and SIGTERM; "
        "None saves only then.",
        within=COUNT,
        resume="free",
    )
    save_total_limit: int | None = setting(
        None,
        "Largest number of checkpoints to keep: first the newest and the best one, then the next newest ones. None "
        "keeps all of them.",
        within=COUNT,
        resume="free",
    )
    metric_for_best_model: str | None = setting(
        None,
        "Metric that decides which checkpoint is the best one, for example eval/accuracy. None marks no checkpoint as "
        "the best.",
        resume="free",
    )
    greater_is_better: bool | None = setting(
        None,
        "Whether a larger metric_for_best_model is better. None means that it is, unless its name ends in loss.",
        active=WITH_BEST,
        resume="free",
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "Checkpoint to continue from: the path of a checkpoint, or auto, which takes the newest intact one in "
        "output_dir and starts a new run if there is none.",
        resume="free",
    )
    resume_ignore: tuple[str, ...] = setting(
        (),
        "What a resumed run may find changed since its checkpoint, with a warning in place of an error: data are the "
        "rows of the training data, model are the weights at model_name_or_path.",
        choices=RESUME_IGNORE,
        active=WITH_RESUME,
        resume="free",
    )
    profile: int = setting(
        0,
        "Number of steps to time after two steps of warm-up; as many steps after them are traced. 0 turns it off.",
        within=Interval(at_least=0),
        resume="free",
    )
    report_to: tuple[str, ...] = setting(
        ("none",),
        "Where metrics are sent in addition to metrics.jsonl, by the names of TRL's trainers.",
        choices=("none", "tensorboard", "wandb", "trackio"),
        resume="free",
    )
    run_name: str | None = setting(
        None,
        "Name of the run in W&B and trackio, which gets a number behind it. None is the name of the run's folder.",
        resume="free",
    )
    project: str = setting(
        "huggingface",
        "Project of the run in trackio, and in W&B where WANDB_PROJECT is not set.",
        active=When(
            "report_to has wandb or trackio", lambda settings: {"wandb", "trackio"} & {*settings.report_to} != set()
        ),
        resume="free",
    )
    push_to_hub: bool = setting(False, "Upload the trained model to the Hugging Face hub.", resume="free")
    hub_model_id: str | None = setting(
        None,
        "Repository of the hub to upload to, as NAME or OWNER/NAME. None is the name of the run's folder.",
        resume="free",
    )
    hub_private_repo: bool | None = setting(
        None,
        "Whether a repository that is made for the upload is private. None follows the owner's settings on the hub.",
        resume="free",
    )
