"""The generated problems of reasoning-gym, scored by its `score_answer`. The extra `gym` installs it.

    --task reasoning_gym --reasoning_gym_tasks chain_sum:2,leg_counting

Beside its arguments, a task has a `weight`, and `solved`: the number of solved problems that come before each prompt. A
small model may never write the tags without one.

Training draws new problems without end. The held-out problems have other seeds, the same ones in every run, and
training skips their questions. The columns of a row are the `question`, `answer` and `metadata` of reasoning-gym.

Some of its functions pass an answer to Python's `eval`, or to sympy, which does the same. Such an answer gets 0 if it
could do more than compute.
"""

import ast
import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fastgrpo.config.fields import Positive, Size, convert, did_you_mean, keywords
from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import Source
from fastgrpo.rewards.answers import completion_text
from fastgrpo.tasks import Task, refuse_data

if TYPE_CHECKING:
    from reasoning_gym.composite import CompositeDataset
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 200
STRIDE = 0x9E3779B1  # keeps the problems of neighbouring seeds apart: half a billion modulo 2^31
HELD_OUT_SEED, SOLVED_SEED = 3 * 2**30, 2**31  # beyond the seeds of training; NumPy takes seeds below 2^32
CHECKED = 32  # rows that are validated before the first step
EPOCH = 1000
FORMAT_REWARD = 0.1
# Tasks whose problems depend on the hash seed of the process: a resumed run would get other problems.
HASHED = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
FUNCTIONS = {
    "exp", "log", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "Abs", "Integral",
}  # fmt: skip
_GROWING = (ast.Pow, ast.LShift, ast.Mult)


class Chosen(NamedTuple):
    """The settings of one task."""

    weight: float
    solved: int
    arguments: dict[str, Any]


def chosen(text: str | None) -> dict[str, Chosen]:
    """Read `reasoning_gym_tasks`.

    Examples:
        >>> list(chosen("chain_sum:2,leg_counting"))
        ['chain_sum', 'leg_counting']
        >>> chosen('{"chain_sum": {"weight": 2, "max_terms": 3}}')["chain_sum"]
        Chosen(weight=2.0, solved=0, arguments={'max_terms': 3})
    """
    if not text:
        raise ValueError("task=reasoning_gym needs --reasoning_gym_tasks: names such as chain_sum,leg_counting")
    if text.lstrip().startswith("{"):
        given = {name: dict(keywords(name, value)) for name, value in keywords("reasoning_gym_tasks", text).items()}
    else:
        pairs = [part.strip().partition(":") for part in text.split(",")]
        given = {name: {"weight": weight} if mark else {} for name, mark, weight in pairs}
        if len(given) < len(pairs):
            raise ValueError(f"reasoning_gym_tasks={text} has a task twice; name each once")
    return {
        name: Chosen(
            convert("weight", own.pop("weight", 1), Positive, f"reasoning_gym_tasks: {name}: "),
            convert("solved", own.pop("solved", 0), Size, f"reasoning_gym_tasks: {name}: "),
            own,
        )
        for name, own in given.items()
    }


@functools.cache
def problems(text: str | None, seed: int) -> "CompositeDataset":
    """Open the tasks of `reasoning_gym_tasks`. Problem N depends only on the tasks, the seed and N."""
    specs = chosen(text)
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
    from reasoning_gym.factory import DATASETS

    known = sorted(DATASETS.keys() - {"composite"})
    for name, given in specs.items():
        if name not in known:
            remedy = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise ValueError(f"reasoning_gym_tasks: reasoning-gym has no task {name!r}{remedy}")
        fields = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
        for field in given.arguments:
            if field not in fields:
                raise ValueError(
                    f"reasoning_gym_tasks: {name} has no argument {field!r}{did_you_mean(field, fields)}; it has "
                    f"weight, solved, {', '.join(fields)}"
                )
    if HASHED & specs.keys() and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"{', '.join(sorted(HASHED & specs.keys()))} of reasoning-gym gives other problems in every process, so no "
            "run could be resumed; set the environment variable PYTHONHASHSEED=0"
        )
    try:
        listed = [DatasetSpec(name, given.weight, given.arguments) for name, given in specs.items()]
        return CompositeDataset(CompositeConfig(size=EPOCH, seed=seed, datasets=listed))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym_tasks={text}: {error}") from error


class ScoreAnswer:
    """The reward of reasoning-gym for the text in the last answer tags, from 0 to 1; 0 without tags.

    The metrics score/TASK are the means of each task.
    """

    __name__ = "score_answer"

    def __init__(self, text: str):
        self.text = text  # a worker process opens the tasks itself: some of them cannot be sent

    def __call__(
        self,
        completions: Sequence,
        question: Sequence,
        answer: Sequence,
        metadata: Sequence,
        log_metric: Callable | None = None,
        **columns: Any,
    ) -> list[float]:
        """Score completions."""
        from reasoning_gym.utils import extract_answer

        scores = []
        for completion, *entry in zip(completions, question, answer, metadata, strict=True):
            given = extract_answer(completion_text(completion), "answer")
            scores.append(self._score(given, dict(zip(("question", "answer", "metadata"), entry, strict=True))))
            if log_metric:
                log_metric(f"score/{entry[-1]['source_dataset']}", scores[-1])
        return scores

    def _score(self, given, entry):
        task = problems(self.text, HELD_OUT_SEED).datasets[entry["metadata"]["source_dataset"]]
        if given is None or (given != entry["answer"] and _evaluates(type(task)) and not only_computes(given)):
            return 0.0
        try:
            return float(task.score_answer(given, entry))
        except Exception:  # such as int() of a text
            return 0.0


@functools.cache
def _evaluates(task: type) -> bool:
    """Return whether a task passes answers to Python's `eval`, itself or by sympy's parser."""
    source = inspect.getsource(task)
    return "eval(" in source or ("parse_expr(" in source and "sympy" in inspect.getsource(sys.modules[task.__module__]))


def only_computes(text: str) -> bool:
    """Return whether Python's `eval` of a text ends soon and calls nothing but `FUNCTIONS`.

    Examples:
        >>> only_computes("[1, 2] + [x**2 * sin(x)]"), only_computes("open('x')"), only_computes("9**9**9")
        (True, False, False)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return not re.search("[(!]", text)  # not Python, but sympy also reads 5!
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) not in FUNCTIONS:
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, _GROWING[:2]):
            power = list(ast.walk(node.right))
            numbers = [part.value for part in power if isinstance(part, ast.Constant)]
            if any(isinstance(part, _GROWING) for part in power) or not all(number in range(100) for number in numbers):
                return False
    return True


def format_reward(prompts: list, completions: list, **columns: Any) -> list[float]:
    """Return 0.1 for a completion that ends with the tag pairs of the prompt, in order and once each, else 0.0."""
    asked = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
    return [FORMAT_REWARD * _has_tags(*each) for each in zip(asked, map(completion_text, completions), strict=True)]


format_reward.full_mark = FORMAT_REWARD  # the format rate of an evaluation is the share of completions that get this


def _has_tags(prompt, text):
    tags = [tag for tag in ("think", "answer") if f"</{tag}>" in prompt] or ["answer"]
    form = r"\s*".join(rf"<{tag}>.*?</{tag}>" for tag in tags)
    return all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags) and bool(
        re.search(form + r"\s*\Z", text, re.DOTALL)
    )


class Problems(Source):
    """Draws one problem after another, except those with a question in `held_out`."""

    def __init__(self, dataset: "CompositeDataset", to_row: Callable[[dict], dict], held_out: Sequence[dict]):
        self.dataset, self.to_row, self.drawn = dataset, to_row, 0
        self.held_out = {row["question"] for row in held_out}
        self.rows, self.drawn = self.take(CHECKED), 0

    def __len__(self):
        return EPOCH

    def take(self, count: int) -> list[dict]:
        """Make the next problems."""
        rows, skipped = [], 0
        while len(rows) < count:
            entry = self.dataset[self.drawn]
            self.drawn += 1
            if entry["question"] not in self.held_out:
                rows.append(self.to_row(entry))
                skipped = 0
            elif (skipped := skipped + 1) == EPOCH:
                raise ValueError(
                    f"reasoning_gym_tasks: the last {EPOCH} problems were all held-out ones; choose arguments that "
                    "allow more questions"
                )
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return how many problems have been made."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.drawn = state["drawn"]


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Build the task. `system_prompt` may be the name of one of reasoning-gym's."""
    refuse_data("reasoning_gym", config, ("dataset_name", "dataset_config"))
    test_set, solutions = (problems(config.reasoning_gym_tasks, seed) for seed in (HELD_OUT_SEED, SOLVED_SEED))
    from reasoning_gym.utils import SYSTEM_PROMPTS

    system = SYSTEM_PROMPTS.get(config.system_prompt or "default", config.system_prompt).strip()

    solved = {
        name: [solutions.datasets[name][index] for index in range(given.solved)]
        for name, given in chosen(config.reasoning_gym_tasks).items()
    }

    def to_row(entry):
        turns = [system]
        for other in solved[entry["metadata"]["source_dataset"]]:
            turns += [other["question"], f"<answer>{other['answer']}</answer>"]
        turns.append(entry["question"])
        if tokenizer is None or tokenizer.chat_template is None:
            return {"prompt": "\n\n".join(turns) + "\n", **entry}
        roles = ["system", *["user", "assistant"] * (len(turns) // 2)]
        return {"prompt": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)], **entry}

    @functools.cache
    def held_out():
        shown = {other["question"] for listed in solved.values() for other in listed}
        entries = (test_set[index] for index in range(HELD_OUT))
        return [to_row(entry) for entry in entries if entry["question"] not in shown]

    def train():
        seed = config.seed * STRIDE % SOLVED_SEED  # problem i of seed s is drawn with s + i
        return Problems(problems(config.reasoning_gym_tasks, seed), to_row, held_out())

    return Task(train, held_out, [ScoreAnswer(config.reasoning_gym_tasks), format_reward])
