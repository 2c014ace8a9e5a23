"""A contextual bandit: five contexts, ten tokens, and completions of one token, judged by a learned reward model.

Each context has a probability of preference for each token. These true preferences are known here. So a run shows what
RLHF cannot show: whether a policy that follows a learned reward model gets closer to the true preferences.

1. Supervised training (the warm start) learns to draw tokens as often as they are preferred.
2. A reward model learns from comparisons of two tokens: P(a preferred to b) = sigmoid(p_a - p_b), the model of Bradley
   and Terry (Biometrika 39, 1952) with the true rewards as scores.
3. GRPO follows the reward model. `--reward_funcs preferred` rewards the truly preferred token instead (RLVR).

The true reward of a token is its true preference. Always drawing the preferred token gives 0.699, the maximum. With
some seeds the reward model is wrong in a context and prefers another token; GRPO then learns this token.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from fastgrpo.config.sections import PromptConfig
from fastgrpo.policy.characters import character_model
from fastgrpo.rewards.answers import completion_text
from fastgrpo.run.curves import PANELS as USUAL
from fastgrpo.run.curves import Panel
from fastgrpo.tasks import Task, refuse_data, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTEXTS, TOKENS = "ABCDE", "0123456789"
PREFERENCES_SEED = 42  # the same preferences in every run, so that runs can be compared
WARM_START = {"steps": 100 * 20, "batch_size": 32, "learning_rate": 1e-2}
COMPARISONS = {"batches": 200, "pairs": 64, "learning_rate": 1e-3}
WIDTH = 64  # of the reward model: its embeddings and its hidden layer
# Where a tokenizer's config keeps the seed of the run's reward model. It is saved beside every checkpoint, so that
# `python -m fastgrpo.evaluate` judges each model by the reward model of its own run, whatever --seed is there.
JUDGE = "reward_model_seed"

_generator = torch.Generator().manual_seed(PREFERENCES_SEED)
torch.randn(5, 8, generator=_generator)  # not used: it keeps TRUE, and so the documented figures, the same
TRUE = torch.softmax(2 * torch.randn(5, 10, generator=_generator), 1)  # [5, 10]

DRAWN = "eval/sampled"
PANELS = (
    Panel("Reward", "mean total reward", ("reward",)),
    Panel(
        "True reward",
        "mean over contexts",
        (f"{DRAWN}/true_reward", f"{DRAWN}/favourite_reward", f"{DRAWN}/best_reward"),
        ("drawn by the policy", "favourite of the reward function", "best attainable"),
    ),
    Panel(
        "True reward by context",
        "mean (dashed: the favourite)",
        tuple(f"{DRAWN}/true_reward/{context}" for context in CONTEXTS),
        tuple(CONTEXTS),
        dashed=tuple(f"{DRAWN}/favourite_reward/{context}" for context in CONTEXTS),
    ),
    *(
        panel
        for panel in USUAL
        if panel.title in ("KL to the reference", "Clipped tokens", "Entropy", "Advantage magnitude")
    ),
)


def preferred(prompts: list, completions: list, log_metric: Callable, **columns: Any) -> list[float]:
    """Reward the token that is truly preferred in its context."""
    return _rewards(F.one_hot(TRUE.argmax(1), len(TOKENS)).float(), prompts, completions, log_metric)


def learned_reward(seed: int) -> Callable[..., list[float]]:
    """Return the reward function of the learned reward model."""

    def learned_reward(prompts, completions, log_metric, **columns):
        scores = reward_model(seed)
        # The difference comes first: it is exactly 0 for the favourite, whose reward is then exactly 1.
        return _rewards(1 + (scores - scores.max(1, keepdim=True).values), prompts, completions, log_metric)

    learned_reward.pooled = False  # a nested function cannot be sent to a process
    return learned_reward


def _rewards(table, prompts, completions, log_metric):
    """Look up the reward of each completion in a table [5, 10], and log the true rewards.

    Characters outside the ten tokens get the reward of the worst token of their context, and a true reward of 0.
    """
    rewards, indices = [], {token: i for i, token in enumerate(TOKENS)}
    for prompt, completion in zip(prompts, completions, strict=True):
        context, token = CONTEXTS.index(prompt), indices.get(completion_text(completion))
        rewards.append((table[context].min() if token is None else table[context, token]).item())
        true = 0.0 if token is None else TRUE[context, token].item()
        log_metric("true_reward", true)
        log_metric(f"true_reward/{prompt}", true)
        favourite = TRUE[context, table[context].argmax()].item()
        log_metric("favourite_reward", favourite)
        log_metric(f"favourite_reward/{prompt}", favourite)
        log_metric("best_reward", TRUE[context].max().item())
    return rewards


@functools.cache
def reward_model(seed: int) -> torch.Tensor:
    """Train the reward model on comparisons, and return its score [5, 10] fp32 of each token in each context.

    Each process trains it on the CPU, deterministically by the seed. So a resumed run has the same model.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        contexts, tokens = torch.nn.Embedding(len(CONTEXTS), WIDTH), torch.nn.Embedding(len(TOKENS), WIDTH)
        head = torch.nn.Sequential(torch.nn.Linear(2 * WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))

        def score(context, token):
            return head(torch.cat([contexts(context), tokens(token)], -1)).squeeze(-1)

        parameters = [*contexts.parameters(), *tokens.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=COMPARISONS["learning_rate"])
        for _ in range(COMPARISONS["batches"]):
            context, a, b = compare(COMPARISONS["pairs"])
            loss = -F.logsigmoid(score(context, a) - score(context, b)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        every = torch.cartesian_prod(torch.arange(len(CONTEXTS)), torch.arange(len(TOKENS)))
        return score(*every.T).view(TRUE.shape).detach()


def compare(pairs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw comparisons from torch's global generator: contexts, preferred tokens and others, [pairs] int64 each."""
    context = torch.randint(len(CONTEXTS), (pairs,))
    a, b = torch.rand(pairs, len(TOKENS)).topk(2).indices.T  # two different tokens
    wins = torch.rand(pairs) < torch.sigmoid(TRUE[context, a] - TRUE[context, b])  # P(a preferred to b)
    return context, torch.where(wins, a, b), torch.where(wins, b, a)


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train and test on the five contexts."""
    refuse_data("bandit", config)
    rows = [{"prompt": context} for context in CONTEXTS]

    made_with = {} if tokenizer is None else tokenizer.init_kwargs
    judge = learned_reward(made_with.get(JUDGE, config.seed))
    return Task(lambda: shuffled(rows, config), lambda: rows, [judge, preferred], lambda: draws(config.seed))


def draws(seed: int) -> list[dict[str, str]]:
    """Draw from the true preferences, as many tokens as the supervised training sees."""
    generator = torch.Generator().manual_seed(seed)
    count = WARM_START["steps"] * WARM_START["batch_size"]
    contexts = torch.randint(len(CONTEXTS), (count,), generator=generator)
    tokens = torch.multinomial(TRUE[contexts], 1, generator=generator).squeeze(1)
    pairs = zip(contexts.tolist(), tokens.tolist(), strict=True)
    return [{"prompt": CONTEXTS[context], "completion": TOKENS[token]} for context, token in pairs]


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a Llama of one layer over the contexts and the tokens, with random weights."""
    model, tokenizer = character_model(CONTEXTS + TOKENS, seed, hidden_size=32, layers=1, heads=2, positions=8)
    tokenizer.init_kwargs[JUDGE] = seed
    return model, tokenizer
