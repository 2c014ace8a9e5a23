"""Settings in sections, each a group of `--help` and a table of docs/settings.md. Commands compose those they need.

Many settings of the learning signal are also fields of `fastgrpo.Objective`, under the same names.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from fastgrpo.config.fields import (
    Count,
    Keywords,
    NotNegative,
    Positive,
    Seed,
    Several,
    Share,
    Size,
    Temperature,
    Whole,
    each_of,
    keywords,
    settings_class,
)  # fmt: skip
from fastgrpo.kernels.objectives import LOSS_TYPES

# A magnitude that fp32 holds. Reward functions are held to it, too: fp64 then holds the squares of weighted rewards.
LARGEST_REWARD = 3.4e38
REWARD_ERRORS = ("raise", "skip")
POOL_WORKERS = 8  # processes of a pool for rewards where their number is not stated, at most
PRM_AGGREGATIONS = ("min", "mean", "last", "product")
HUB_DATA = {"gsm8k": "openai/gsm8k"}  # a task -> the data set on the hub that it reads where dataset_name is None
_ENGINE = "fastgrpo.rollout.engine.RolloutEngine"
# The name of each rollout backend, and the class that it stands for: `fastgrpo.rollout.make_backend` imports it.
ROLLOUT_BACKENDS = {"fast": _ENGINE, "eager": _ENGINE, "hf": "fastgrpo.rollout.hf.HFBackend"}


@settings_class
class LoadingConfig:
    """How a model is loaded."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model's weights, beside which the optimizer keeps float32 masters; auto is bfloat16 on a GPU and
    float32 on a CPU. On a CPU with avx512_bf16 or AMX (see lscpu), bfloat16 is faster for models of 100M parameters and
    more; on others it is slower."""
    device: str = "auto"
    """Device that the model runs on: cuda, cuda:1, cpu, or auto, which is the GPU if there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. When False, a model that needs its own code is refused."""


@settings_class
class PromptConfig:
    """Which prompts are completed."""

    task: str = "arithmetic"
    """Where prompts and rewards come from: arithmetic (the embedded example), countdown, pizza, bandit or code, which
    need no files; gsm8k; sums (sums and differences in GSM8K's template); or dataset (any rows with a `prompt` column;
    --reward_funcs names the rewards)."""
    system_prompt: str | None = None
    """System prompt to use in place of the task's own."""
    chat_template_kwargs: Keywords | None = None
    """Keyword arguments of the tokenizer's chat template, as a dictionary or its JSON text, for example
    {"enable_thinking": false}."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the chat template by name."""
        return keywords("chat_template_kwargs", self.chat_template_kwargs)


@settings_class
class DatasetConfig:
    """Which data set is read. TRL's ScriptArguments have the same settings, so `GRPOConfig` has not."""

    dataset_name: str | None = None
    """Data set to read: a hub id, a .jsonl file, or a folder with SPLIT.jsonl files. None is the task's own."""
    dataset_config: str | None = None
    """Configuration name of a data set of the hub."""
    dataset_test_split: str = "test"
    """Split of the data set whose prompts are held out for evaluation."""


@settings_class
class TokenFilterConfig:
    """Which tokens a draw may choose from."""

    top_p: Share = 1.0
    """Draw from the smallest set of tokens that holds this much probability; 1 turns it off."""
    top_k: Size = 0
    """Draw from this many of the likeliest tokens; 0 turns it off."""


@settings_class
class CompletionConfig:
    """How long a completion may grow, and which seed random choices follow."""

    max_completion_length: Count = 512
    """Largest number of tokens of a completion; one that reaches this length is truncated."""
    seed: Seed = 42
    """Seed of the draws, of the data's order, of the task's own model, and of the global generators of Python, NumPy
    and torch."""


@settings_class
class EngineConfig:
    """Which backend draws completions, and how much of the machine it takes."""

    max_num_seqs: Count = 256
    """Largest number of completions that are drawn at the same time (lanes); further ones wait for a free lane."""
    rollout_backend: Literal["fast", "eager", "hf"] = "fast"
    """Backend that draws completions: fast is this package's engine; eager is the engine without CUDA graphs, which is
    slower and takes less memory; hf is transformers' generate, which is slower still and takes models that the engine
    refuses."""
    rollout_memory_utilization: Share = 0.7
    """Share that the keys and values of rollouts may take of the device's memory that is left after everything else
    (weights, gradients, optimizer, head, activations)."""


@settings_class
class JudgingConfig:
    """Which functions judge a completion, and where they run."""

    reward_funcs: Several[str] = ()
    """Rewards: names of the task's own functions; module:function for any other; the folder or hub id of a reward
    model, with prm: before it for a process reward model; http://HOST:PORT/PATH for a server; sandbox:python or
    sandbox:python-all, which run the program of a completion against the column tests. The first one decides the
    accuracy. If none is named, all of the task's own functions are used."""
    reward_model_kwargs: Keywords | None = None
    """Arguments of reward models, as a dictionary or its JSON text, for example {"device": "cuda:1"}: the device (the
    policy's if not given), and for process reward models separator, aggregation, step_tag, good_token and bad_token.
    Weights are bfloat16 on a GPU and float32 on a CPU."""
    reward_timeout: Positive | None = None
    """Seconds that a reward function may take for one completion. The functions then run in separate processes; a call
    that takes longer is killed, and its reward becomes None. For a server it limits one try of a request, and for the
    sandbox all tests of a completion. None sets no limit."""

    @property
    def prm(self) -> dict[str, Any]:
        """The arguments of process reward models by name."""
        return {name: value for name, value in self._models.items() if name != "device"}

    @property
    def reward_device(self) -> str:
        """Device of reward models: cuda, cuda:1, cpu, or auto (the policy's device)."""
        return self._models.get("device", "auto")

    @property
    def _models(self):
        return keywords("reward_model_kwargs", self.reward_model_kwargs)


@settings_class
class RewardConfig(JudgingConfig):
    """What happens where a completion cannot be judged, and how many are judged at the same time."""

    reward_errors: Literal["raise", "skip"] = "raise"
    """What happens when a reward function fails: raise ends the run; skip sets the reward to None and counts the
    failure in the metrics."""
    reward_workers: Size | None = None
    """Number of processes that judge completions on each rank, also while others are still drawn; 0 judges in the
    trainer's own process. None is 0 without reward_timeout, and otherwise the number of cores, at most 8."""


@settings_class
class EvaluationConfig:
    """What is measured on held-out prompts."""

    max_eval_samples: Count | None = 500
    """Number of held-out prompts to evaluate on, the first ones of the data set. None evaluates on all of them."""
    eval_num_generations: Size = 0
    """Number of completions to draw for each held-out prompt as training draws them, which give pass@k and maj@k. The
    accuracy always comes from one greedy completion; 0 draws no others."""


@settings_class
class OutputConfig:
    """What a command prints."""

    quiet: bool = False
    """Print nothing but warnings, errors and results: the last line of a run, which names its folder, and the table of
    an evaluation."""


@settings_class
class ModelConfig:
    """Which policy is trained, and which of its weights."""

    model_name_or_path: str | None = None
    """Folder, hub id or GGUF file of the causal LM to train. None is the task's own small model, if it has one."""
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
class TrainSplitConfig:
    """Which split of the data set is learned from."""

    dataset_train_split: str = "train"
    """Split of the data set whose prompts are trained on."""


@settings_class
class OrderConfig:
    """In what order prompts come."""

    shuffle_dataset: bool = True
    """Draw the prompts in a new random order in every epoch."""


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
    dynamic_sampling: Size = 0
    """Largest number of batches of prompts that a step draws to replace groups whose rewards are all equal, which teach
    nothing (DAPO, arXiv 2503.14476, draws up to 10). If groups are still missing then, the first of the dropped groups
    are used after all. 0 turns it off."""
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
    """Skip entries of the vocabulary in the head's backward pass that hold at most this share of the probability
    besides the drawn token. At most this share of the gradient by the token's logits is lost. 0 is exact; with 0.01 a
    model of 49,152 tokens kept about a quarter of them."""


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
    """Weight decay of AdamW, which only acts on matrices."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's first moment, the mean of the gradient."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of AdamW's second moment, the mean of the squared gradient."""
    adam_epsilon: Positive = 1e-08
    """Number that AdamW adds to the root of the second moment."""
    max_tokens_per_microbatch: Count = 16384
    """Largest number of tokens of one forward and backward pass. Memory grows with it; the result does not depend on
    it."""

    @property
    def schedule_kwargs(self) -> dict[str, Any]:
        """The further arguments of the schedule by name."""
        return keywords("lr_scheduler_kwargs", self.lr_scheduler_kwargs)


@settings_class
class SamplesConfig:
    """What a run keeps of the completions that it draws."""

    log_completions: bool = False
    """Keep all completions of each logged step in samples.jsonl, where False keeps whole groups of up to 64. True also
    shows them as a table in the terminal and in the trackers of report_to that have tables, and writes them to
    completions/completions_STEP.parquet."""
    num_completions_to_print: Count | None = None
    """Largest number of completions in the terminal's table. None shows all of them."""


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
    """Number of steps between two evaluations on held-out prompts. The end of a run is always evaluated, and the start
    unless eval_on_start is False; None evaluates only there."""
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
    profile: Size = 0
    """Number of steps to time after two steps of warm-up; as many steps after them are traced. 0 turns it off."""
    report_to: each_of("none", "tensorboard", "wandb", "trackio") = ("none",)
    """Where metrics are sent in addition to metrics.jsonl, by the names of TRL's trainers."""
    run_name: str | None = None
    """Name of the run in W&B and trackio, which gets a number behind it. None is the name of the run's folder."""
    project: str = "huggingface"
    """Project of the run in trackio, and in W&B if WANDB_PROJECT is not set."""
    push_to_hub: bool = False
    """Upload the trained model to the Hugging Face hub."""
    hub_model_id: str | None = None
    """Repository of the hub to upload to, as NAME or OWNER/NAME. None is the name of the run's folder."""
    hub_private_repo: bool | None = None
    """Whether a repository that is made for the upload is private. None follows the owner's settings on the hub."""


@settings_class
class AdvantageConfig:
    """How the rewards of a group become advantages."""

    reward_weights: Several[Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]] = ()
    """Weights of the reward functions, one for each. If none is given, every weight is 1."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What a reward is divided by after its mean was subtracted: group is the standard deviation of its group, batch
    that of the whole batch, and none divides by nothing."""
    advantage_baseline: Literal["group", "leave_one_out"] = "group"
    """What is subtracted from a reward: group is the mean of its group, leave_one_out the mean of the other rewards of
    the group (RLOO)."""
    advantage_clip: Positive | None = None
    """Bound on the magnitude of an advantage. None sets no bound."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards are combined: sum_then_normalize standardizes their sum, normalize_then_sum standardizes each
    of them within its group before they are summed (GDPO)."""
    process_rewards: Literal["outcome", "token"] = "outcome"
    """What the step rewards that functions log become: token turns them into advantages of tokens (DeepSeekMath, arXiv
    2402.03300, section 4.1.3), which are added to the advantages by the other functions; outcome ignores them
    and uses the reward that the function returns."""
    soft_punish_cache: Size = 0
    """Number of tokens before max_completion_length over which an additional reward falls from 0 to -1 (DAPO's soft
    overlong punishment); 0 turns it off."""


@settings_class
class ObjectiveConfig:
    """Which loss is minimized."""

    loss_type: Literal[tuple(LOSS_TYPES)] = "dapo"
    """Surrogate and aggregation of the loss; docs/objectives.md has the formulas."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the ratio of policy to old policy: token gives each token its own ratio, sequence gives all tokens of a
    completion the geometric mean of their ratios (GSPO)."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        None
    )
    """Correction for top_k, top_p, min_p and repetition_penalty, which make the sampler differ from the policy: the
    loss without its KL is multiplied by the ratio of policy to sampler, of each token or of the whole sequence. A ratio
    outside of its bounds is moved to the nearest bound by the truncate modes and set to 0 by the mask modes. None
    corrects nothing."""
    importance_sampling_clip_max: Positive | None = 3.0
    """Upper bound of the ratio of policy to sampler. None sets no bound."""
    importance_sampling_clip_min: NotNegative | None = None
    """Lower bound of the ratio of policy to sampler. None sets no bound."""
    epsilon: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clipping range: losses with clipping keep the ratio of policy to old policy at 1 - epsilon or above."""
    epsilon_high: NotNegative | None = None
    """Upper clipping range: losses with clipping keep the ratio of policy to old policy at 1 + epsilon_high or below.
    None uses epsilon. cispo caps the ratio at epsilon_high itself, and needs a value of at least 1."""
    delta: Positive | None = None
    """Upper bound on the ratio where it is not clipped (two-sided clipping, arXiv 2505.07291). None sets no bound."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; 0 turns it off."""
    use_adaptive_entropy: bool = False
    """Let the coefficient of the entropy bonus follow the entropy (Skywork-OR1, arXiv 2505.22312): it begins at
    entropy_coef, moves by entropy_coef_delta after each update, up where the entropy was at or below entropy_target and
    down elsewhere, and is applied only after an update at or below it."""
    entropy_coef_min: float = 0.0
    """Smallest coefficient of an adaptive entropy bonus."""
    entropy_coef_max: float = 1.0
    """Largest coefficient of an adaptive entropy bonus."""
    entropy_coef_delta: NotNegative = 0.005
    """Number by which an update moves the coefficient of an adaptive entropy bonus."""
    entropy_target: NotNegative = 0.2
    """Mean entropy of a token, in nats, that an adaptive entropy bonus aims at, over the tokens that
    top_entropy_quantile keeps."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the tokens of an update whose surrogate and entropy bonus count: those of the highest entropy (arXiv
    2506.01939). 1 keeps all; less takes another forward pass in each update."""
    off_policy_mask_threshold: Positive | None = None
    """Largest mean of old minus new log-probs, in nats, of a completion with a negative advantage whose surrogate
    counts (DeepSeek-V3.2, arXiv 2512.02556). It takes another forward pass in updates after the first of a step. None
    sets no bound."""
    sapo_temperature_pos: Positive = 1.0
    """Temperature of SAPO's gate for tokens with a positive advantage."""
    sapo_temperature_neg: Positive = 1.05
    """Temperature of SAPO's gate for tokens with a negative advantage."""
    vespo_k_pos: NotNegative = 2.0
    """Power of VESPO's sequence weight for completions with a positive advantage."""
    vespo_lambda_pos: Positive = 3.0
    """Rate at which VESPO's sequence weight decays for completions with a positive advantage."""
    vespo_k_neg: NotNegative = 3.0
    """Power of VESPO's sequence weight for completions with a negative advantage."""
    vespo_lambda_neg: Positive = 2.0
    """Rate at which VESPO's sequence weight decays for completions with a negative advantage."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss. Their rewards still count in the mean and the deviation of their
    group, as in DAPO (arXiv 2503.14476, equation 9) and TRL."""


@settings_class
class ReferenceConfig:
    """How the policy is held near a reference."""

    beta: NotNegative = 0.0
    """Coefficient of the KL divergence from the reference; at 0 no reference is held in memory."""
    kl: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """KL divergence from the reference: k1, k2, k3 and abs estimate it from the tokens that were drawn, full sums over
    the whole vocabulary."""
    use_bias_correction_kl: bool = True
    """Multiply the KL divergence by the ratio of policy to old policy, so that its gradient is unbiased. It
    has no effect with kl=full, which is exact."""
    ref_storage: Literal["cpu", "int8", "nf4"] | None = None
    """How the reference is stored to take less memory: cpu keeps it in host memory and copies its layers to the GPU one
    by one; int8 and nf4 quantize its linear layers to a half and a quarter of bfloat16. None keeps a plain copy on the
    policy's device."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656)."""
    ref_model_sync_steps: Count = 512
    """Number of steps between two moves of the reference towards the policy."""
    ref_model_mixup_alpha: Share = 0.6
    """Weight of the policy when the reference moves towards it: the reference becomes ref_model_mixup_alpha * policy +
    (1 - ref_model_mixup_alpha) * reference."""


@settings_class
class ParallelConfig:
    """How the processes that torchrun starts share the work."""

    parallel: Literal["auto", "ddp", "fsdp2", "fsdp2_keep", "fsdp2_offload"] = "auto"
    """How several processes hold the policy: ddp keeps a whole copy in each, fsdp2 shards weights, gradients and
    optimizer over them. auto takes ddp if these fit one device, and else fsdp2. fsdp2_keep holds the gathered layers
    from the forward to the backward pass, which takes more memory and sends a third less; fsdp2_offload keeps the
    shards in host memory and updates them there."""
    ddp_timeout: Count = 1800
    """Seconds that a process waits for the others before the run ends with an error that names the missing ones."""
