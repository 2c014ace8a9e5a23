"""Sections of settings: each is a group of `--help` and a table of docs/settings.md. Commands combine sections.

Many settings of the loss are also fields of `fastgrpo.Objective`, under the same names.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fastgrpo.config.fields import (
    AutoCount,
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

# The largest magnitude of a reward or weight: fp64 then holds the squares of weighted rewards.
LARGEST_REWARD = 3.4e38
POOL_WORKERS = 8  # maximum default number of reward workers
PRM_AGGREGATIONS = ("min", "mean", "last", "product")
HUB_DATA = {"gsm8k": "openai/gsm8k"}  # task -> its data set on the hub if dataset_name is None


def _text(value):
    """Write a dictionary as JSON text."""
    return json.dumps(value) if isinstance(value, Mapping) else value


@settings_class
class LoadingConfig:
    """Loading of the model."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Store the model's weights in this precision; auto is bfloat16 on a GPU of compute capability 8.0 or later, else
    float32. The optimizer of bfloat16 weights keeps float32 masters. On a CPU, bfloat16 is faster only with
    avx512_bf16 or AMX (see lscpu), from about 100M parameters on."""
    device: str = "auto"
    """Run the model on this device: cuda, cuda:1, cpu, or auto (the GPU if there is one)."""
    load_in_4bit: bool = False
    """Store the weights of the linear layers in 4 bits (NF4 of bitsandbytes), except the LM head. Training needs
    use_peft: only the adapters change (QLoRA, arXiv 2305.14314)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. If False, a model that needs its own code raises an error."""


@settings_class
class TemplateConfig:
    """The chat template."""

    chat_template_kwargs: Keywords | None = None
    """Pass these arguments to the tokenizer's chat template: a dictionary or its JSON text, such as {"enable_thinking":
    false}."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the chat template."""
        return keywords("chat_template_kwargs", self.chat_template_kwargs)


@settings_class
class PromptConfig(TemplateConfig):
    """Prompts."""

    task: str = "arithmetic"
    """Take prompts and rewards from this task: arithmetic, countdown, pizza, bandit, code, calculator or treasure
    (built-in examples that need no files); gsm8k; sums (sums and differences with the prompt of gsm8k); reasoning_gym
    (generated problems); or dataset (your rows with a `prompt` column, and rewards from reward_funcs)."""
    reasoning_gym_tasks: Annotated[str, BeforeValidator(_text)] | None = None
    """Draw problems from these tasks of reasoning-gym, such as chain_sum:2,leg_counting, where 2 is a weight (default
    1). To pass arguments, use a dictionary or its JSON text: {"chain_sum": {"weight": 2, "max_terms": 3}}. The key
    `solved` sets how many solved problems come before each prompt."""
    system_prompt: str | None = None
    """Replace the task's system prompt by this text. None keeps it."""


@settings_class
class ToolsConfig:
    """Tools that the model calls while it generates a completion, and environments."""

    tools: Several[str] = ()
    """Let the model call these functions, module:function. Empty uses the task's tools, if any."""
    environment: str | None = None
    """Give each completion an instance of a class: module:Class, or module:DICT:NAME for one in a dict. Its public
    methods are tools. None uses the task's environment, if any."""
    max_tool_calling_iterations: Size | None = None
    """Run the tool calls of at most N turns of a completion. None sets no limit."""
    tool_timeout: Positive | None = 60.0
    """End a completion if a tool does not return within N seconds. None sets no limit."""


@settings_class
class DatasetConfig:
    """The data set. TRL has these settings in ScriptArguments, so `GRPOConfig` does not take them."""

    dataset_name: str | None = None
    """Read this data set: a hub id, a .jsonl file, or a folder of SPLIT.jsonl files. None reads the task's default data
    set."""
    dataset_config: str | None = None
    """Select this configuration of a data set on the hub."""


@settings_class
class TestSplitConfig:
    """The held-out split."""

    __test__ = False  # pytest takes the class for a test

    dataset_test_split: str = "test"
    """Read the held-out rows from this split."""


@settings_class
class TokenFilterConfig:
    """Filters of the sampler."""

    top_p: Share = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability; 1 turns it off."""
    top_k: Size = 0
    """Sample from the N most likely tokens; 0 turns it off."""


@settings_class
class CompletionConfig:
    """Length of completions, and the seed."""

    max_completion_length: Count = 512
    """Truncate completions after N tokens."""
    seed: Seed = 42
    """Seed the sampler, the order of the data, the initial weights of the task's small model, and the global generators
    of Python, NumPy and torch."""


@settings_class
class EngineConfig:
    """The rollout engine, and the memory that it uses."""

    max_num_seqs: AutoCount = None
    """Generate at most N completions at the same time. None (or auto) generates all completions of a step together, but
    at most 1,024 (256 with rollout_backend=hf), and no more than fit into memory."""
    rollout_backend: Literal["auto", "fast", "eager", "hf", "vllm"] = "auto"
    """Generate completions with this backend: fast is the engine of this package; eager is the same engine without CUDA
    graphs (slower, less memory); hf is transformers' generate (slowest); vllm sends requests to vLLM servers. auto is
    hf for models that the engine does not support, and fast for all others."""
    vllm_server_base_url: Several[str] = ("http://127.0.0.1:8000",)
    """Generate completions on the vLLM servers at these addresses, always on the least loaded."""
    vllm_server_timeout: Positive = 240.0
    """Allow N seconds without an answer from any vLLM server, or without a token from a busy one."""
    vllm_weights_dir: str | None = None
    """Write the weights for the vLLM servers into this folder, which they read. None takes the folder for temporary
    files."""
    rollout_memory_utilization: Share = 0.7
    """Give the KV cache at most this share of the memory that weights, gradients, optimizer, LM head and activations
    leave free."""


@settings_class
class RewardFunctionsConfig:
    """Reward functions, and where they run."""

    reward_funcs: Several[str] = ()
    """Score completions with these reward functions: the name of a function of the task; module:function; MODEL for a
    reward model, or prm:MODEL for a process reward model (a folder or hub id); http://HOST:PORT/PATH for a server;
    sandbox:python or sandbox:python-all to run the program in a completion against the tests in the column `tests`. The
    first reward function defines the accuracy. Empty uses all functions of the task."""
    reward_model_kwargs: Keywords | None = None
    """Pass these arguments to reward models: a dictionary or its JSON text, such as {"device": "cuda:1"}. The default
    device is the device of the policy. Process reward models also take separator, aggregation, step_tag, good_token and
    bad_token."""
    reward_timeout: Positive | None = None
    """Stop a reward function that takes more than N seconds for one completion, and set the reward to None. With this
    setting, functions run in worker processes. For a server, N limits each attempt of a request. For the sandbox, N
    limits all tests of a completion together. If None, only requests (60 seconds per attempt) and tests in the sandbox
    (5 seconds each) are limited."""

    @property
    def prm(self) -> dict[str, Any]:
        """Arguments of process reward models."""
        return {name: value for name, value in self._models.items() if name != "device"}

    @property
    def reward_device(self) -> str:
        """Device of reward models: cuda, cuda:1, cpu, or auto (the policy's device)."""
        return self._models.get("device", "auto")

    @property
    def _models(self):
        return keywords("reward_model_kwargs", self.reward_model_kwargs)


@settings_class
class RewardConfig(RewardFunctionsConfig):
    """Weights of reward functions, their failures, and reward workers."""

    reward_weights: Several[Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]] = ()
    """Multiply the rewards of each function by a weight: one number per function. Empty sets all weights to 1."""
    reward_errors: Literal["raise", "skip"] = "raise"
    """If a reward function fails, end the run (raise), or set the reward to None and count the failure in the metrics
    (skip)."""
    reward_workers: Size | None = None
    """Run reward functions in N worker processes per rank, in parallel with generation; 0 runs them in the trainer's
    process. None uses 0 if reward_timeout is not set. If it is set, None uses the number of cores divided by the number
    of ranks on the machine, at most 8."""


@settings_class
class EvaluationConfig:
    """Evaluation on held-out prompts."""

    max_eval_samples: Count | None = 500
    """Evaluate on the first N held-out prompts. None evaluates on all of them."""
    eval_num_generations: Annotated[Size, Field(le=1000)] = 0  # more subsets than 2**1000 exceed the range of a float
    """Sample N completions per held-out prompt, for pass@k and maj@k; 0 samples none. The accuracy comes from one
    greedy completion per prompt, or from the sampled completions if there is only one prompt."""


@settings_class
class OutputConfig:
    """Output of a command."""

    quiet: bool = False
    """Print only warnings, errors and the result (the run folder, or the table of an evaluation)."""


@settings_class
class ModelConfig:
    """The policy, and the weights that train."""

    model_name_or_path: str | None = None
    """Train this causal LM: a folder, a hub id or a GGUF file. None trains the task's small model, if it has one."""
    use_liger_kernel: bool | None = None
    """Use liger-kernel's fused norms, rotary embedding and SwiGLU in policy and reference. None uses them on a GPU if
    the package is installed. On a CPU they are never used."""
    attention: Literal["auto", "fa2", "fa3", "fa4", "sdpa"] = "auto"
    """Compute attention in prefill and training with FlashAttention 2, 3 or 4 of an installed package, or with
    PyTorch's kernels (sdpa). auto is the newest one that supports GPU and model."""
    gradient_checkpointing: Literal["auto", True, False] = "auto"
    """Recompute the layers in the backward pass, which saves memory and takes about a third more time. auto is True on
    a CPU. On a GPU, auto recomputes the fewest layers with which the activations fit into memory, or all layers if the
    engine does not support the model."""
    activation_offloading: bool = False
    """Keep the inputs of recomputed layers in pinned host memory until the backward pass. This saves GPU memory, at
    the cost of copies over PCIe. All layers are then recomputed."""
    use_peft: bool = False
    """Train LoRA adapters without dropout, and freeze the model. In GRPO, the reference then needs no memory."""
    lora_r: Count = 16
    """Use this rank for the adapters."""
    lora_alpha: Count = 32
    """Multiply the output of the adapters by lora_alpha / lora_r."""
    lora_target_modules: Several[str] = ()
    """Add adapters to the linear layers with these names; all-linear means all layers except the head and, in many
    mixtures of experts, the MLPs. Empty uses peft's choice for the architecture."""


@settings_class
class TrainSplitConfig:
    """The training split."""

    dataset_train_split: str = "train"
    """Take the training prompts from this split."""


@settings_class
class OrderConfig:
    """Order of the prompts."""

    shuffle_dataset: bool = True
    """Shuffle the prompts in every epoch."""


@settings_class
class RolloutConfig:
    """Completions of a step."""

    prompts_per_step: Count = 8
    """Take N prompts per step; the completions of a prompt form a group."""
    num_generations: Annotated[Whole, Field(ge=2)] = 8
    """Generate N completions per prompt: the group size G."""
    temperature: Temperature = 1.0
    """Divide the logits by this temperature, in sampling and in all log-probs."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Exclude tokens whose probability is below min_p times the highest probability. None turns it off."""
    repetition_penalty: Positive = 1.0
    """For tokens that are already in the prompt or completion, divide positive logits by this number, and multiply
    negative logits by it. 1 turns it off."""
    dynamic_sampling: Size = 0
    """Replace groups whose rewards are all equal by groups of new prompts, and sample at most N batches of prompts per
    step (DAPO, arXiv 2503.14476, uses up to 10). If too few groups have differing rewards after N batches, the
    earliest groups with equal rewards fill the step. 0 turns it off."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Start N times as many groups as a step needs, and cancel the slowest. This favours short completions. 1 turns it
    off."""
    max_staleness: Size = 0
    """With rollout_backend=vllm, generate completions during updates, with weights at most N steps old. 0 generates
    them between updates, with the newest weights."""
    staleness_policy: Literal["wait", "continue"] = "wait"
    """When vLLM servers get new weights, let them first finish their running completions (wait), or continue these with
    the new weights (continue)."""


@settings_class
class UpdatesConfig:
    """Updates from the completions of a step."""

    updates_per_rollout: Count = 1
    """Split the groups of a step into N minibatches, with one update each."""
    num_iterations: Count = 1
    """Train N times on the completions of a step (mu in GRPO)."""
    head_backward_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Skip vocabulary entries with low probabilities in the backward pass of the LM head. The relative error of the
    gradient with respect to the logits of a position is at most N / 2, in the 1-norm. 0 skips nothing."""


@settings_class
class OptimizerConfig:
    """Length of the training, and the optimizer."""

    max_steps: Annotated[Whole, Field(ge=-1)] = -1
    """Train for N steps; -1 trains for num_train_epochs. A step of GRPO is one rollout with its updates, and a step of
    sft is one update."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10**6)] = 3.0
    """Train for N epochs of the prompts; N may be a fraction."""
    optim: Literal["adamw_torch", "adamw_8bit"] = "adamw_torch"
    """Store AdamW's moments in 32 bits (adamw_torch) or 8 bits (adamw_8bit: needs bitsandbytes, excludes fsdp2, saves
    6 bytes per trained parameter)."""
    learning_rate: Positive = 1e-06
    """Use this learning rate in AdamW after the warmup."""
    lr_scheduler_type: str = "linear"
    """Schedule the learning rate after the warmup: linear, cosine, constant, constant_with_warmup, or another schedule
    of transformers that needs no metric."""
    lr_scheduler_kwargs: Keywords | None = None
    """Pass these arguments to the schedule: a dictionary or its JSON text, such as {"min_lr_rate": 0.1} for
    cosine_with_min_lr."""
    warmup_steps: NotNegative = 0
    """Raise the learning rate linearly from 0 over the first N updates; an N below 1 is a share of all updates."""
    max_grad_norm: NotNegative = 1.0
    """Clip the gradient to this norm; 0 turns it off."""
    weight_decay: NotNegative = 0.0
    """Use this weight decay in AdamW, for matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Use this decay rate for AdamW's first moment (the mean of the gradient)."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Use this decay rate for AdamW's second moment (the mean of the squared gradient)."""
    adam_epsilon: Positive = 1e-08
    """Add this number to the square root of AdamW's second moment."""
    max_tokens_per_microbatch: AutoCount = None
    """Process at most N tokens per forward and backward pass. Memory grows with N; results differ only by rounding.
    None (or auto) takes 16,384; on a GPU, it takes the fastest of 16,384, 8,192 and 4,096 that fits into memory."""

    @property
    def schedule_kwargs(self) -> dict[str, Any]:
        """Further arguments of the schedule."""
        return keywords("lr_scheduler_kwargs", self.lr_scheduler_kwargs)


@settings_class
class SamplesConfig:
    """Completions that a run keeps."""

    log_completions: bool = False
    """Write all completions of a logged step to samples.jsonl, and to completions/completions_STEP.parquet. Also print
    them as a table, and send the table to W&B and trackio. False writes whole groups to samples.jsonl: up to
    64 completions, at least one group."""
    num_completions_to_print: Count | None = None
    """Print at most N completions in the table in the terminal. None prints all of them."""


@settings_class
class RunConfig:
    """Run folder, logs, checkpoints and resume."""

    output_dir: str | None = None
    """Write the run to this folder. None creates the next runs/TASK-N (sft: runs/TASK-sft-N)."""
    overwrite_output_dir: bool = False
    """Delete the files of an earlier run in output_dir first."""
    logging_steps: Count = 10
    """Write one line to metrics.jsonl every N steps, with the average of each metric over these steps."""
    logging_first_step: bool = False
    """Also log the first step."""
    disable_tqdm: bool = False
    """Show no progress bars."""
    eval_steps: Count | None = None
    """Evaluate on held-out prompts every N steps. None evaluates only after the last step, and before the first one if
    eval_on_start is True."""
    eval_on_start: bool = True
    """Evaluate on held-out prompts before the first step."""
    save_steps: Count | None = 500
    """Save a checkpoint every N steps, after the last step, and on SIGINT and SIGTERM. None saves only after the last
    step and on these signals."""
    save_total_limit: Count | None = None
    """Keep at most N checkpoints: the newest, the best (see metric_for_best_model), then the next newest. The newest
    and the best are kept even if N is 1. None keeps all of them."""
    metric_for_best_model: str | None = None
    """Select the best checkpoint by this metric, such as eval/accuracy. None selects none."""
    greater_is_better: bool | None = None
    """Prefer larger values of metric_for_best_model. None prefers smaller values if its name ends in loss, and larger
    values otherwise."""
    resume_from_checkpoint: str | None = None
    """Resume from this checkpoint: a path, or auto for the newest intact one in output_dir. With auto, a run without a
    checkpoint starts at step 0."""
    profile: Size = 0
    """After two warmup steps, measure the time of each stage for N steps, then write a trace of the next N steps. 0
    turns it off."""
    report_to: each_of("none", "tensorboard", "wandb", "trackio") = ("none",)
    """Also send metrics to these trackers, under the names that TRL uses."""
    run_name: str | None = None
    """Name the run in W&B and trackio. trackio appends a random suffix. None uses the name of the run folder."""
    project: str = "huggingface"
    """Send the run to this project in trackio, and in W&B if WANDB_PROJECT is not set."""
    serve_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Serve the policy over HTTP at this port of 127.0.0.1 while it trains; 0 takes a free port. None turns it off."""
    push_to_hub: bool = False
    """Upload the trained model to the Hugging Face hub after the run."""
    hub_model_id: str | None = None
    """Upload to this repository of the hub: NAME or OWNER/NAME. None uses the name of the run folder."""
    hub_private_repo: bool | None = None
    """Create the repository as private. None uses the owner's default on the hub."""


@settings_class
class AdvantageConfig:
    """From rewards to advantages."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centered rewards by the standard deviation of the group (group) or of all rewards of the step (batch), or
    do not divide them (none)."""
    advantage_baseline: Literal["group", "leave_one_out"] = "group"
    """Subtract from each reward the mean of its group (group), or the mean of the other rewards of its group
    (leave_one_out, as in RLOO)."""
    advantage_clip: Positive | None = None
    """Clip advantages to this magnitude. None turns it off."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Combine several rewards: sum_then_normalize standardizes their weighted sum; normalize_then_sum first
    standardizes each reward within its group (GDPO)."""
    process_rewards: Literal["outcome", "token"] = "outcome"
    """Compute advantages from these rewards. outcome uses the rewards that functions return, and ignores step rewards.
    token computes an advantage per token from the step rewards that functions log (DeepSeekMath, arXiv 2402.03300,
    section 4.1.3), and adds the advantages of functions without step rewards."""
    soft_punish_cache: Size = 0
    """Add a reward that falls from 0 to -1 over the last N tokens before max_completion_length (DAPO's soft overlong
    punishment); 0 turns it off."""


@settings_class
class ObjectiveConfig:
    """The loss."""

    loss_type: Literal[tuple(LOSS_TYPES)] = "dapo"
    """Minimize this loss (docs/objectives.md has the formulas)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Compute the ratio of policy to old policy per token (token), or per completion as the geometric mean over its
    tokens (sequence, as in GSPO)."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        None
    )
    """Correct for top_k, top_p, min_p, repetition_penalty and differences of vLLM servers: multiply the loss, without
    its KL term, by the ratio of old policy to sampler. The ratio is per token or per sequence. Beyond
    importance_sampling_clip_min or importance_sampling_clip_max, truncate modes clip it, and mask modes set it to 0.
    None turns the correction off."""
    importance_sampling_clip_max: Positive | None = 3.0
    """Bound the ratio of old policy to sampler from above. None sets no bound."""
    importance_sampling_clip_min: NotNegative | None = None
    """Bound the ratio of old policy to sampler from below. None sets no bound."""
    epsilon: NotNegative = 0.2
    """Clip the ratio of policy to old policy at 1 - epsilon from below, in losses that clip."""
    epsilon_high: NotNegative | None = None
    """Clip the ratio of policy to old policy at 1 + epsilon_high from above, in losses that clip. None uses epsilon.
    For cispo, the upper bound is epsilon_high itself, such as 5.0; a value below 1 scales down all gradients."""
    delta: Positive | None = None
    """Limit the unclipped ratio to this value (two-sided clipping, arXiv 2505.07291). None turns it off."""
    entropy_coef: float = 0.0
    """Add an entropy bonus with this coefficient; 0 turns it off."""
    router_aux_loss_coef: float | None = None
    """Add the load-balancing loss of a mixture of experts with this coefficient (Switch Transformer, arXiv 2101.03961).
    None uses the coefficient of the model's config. 0 turns it off."""
    use_adaptive_entropy: bool = False
    """Adapt the coefficient of the entropy bonus (Skywork-OR1, arXiv 2505.22312). It starts at entropy_coef. Each
    update raises it by entropy_coef_delta if the entropy is at most entropy_target, and lowers it otherwise. An update
    has the bonus only if the entropy of the previous update was at most entropy_target."""
    entropy_coef_min: float = 0.0
    """Keep the adaptive coefficient at or above this value."""
    entropy_coef_max: float = 1.0
    """Keep the adaptive coefficient at or below this value."""
    entropy_coef_delta: NotNegative = 0.005
    """Change the adaptive coefficient by this amount per update."""
    entropy_target: NotNegative = 0.2
    """Adapt the coefficient so that the mean entropy approaches N nats per token. The mean is over the tokens that
    top_entropy_quantile keeps."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Compute the policy loss and the entropy bonus only on the tokens with the highest entropy, a share N of the
    tokens of an update (arXiv 2506.01939). 1 uses all tokens. A smaller share needs another forward pass per update."""
    off_policy_mask_threshold: Positive | None = None
    """Mask a completion if its advantage is negative and its mean log-prob has fallen by more than N nats since the
    rollout (DeepSeek-V3.2, arXiv 2512.02556). Then all updates of a step, except the first, need another forward pass.
    With importance_sampling_mode, the first also needs it. None turns it off."""
    sapo_temperature_pos: Positive = 1.0
    """Use this temperature in SAPO's gate for tokens with a positive advantage."""
    sapo_temperature_neg: Positive = 1.05
    """Use this temperature in SAPO's gate for tokens with a negative advantage."""
    vespo_k_pos: NotNegative = 2.0
    """Use this k in VESPO's weight W^k exp(lambda (1 - W)) if the advantage is at least 0."""
    vespo_lambda_pos: Positive = 3.0
    """Use this lambda in VESPO's weight if the advantage is at least 0."""
    vespo_k_neg: NotNegative = 3.0
    """Use this k in VESPO's weight if the advantage is negative."""
    vespo_lambda_neg: Positive = 2.0
    """Use this lambda in VESPO's weight if the advantage is negative."""
    mask_truncated_completions: bool = False
    """Drop truncated completions from the loss. Their rewards still count in the mean and standard deviation of the
    group, as in DAPO (arXiv 2503.14476, equation 9) and TRL."""


@settings_class
class ReferenceConfig:
    """The reference, and the KL divergence from it."""

    beta: NotNegative = 0.0
    """Weight the KL divergence from the reference with this coefficient; 0 loads no reference."""
    kl: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """Compute the KL divergence with this method: k1, k2, k3 and abs estimate it from the sampled tokens; full sums
    over the vocabulary."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimates k1 and k3 by the ratio of policy to old policy, which makes their gradients unbiased.
    k2, abs and full ignore this setting."""
    ref_storage: Literal["cpu", "int8", "nf4"] | None = None
    """Store the reference in less GPU memory. cpu keeps it in host memory, and copies it to the GPU layer by layer.
    int8 and nf4 store its linear layers with 8 or 4 bits. None keeps a full copy on the policy's device."""
    sync_ref_model: bool = False
    """Move the reference towards the policy during training (TR-DPO, arXiv 2404.09656)."""
    ref_model_sync_steps: Count = 512
    """Move the reference every N steps."""
    ref_model_mixup_alpha: Share = 0.6
    """Set the reference to alpha * policy + (1 - alpha) * reference, with this alpha."""


@settings_class
class ParallelConfig:
    """Several processes, as torchrun starts them."""

    parallel: Literal["auto", "ddp", "fsdp2", "fsdp2_keep", "fsdp2_offload"] = "auto"
    """Distribute the policy over the processes: ddp replicates it; fsdp2 shards weights, gradients and optimizer state;
    auto is ddp if the policy fits on one device, else fsdp2. fsdp2_keep keeps gathered layers in memory between the
    forward and the backward pass, which takes more memory, but a fifth less communication. fsdp2_offload keeps and
    updates the shards in host memory, also in one process without torchrun."""
    ddp_timeout: Count = 1800
    """Stop the run if a rank waits for other ranks longer than N seconds; the error names the missing ranks."""
