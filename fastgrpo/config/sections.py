"""Settings that several commands take, in sections. Training, evaluate and chat compose the sections they need."""

from typing import Any, Literal

from fastgrpo.config.fields import (
    Count,
    Keywords,
    Positive,
    Seed,
    Several,
    Share,
    Size,
    Temperature,
    keywords,
    settings_class,
)

REWARD_ERRORS = ("raise", "skip")
POOL_WORKERS = 8  # processes of a pool for rewards where their number is not stated, at most
PRM_AGGREGATIONS = ("min", "mean", "last", "product")
HUB_DATA = {"gsm8k": "openai/gsm8k"}  # a task -> the data set on the hub that it reads where dataset_name is None
# The providers of decode attention, in the order in which auto tries them on a GPU.
ROLLOUT_ATTENTION = ("triton", "flash_attn", "sdpa", "products")
# The name of each rollout backend, and the class that it stands for: `fastgrpo.rollout.make_backend` imports it.
ROLLOUT_BACKENDS = {"fast": "fastgrpo.rollout.engine.RolloutEngine", "hf": "fastgrpo.rollout.hf.HFBackend"}


@settings_class
class LoadingConfig:
    """How a model is loaded."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model's weights, beside which the optimizer keeps float32 masters; auto is bfloat16 on a GPU and
    float32 on a CPU. On a CPU with avx512_bf16 or AMX (see lscpu), bfloat16 is faster for models of 100M parameters and
    more; on others it is slower."""
    device: str = "auto"
    """Device that the model runs on: cuda, cuda:1, cpu, or auto, which is the GPU where there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. When False, a model that needs its own code is refused."""


@settings_class
class PromptConfig:
    """Which prompts are completed."""

    task: str = "arithmetic"
    """Where prompts and rewards come from: arithmetic (the embedded example), countdown, pizza, bandit or code, which
    need no files; gsm8k; sums (sums and differences in GSM8K's template); or dataset (any rows with a `prompt` column;
    --reward_funcs names the rewards)."""
    dataset_name: str | None = None
    """Data set to read: a hub id, a .jsonl file, or a folder with SPLIT.jsonl files. None is the task's own."""
    dataset_config: str | None = None
    """Configuration name of a data set of the hub."""
    dataset_test_split: str = "test"
    """Split of the data set whose prompts are held out for evaluation."""
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
    rollout_backend: Literal["fast", "hf"] = "fast"
    """Backend that draws completions: fast is this package's engine, hf is transformers' generate, which is slower and
    takes models that the engine refuses."""
    rollout_attention: Literal["auto", "triton", "flash_attn", "sdpa", "products"] = "auto"
    """Implementation of attention in decode steps; auto chooses one that works on this machine."""
    rollout_memory_utilization: Share = 0.7
    """Share that the keys and values of rollouts may take of the device's memory that is left after everything else
    (weights, gradients, optimizer, head, activations)."""
    rollout_enforce_eager: bool = False
    """Decode without CUDA graphs, which is slower."""


@settings_class
class JudgingConfig:
    """Which functions judge a completion, and where they run."""

    reward_funcs: Several[str] = ()
    """Rewards: names of the task's own functions; module:function for any other; the folder or hub id of a reward
    model, or prm: and that of a process reward model; http://HOST:PORT/PATH for a server; sandbox:python or
    sandbox:python-all, which run the program of a completion against the column tests. The first one decides the
    accuracy. If none is named, all of the task's own functions are used."""
    reward_device: str = "auto"
    """Device of reward models: cuda, cuda:1, cpu, or auto, which is that of the policy. Their weights are bfloat16 on a
    GPU and float32 on a CPU."""
    prm_step_separator: str = "\n\n"
    """Text that separates the steps of a completion for a process reward model."""
    prm_aggregation: Literal["min", "mean", "last", "product"] = "min"
    """How a process reward model's rewards of steps become that of the completion: min is the weakest step's, as in
    Math-Shepherd (arXiv 2312.08935), so that further steps cannot make up for a wrong one."""
    prm_step_tag: str | None = None
    """Text that stands after each step in what a process reward model reads. None is ки for a causal LM; for a token
    classifier it is <extra_0> where its tokenizer has such a token, and prm_step_separator elsewhere."""
    prm_good_token: str = "+"
    """Token with which a process reward model that is a causal LM says that a step is right."""
    prm_bad_token: str = "-"
    """Token with which a process reward model that is a causal LM says that a step is wrong."""
    reward_timeout: Positive | None = None
    """Seconds that a reward function may take for one completion. The functions then run in processes of their own;
    what takes longer is killed, and its reward counts as not given. For a server it is the limit of one try of a
    request, and for the sandbox that of all tests of a completion. None sets no limit."""

    @property
    def prm(self) -> dict[str, Any]:
        """The settings of process reward models, as arguments of `ProcessRewardModel`."""
        return {
            "separator": self.prm_step_separator,
            "aggregation": self.prm_aggregation,
            "step_tag": self.prm_step_tag,
            "good_token": self.prm_good_token,
            "bad_token": self.prm_bad_token,
        }


@settings_class
class RewardConfig(JudgingConfig):
    """What happens where a completion cannot be judged, and how many are judged at the same time."""

    reward_errors: Literal["raise", "skip"] = "raise"
    """What happens when a reward function fails: raise ends the run; skip treats the reward as not given and counts the
    failure in the metrics."""
    reward_workers: Size | None = None
    """Number of processes that judge completions on each rank, also while others are still drawn; 0 judges in the
    trainer's own process. None is 0 where reward_timeout is None, and else the number of cores, at most 8."""


@settings_class
class EvaluationConfig:
    """What is measured on held-out prompts."""

    max_eval_samples: Count | None = 500
    """Number of held-out prompts to evaluate on, the first ones of the data set. None evaluates on all of them."""
    eval_num_generations: Size = 0
    """Number of completions to draw for each held-out prompt, which give pass@k and maj@k. The accuracy always comes
    from one greedy completion; 0 draws no others."""
    eval_temperature: Temperature = 1.0
    """Temperature at which an evaluation draws completions."""
    eval_top_p: Share = 1.0
    """Draw an evaluation's completions from the smallest set of tokens that holds this much probability; 1 turns it
    off."""
    eval_top_k: Size = 0
    """Draw an evaluation's completions from this many of the likeliest tokens; 0 turns it off."""


@settings_class
class OutputConfig:
    """What a command prints."""

    quiet: bool = False
    """Print nothing but warnings, errors and results: the last line of a run, which names its folder, and the table of
    an evaluation."""
