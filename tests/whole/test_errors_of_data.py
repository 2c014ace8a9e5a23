"""What a person can mend in the data: every fault of a row is told by its file and line, before the first step."""

import json
import os
from types import SimpleNamespace

import datasets
import pandas
import pytest
import tiny
from mistakes import Case, check, flags, spoilt
from runs import PROMPTS, lines, make_trainer, share_of_a

from fastgrpo import GRPOTrainer, evaluate, train
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data import Source

pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole model folder with a chat template, to be copied and spoilt."""
    return tiny.save(tmp_path_factory.mktemp("saved") / "model", chat=True)


def rows(*given, **changes):
    """A case whose train.jsonl holds a good row, an empty line, and these rows."""
    return spoilt(lambda c: c.write('{"prompt": "ab"}', "", *map(json.dumps, given)), **changes)


def held_out(*given, **changes):
    """A case with a good train.jsonl, and these rows in test.jsonl."""

    def make(case):
        (case.folder / "test.jsonl").write_text("\n".join(map(json.dumps, given)) + "\n")

    return spoilt(make, **changes)


def of_evaluate(build):
    """The same files in the command evaluate, where a single file is held out."""

    def other(case):
        build(case)
        flags = "--task dataset --dataset_name train.jsonl --reward_funcs own_rewards:share"
        return [str(case.model), *flags.split()]

    return other


GOOD = {"question": "1+1?", "answer": "#### 2"}
MESSAGES = [{"role": "user", "content": "hi"}]
CASES = {
    # name: (command line, what its message must say)
    "content of None": (
        rows({"prompt": [{"role": "user", "content": None}]}),
        "train.jsonl:3: the content of message 0 of the prompt must be a string, got None",
    ),
    "a system prompt before null": (
        rows({"prompt": None}, system_prompt="Be brief."), "train.jsonl:3: the prompt must be a string .* got None",
    ),
    "a system prompt before 7": (rows({"prompt": 7}, system_prompt="Be brief."), "train.jsonl:3: the prompt .* got 7"),
    "lone surrogate": (rows({"prompt": "a\ud83d"}), r"train.jsonl:3: the prompt has the lone surrogate '\\ud83d'"),
    "template that raises what Jinja does not": (
        spoilt(
            lambda c: (
                (c.model / "chat_template.jinja").write_text("{{ 'a' + 1 }}"),
                c.write('{"prompt": "ab"}', json.dumps({"prompt": MESSAGES})),
            )
        ),
        "train.jsonl:2: the tokenizer's chat template refuses the prompt 'hi': TypeError: can only concatenate",
    ),
    "overlong prompt": (rows({"prompt": "abc" * 700}), "train.jsonl:3: the prompt 'abcabc.* has 2100 tokens"),
    "GSM8K question of null": (
        spoilt(lambda c: c.write(json.dumps(GOOD), json.dumps({**GOOD, "question": None})),
               task="gsm8k", reward_funcs=None),
        "train.jsonl:2: the question must be a text that is not empty, got None",
    ),
    "GSM8K answer of null": (
        spoilt(lambda c: c.write(json.dumps(GOOD), json.dumps({**GOOD, "answer": None})),
               task="gsm8k", reward_funcs=None),
        "train.jsonl:2: the answer must be a text that is not empty, got None",
    ),
    "held-out row without prompt": (held_out({"prompt": "ab"}, {"question": "?"}), "test.jsonl:2: the row has no col"),
    "overlong held-out prompt": (
        held_out({"prompt": "ab"}, {"prompt": "abc" * 700}), "test.jsonl:2: the prompt 'abcabc.* has 2100 tokens",
    ),
    "100,000 brackets": (spoilt(lambda c: c.write('{"prompt": "ab"}', "[" * 100_000)), "train.jsonl:2: not JSON that"),
    "rows in a folder": (
        spoilt(lambda c: (c.rows.unlink(), c.rows.mkdir()), dataset_name="."),
        "train.jsonl is a folder; write the rows to a file",
    ),
    "rows in a pipe": (
        spoilt(lambda c: (c.rows.unlink(), os.mkfifo(c.rows))), "train.jsonl is a pipe or a device; write the rows",
    ),
    "rows in a device": (flags(dataset_name="/dev/zero"), "/dev/zero is not a .jsonl file"),
    "evaluate: lone surrogate": (of_evaluate(rows({"prompt": "a\ud83d"})), "train.jsonl:3: the prompt has the lone"),
    "evaluate: overlong prompt": (of_evaluate(rows({"prompt": "abc" * 700})), "train.jsonl:3: .* has 2100 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastgrpo.trainer.GRPOTrainer.step", lambda self: pytest.fail("the first step began"))
    main = evaluate.main if name.startswith("evaluate") else train.main
    check(main, build(case), message, capfd)


STREAM = datasets.IterableDataset.from_generator(lambda: iter(PROMPTS * 9))


class OwnSource(Source):
    """A source whose rows have no order."""

    rows = frozenset("ab")

    def __len__(self):
        return 2

    def take(self, count):
        return PROMPTS[:count]

    state_dict = load_state_dict = None


REFUSED = {
    # name: (arguments of the trainer, what its message must say)
    "dict": ({"train_dataset": {"train": PROMPTS}}, r"train_dataset is of type dict; .* such as data\['train'\]"),
    "stream without max_steps": ({"train_dataset": STREAM}, "train_dataset is of type Iterable.* so pass max_steps"),
    "generator": ({"train_dataset": (row for row in PROMPTS)}, r"train_dataset .* generator; .* pass list\(...\)"),
    "held-out dicts in a dict": ({"eval_dataset": {"test": {"a": PROMPTS}}}, "is of type dict; pass one split"),
    "held-out stream": (
        {"eval_dataset": STREAM, "args": GRPOConfig(max_eval_samples=None)},
        "eval_dataset is of type Iterable.* so pass max_eval_samples",
    ),
    "rows of a source": ({"train_dataset": OwnSource()}, r"train_dataset.rows is of type frozenset; pass rows"),
    "settings in a dict": ({"args": {"max_steps": 1}}, r"args is of type dict; pass GRPOConfig\(\*\*args\)"),
    "no settings in a dict": ({"args": {}}, r"args is of type dict; pass GRPOConfig\(\*\*args\)"),
    "settings of another class": ({"args": 3}, "args is of type int; pass a fastgrpo.GRPOConfig"),
    "name of a tokenizer": (
        {"processing_class": "Qwen/Qwen3-0.6B"}, "processing_class is of type str; pass a tokenizer of transformers",
    ),
    "processor of a tokenizer": (
        {"processing_class": SimpleNamespace(tokenizer=None)}, "processing_class is of type Simple.*; pass its .tokeni",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_from_python_is_refused_before_the_model_is_loaded(name):
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        GRPOTrainer("no/such/model", share_of_a, **{"train_dataset": PROMPTS, **arguments})


@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_rows_from_python_are_told_by_their_index(which, tmp_path):
    given = {"rows": [*PROMPTS, 7]} if which == "train_dataset" else {"eval_rows": [*PROMPTS, 7]}
    with pytest.raises(ValueError, match=f"^{which} row 4: a row must be a dict with a prompt, got 7"):
        make_trainer(tmp_path, **given)


def test_held_out_rows_beyond_those_evaluated_are_not_looked_at(tmp_path):
    assert len(make_trainer(tmp_path, eval_rows=[*PROMPTS, 7], max_eval_samples=4).held_out[""]) == 4


def test_a_stream_and_a_data_frame_train_and_evaluate(tmp_path):
    trainer = make_trainer(
        tmp_path, rows=STREAM, eval_rows=pandas.DataFrame(PROMPTS), max_steps=1, prompts_per_step=2,
        oversampling_factor=1.5,
    )  # fmt: skip
    assert len(trainer.source) == 3
    trainer.train()
    measured = [row for row in lines(tmp_path / "run" / "metrics.jsonl") if "eval/accuracy" in row]
    assert [row["step"] for row in measured] == [0, 1]


def test_a_stream_is_read_as_far_as_a_run_with_refills_can_need(tmp_path):
    settings = {"prompts_per_step": 2, "dynamic_sampling": 3, "max_steps": 2}
    trainer = make_trainer(tmp_path, rows=STREAM, eval_rows=STREAM, max_eval_samples=5, **settings)
    assert (len(trainer.source), len(trainer.held_out[""])) == (12, 5)


def test_rows_are_the_persons_own_and_stay_as_they_are(tmp_path):
    given = [{"prompt": "ab", "n": [1]}, {"prompt": "cd", "n": [2]}]
    before = json.dumps(given)
    trainer = make_trainer(tmp_path, rows=given, max_steps=1, prompts_per_step=2)
    assert all(any(row is mine for mine in given) for row in trainer.source.take(4))
    trainer.train()
    assert json.dumps(given) == before
