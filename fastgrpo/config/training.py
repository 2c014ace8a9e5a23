"""Settings of training alone: the policy, the rollout of a step, the optimizer, and what a run leaves behind."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fastgrpo.config.fields import (
    Count,
    Keywords,
    NotNegative,
    Positive,
    Several,
    Size,
    Temperature,
    Whole,
    each_of,
    keywords,
    settings_class,
)


@settings_class
class ModelConfig:
    """Which policy is trained, and which of its weights."""

    model_name_or_path: str | None = None
    """Folder, hub id or GGUF file of the causal LM to train. None is the task's own small model, where it has one."""
    use_liger_kernel: bool | None = None
    """Use liger-kernel's fused norms, rotary embedding and SwiGLU in the policy and the reference. None uses them on a
    GPU where the package is installed."""
    gradient_checkpointing: Literal["auto", True, False] = "auto"
    """Recompute the layers in the backward pass, which takes less memory and about a third more time. auto does so on a
    CPU, and on a GPU unless the activations of all layers fit beside everything else."""
    use_peft: bool = False
    """Train low-rank adapters (LoRA, without dropout) in a frozen model; the reference then takes no memory."""
    lora_r: Count = 16
    """Rank of LoRA's adapters: the inner width of their two factors."""
    lora_alpha: Count = 32
    """The adapters' output is multiplied by lora_alpha / lora_r."""
    lora_target_modules: Several[str] = ()
    """Linear layers that get an adapter: their names, or all-linear. Empty is peft's choice for the architecture."""


@settings_class
class TrainingDataConfig:
    """Which prompts are trained on, and in what order."""

    dataset_train_split: str = "train"
    """Split of the data set whose prompts are trained on."""
    shuffle_dataset: bool = True
    """Draw the prompts in a new random order in every epoch."""


@settings_class
class CurriculumConfig:
    """Whether easier prompts come first."""

    curriculum_iters: Size = 0
    """Draw plain sums in the task's template for this many steps before its own problems; 0 turns it off."""


@settings_class
class RolloutConfig:
    """How the completions of a step are drawn."""

    prompts_per_step: Count = 8
    """Number of prompts of a step; the completions of each make up one group."""
    num_generations: Annotated[Whole, Field(ge=2)] = 8
    """Number of completions of each prompt: the group size G."""
    temperature: Temperature = 1.0
    """Temperature at which completions are drawn and every log-prob is computed."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Never draw a token whose probability is below this share of the likeliest token's. None turns it off."""
    repetition_penalty: Positive = 1.0
    """Divide the positive logits of tokens that the prompt or the completion holds already by this number, and multiply
    the negative ones by it, before a token is drawn; 1 turns it off."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, which teach nothing, and draw new prompts in their place, batch after
    batch (DAPO, arXiv 2503.14476)."""
    max_num_gen_batches: Count = 10
    """Largest number of batches of prompts that a step draws. If groups are still missing then, the first of the
    dropped groups are used after all."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Start this many times as many groups as a step needs, and abort those that finish last. This favours short
    completions; 1 turns it off."""


@settings_class
class UpdatesConfig:
    """How the completions of a step are learned from."""

    updates_per_rollout: Count = 1
    """Number of minibatches that the groups of a rollout are split into; each makes one update."""
    num_iterations: Count = 1
    """Number of passes over the completions of a rollout (mu in GRPO)."""
    head_backward_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest share of a token's gradient by its logits that the head's backward pass may leave out, by leaving out
    entries of the vocabulary that hold at most this share of the probability beside the token drawn. 0 is exact; with
    0.01 a model of 49,152 tokens kept about a quarter of them (docs/measurements.md)."""


@settings_class
class OptimizerConfig:
    """How long the policy is trained, and how its weights move."""

    max_steps: Annotated[Whole, Field(ge=-1)] = -1
    """Number of steps of the run, each with one rollout; -1 makes num_train_epochs passes over the prompts."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10**6)] = 3.0
    """Number of passes over the prompts that make up the run; it may be a fraction."""
    learning_rate: Positive = 1e-06
    """Learning rate of AdamW after the warmup."""
    lr_scheduler_type: str = "linear"
    """How the learning rate moves after the warmup: any schedule of transformers that needs no metric, such as linear,
    cosine, constant or constant_with_warmup."""
    lr_scheduler_kwargs: Keywords | None = None
    """Further arguments of the schedule, as a dictionary or its JSON text, for example {"min_lr_rate": 0.1} for
    cosine_with_min_lr."""
    warmup_steps: NotNegative = 0
    """Number of updates over which the learning rate rises linearly from 0. A number below 1 stands for a share of all
    updates."""
    max_grad_norm: NotNegative = 1.0
    """Largest norm of the gradient; a longer gradient is scaled down to it. 0 turns it off."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW, which acts on matrices alone."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's first moment, the mean of the gradient."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of AdamW's second moment, the mean of the squared gradient."""
    adam_epsilon: Positive = 1e-08
    """Number that AdamW adds to the root of the second moment."""
    max_tokens_per_microbatch: Count = 16384
    """Largest number of tokens of one forward and backward pass. Memory grows with it; the result does not depend on
    it."""
    share_prompt: bool = True
    """Compute the prompt once for all of its completions in forward and backward passes. The result does not depend on
    it."""

    @property
    def schedule_kwargs(self) -> dict[str, Any]:
        """The further arguments of the schedule by name."""
        return keywords("lr_scheduler_kwargs", self.lr_scheduler_kwargs)


@settings_class
class SamplesConfig:
    """What a run keeps of the completions that it draws."""

    logging_samples: Count = 64
    """Largest number of completions that samples.jsonl keeps of a logged step: whole groups, evenly spread over the
    step's; one group in any case."""
    log_completions: bool = False
    """Show the completions that samples.jsonl keeps of each logged step as a table in the terminal and to the trackers
    of report_to that have tables, and write them to completions/completions_STEP.parquet."""
    num_completions_to_print: Count | None = None
    """Largest number of completions in the terminal's table. None shows all that are kept."""


@settings_class
class RunConfig:
    """What a run writes, how often it does so, and from which checkpoint it continues."""

    output_dir: str | None = None
    """Folder of the run. None makes a new numbered folder runs/TASK-N."""
    overwrite_output_dir: bool = False
    """Delete what an earlier run left in output_dir before this one begins."""
    logging_steps: Count = 10
    """Number of steps whose metrics are averaged into one line of metrics.jsonl."""
    logging_first_step: bool = False
    """Write a line of metrics.jsonl after the first step, too."""
    disable_tqdm: bool = False
    """Show no progress bars."""
    eval_steps: Count | None = None
    """Number of steps between two evaluations on held-out prompts. The start of a run is evaluated unless eval_on_start
    is False, the end in any case, and None evaluates only there."""
    eval_on_start: bool = True
    """Evaluate on held-out prompts before the first step."""
    save_steps: Count | None = 500
    """Number of steps between two checkpoints. One is also saved after the last step, and on SIGINT and SIGTERM; None
    saves only then."""
    save_total_limit: Count | None = None
    """Largest number of checkpoints to keep: first the newest and the best one, then the next newest ones. None keeps
    all of them."""
    metric_for_best_model: str | None = None
    """Metric that decides which checkpoint is the best one, for example eval/accuracy. None marks no checkpoint as the
    best."""
    greater_is_better: bool | None = None
    """Whether a larger metric_for_best_model is better. None means that it is, unless its name ends in loss."""
    resume_from_checkpoint: str | None = None
    """Checkpoint to continue from: the path of a checkpoint, or auto, which takes the newest intact one in output_dir
    and starts a new run if there is none."""
    resume_ignore: each_of("data", "model") = ()
    """What a resumed run may find changed since its checkpoint, with a warning in place of an error: data are the rows
    of the training data, model are the weights at model_name_or_path."""
    profile: Size = 0
    """Number of steps to time after two steps of warm-up; as many steps after them are traced. 0 turns it off."""
    report_to: each_of("none", "tensorboard", "wandb", "trackio") = ("none",)
    """Where metrics are sent in addition to metrics.jsonl, by the names of TRL's trainers."""
    run_name: str | None = None
    """Name of the run in W&B and trackio, which gets a number behind it. None is the name of the run's folder."""
    project: str = "huggingface"
    """Project of the run in trackio, and in W&B where WANDB_PROJECT is not set."""
    push_to_hub: bool = False
    """Upload the trained model to the Hugging Face hub."""
    hub_model_id: str | None = None
    """Repository of the hub to upload to, as NAME or OWNER/NAME. None is the name of the run's folder."""
    hub_private_repo: bool | None = None
    """Whether a repository that is made for the upload is private. None follows the owner's settings on the hub."""
