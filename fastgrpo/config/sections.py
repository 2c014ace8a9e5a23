"""Settings that several commands take, in sections. Training, evaluate and chat compose the sections they need."""

from dataclasses import dataclass, replace
from typing import Any

from fastgrpo.config.fields import Interval, Keywords, When, documented, keywords, setting
from fastgrpo.loss.interval import TEMPERATURE as LOGITS_TEMPERATURE

# The ranges of what a draw takes, for the settings and for `SamplingParams` alike.
TEMPERATURE = replace(LOGITS_TEMPERATURE, or_zero=True)  # 0 is greedy
TOP_P = Interval(above=0, at_most=1)
TOP_K = Interval(at_least=0)
MIN_P = Interval(at_least=0, at_most=1)
REPETITION_PENALTY = Interval(above=0)
MEMORY_UTILIZATION = Interval(above=0, at_most=1)
REWARD_ERRORS = ("raise", "skip")
POOL_WORKERS = 8  # processes of a pool for rewards where their number is not stated, at most
PRM_AGGREGATIONS = ("min", "mean", "last", "product")
HUB_DATA = {"gsm8k": "openai/gsm8k"}  # a task -> the data set on the hub that it reads where dataset_name is None
EVAL_SAMPLES = (
    "Number of held-out prompts to evaluate on, the first ones of the data set. None evaluates on all of them."
)
# The providers of decode attention, in the order in which auto tries them on a GPU.
ROLLOUT_ATTENTION = ("triton", "flash_attn", "sdpa", "products")
# The name of each rollout backend, and the class that it stands for: `fastgrpo.rollout.make_backend` imports it.
ROLLOUT_BACKENDS = {"fast": "fastgrpo.rollout.engine.RolloutEngine", "hf": "fastgrpo.rollout.hf.HFBackend"}

WITH_ENGINE = When("rollout_backend is fast", lambda settings: settings.rollout_backend == "fast")
WITH_DRAWS = When("eval_num_generations is above 0", lambda settings: settings.eval_num_generations > 0)


@documented
@dataclass(frozen=True)
class LoadingConfig:
    """How a model is loaded."""

    dtype: str = setting(
        "auto",
        "Precision of the model's weights, beside which the optimizer keeps float32 masters; auto is bfloat16 on a GPU "
        "and float32 on a CPU. On a CPU with avx512_bf16 or AMX (see lscpu), bfloat16 is faster for models of 100M "
        "parameters and more; on others it is slower.",
        choices=("auto", "float32", "bfloat16"),
        resume="inexact",  # auto may be replaced by the precision that it chose; `restore` refuses any other
    )
    device: str = setting(
        "auto",
        "Device that the model runs on: cuda, cuda:1, cpu, or auto, which is the GPU where there is one.",
        resume="inexact",
    )
    trust_remote_code: bool = setting(
        False,
        "Run Python code that comes with the model. When False, a model that needs its own code is refused.",
    )


@documented
@dataclass(frozen=True)
class PromptConfig:
    """Which prompts are completed."""

    task: str = setting(
        "arithmetic",
        "Where prompts and rewards come from: arithmetic (the embedded example), countdown, pizza, bandit or code, "
        "which need no files; gsm8k; sums (sums and differences in GSM8K's template); or dataset (any rows with a "
        "`prompt` column; --reward_funcs names the rewards).",
    )
    dataset_name: str | None = setting(
        None,
        "Data set to read: a hub id, a .jsonl file, or a folder with SPLIT.jsonl files. None is the task's own.",
    )
    dataset_config: str | None = setting(None, "Configuration name of a data set of the hub.")
    dataset_test_split: str = setting("test", "Split of the data set whose prompts are held out for evaluation.")
    system_prompt: str | None = setting(None, "System prompt to use in place of the task's own.")
    chat_template_kwargs: Keywords | None = setting(
        None,
        "Keyword arguments of the tokenizer's chat template, as a dictionary or its JSON text, for example "
        '{"enable_thinking": false}.',
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the chat template by name."""
        return keywords("chat_template_kwargs", self.chat_template_kwargs)


@documented
@dataclass(frozen=True)
class TokenFilterConfig:
    """Which tokens a draw may choose from."""

    top_p: float = setting(
        1.0, "Draw from the smallest set of tokens that holds this much probability; 1 turns it off.", within=TOP_P
    )
    top_k: int = setting(0, "Draw from this many of the likeliest tokens; 0 turns it off.", within=TOP_K)


@documented
@dataclass(frozen=True)
class CompletionConfig:
    """How long a completion may grow, and which seed random choices follow."""

    max_completion_length: int = setting(
        512,
        "Largest number of tokens of a completion; one that reaches this length is truncated.",
        within=Interval(at_least=1),
    )
    seed: int = setting(
        42,
        "Seed of the draws, of the data's order, of the task's own model, and of the global generators of Python, "
        "NumPy and torch.",
        within=Interval(at_least=0, at_most=2**32 - 1, why="NumPy takes no other seed"),
    )


@documented
@dataclass(frozen=True)
class EngineConfig:
    """Which backend draws completions, and how much of the machine it takes."""

    max_num_seqs: int = setting(
        256,
        "Largest number of completions that are drawn at the same time (lanes); further ones wait for a free lane.",
        within=Interval(at_least=1),
        resume="inexact",
    )
    rollout_backend: str = setting(
        "fast",
        "Backend that draws completions: fast is this package's engine, hf is transformers' generate, which is slower "
        "and takes models that the engine refuses.",
        choices=tuple(ROLLOUT_BACKENDS),
    )
    rollout_attention: str = setting(
        "auto",
        "Implementation of attention in decode steps; auto chooses one that works on this machine.",
        choices=("auto", *ROLLOUT_ATTENTION),
        active=WITH_ENGINE,
        resume="inexact",
    )
    rollout_memory_utilization: float = setting(
        0.7,
        "Share that the keys and values of rollouts may take of the device's memory that is left after everything else "
        "(weights, gradients, optimizer, head, activations).",
        within=MEMORY_UTILIZATION,
        active=WITH_ENGINE,
        resume="inexact",
    )
    rollout_enforce_eager: bool = setting(
        False, "Decode without CUDA graphs, which is slower.", active=WITH_ENGINE, resume="inexact"
    )


@documented
@dataclass(frozen=True)
class JudgingConfig:
    """Which functions judge a completion, and where they run."""

    reward_funcs: tuple[str, ...] = setting(
        (),
        "Rewards: names of the task's own functions; module:function for any other; the folder or hub id of a reward "
        "model, or prm: and that of a process reward model; http://HOST:PORT/PATH for a server; sandbox:python or "
        "sandbox:python-all, which run the program of a completion against the column tests. The first one decides the "
        "accuracy. If none is named, all of the task's own functions are used.",
    )
    reward_device: str = setting(
        "auto",
        "Device of reward models: cuda, cuda:1, cpu, or auto, which is that of the policy. Their weights are bfloat16 "
        "on a GPU and float32 on a CPU.",
        resume="inexact",
    )
    prm_step_separator: str = setting(
        "\n\n", "Text that separates the steps of a completion for a process reward model."
    )
    prm_aggregation: str = setting(
        "min",
        "How a process reward model's rewards of steps become that of the completion: min is the weakest step's, as in "
        "Math-Shepherd (arXiv 2312.08935), so that further steps cannot make up for a wrong one.",
        choices=PRM_AGGREGATIONS,
    )
    prm_step_tag: str | None = setting(
        None,
        "Text that stands after each step in what a process reward model reads. None is ки for a causal LM; for a "
        "token classifier it is <extra_0> where its tokenizer has such a token, and prm_step_separator elsewhere.",
    )
    prm_good_token: str = setting(
        "+", "Token with which a process reward model that is a causal LM says that a step is right."
    )
    prm_bad_token: str = setting(
        "-", "Token with which a process reward model that is a causal LM says that a step is wrong."
    )
    reward_timeout: float | None = setting(
        None,
        "Seconds that a reward function may take for one completion. The functions then run in processes of their own; "
        "what takes longer is killed, and its reward counts as not given. For a server it is the limit of one try of a "
        "request, and for the sandbox that of all tests of a completion. None sets no limit.",
        within=Interval(above=0),
        resume="free",
    )

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


@documented
@dataclass(frozen=True)
class RewardConfig(JudgingConfig):
    """What happens where a completion cannot be judged, and how many are judged at the same time."""

    reward_errors: str = setting(
        "raise",
        "What happens when a reward function fails: raise ends the run; skip treats the reward as not given and counts "
        "the failure in the metrics.",
        choices=REWARD_ERRORS,
        resume="free",
    )
    reward_workers: int | None = setting(
        None,
        "Number of processes that judge completions on each rank, also while others are still drawn; 0 judges in the "
        f"trainer's own process. None is 0 where reward_timeout is None, and else the number of cores, at most "
        f"{POOL_WORKERS}.",
        within=Interval(at_least=0),
        resume="free",
    )


@documented
@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on held-out prompts."""

    max_eval_samples: int | None = setting(
        500,
        EVAL_SAMPLES,
        within=Interval(at_least=1),
        resume="free",
    )
    eval_num_generations: int = setting(
        0,
        "Number of completions to draw for each held-out prompt, which give pass@k and maj@k. The accuracy always "
        "comes from one greedy completion; 0 draws no others.",
        within=Interval(at_least=0),
        resume="free",
    )
    eval_temperature: float = setting(
        1.0,
        "Temperature at which an evaluation draws completions.",
        within=replace(LOGITS_TEMPERATURE, why="a greedy completion is made in any case"),
        active=WITH_DRAWS,
        resume="free",
    )
    eval_top_p: float = setting(
        1.0,
        "Draw an evaluation's completions from the smallest set of tokens that holds this much probability; 1 turns it "
        "off.",
        within=TOP_P,
        active=WITH_DRAWS,
        resume="free",
    )
    eval_top_k: int = setting(
        0,
        "Draw an evaluation's completions from this many of the likeliest tokens; 0 turns it off.",
        within=TOP_K,
        active=WITH_DRAWS,
        resume="free",
    )


@documented
@dataclass(frozen=True)
class OutputConfig:
    """What a command prints."""

    quiet: bool = setting(
        False,
        "Print nothing but warnings, errors and results: the last line of a run, which names its folder, and the table "
        "of an evaluation.",
        resume="free",
    )
