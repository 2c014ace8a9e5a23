"""The samples of a page fit into their number of bytes, say what was left out, and are what the file holds."""

import itertools
import json

import pytest

from fastgrpo.page.render import ESCAPES
from fastgrpo.page.samples import Plan, read_samples


def samples_of(folder, budget):
    return read_samples(folder, budget)[0]


ALL = "All samples in samples.jsonl are in this page."


def row(step=1, group=0, completion="so 4", **more):
    known = {
        "step": step, "group": group, "prompt": "2+2=", "completion": completion, "rewards": {"correctness": 1.0},
        "advantage": 0.5, "finish_reason": "stop", "tokens": 3, "clipped": 0.0,
    }  # fmt: skip
    return known | more


TOKENS = {
    "token_ends": [2, 4, 4], "logps": [-0.12345, -1.0, 0.0], "ratios": [1.0, 1.25, 0.9999], "clipped_tokens": [1],
}  # fmt: skip


def written(folder, *rows):
    (folder / "samples.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows))
    return folder


def only(samples):
    """The one completion of the samples."""
    [step] = samples["steps"]
    [group] = step["groups"]
    [completion] = group["completions"]
    return completion


def size(samples):
    """The size of the steps in a page."""
    text = json.dumps(samples["steps"], ensure_ascii=False, allow_nan=False)
    return len(text.translate(str.maketrans(ESCAPES)).encode())


def test_the_page_holds_what_the_file_holds(tmp_path):
    samples = samples_of(written(tmp_path, row(**TOKENS, solution="4"), row(), row(step=9, group=2)), 10_000)
    assert samples["note"] == ALL
    completion = {
        "text": "so 4", "rewards": {"correctness": 1.0}, "advantage": 0.5, "finish_reason": "stop", "tokens": 3,
        "clipped": 0.0, "extras": {"solution": "4"}, "token_ends": [2, 4, 4], "logps": [-0.1235, -1, 0],
        "ratios": [1, 1.25, 0.9999], "clipped_tokens": [1],
    }  # fmt: skip
    older = completion | {"extras": {}} | dict.fromkeys(TOKENS)
    assert samples["steps"] == [
        {"step": 1, "groups": [{"group": 0, "prompt": "2+2=", "completions": [completion, older]}]},
        {"step": 9, "groups": [{"group": 2, "prompt": "2+2=", "completions": [older]}]},
    ]


def test_a_run_without_samples(tmp_path):
    assert samples_of(tmp_path, 1000) == {"note": "The run has no samples.jsonl.", "steps": []}
    assert samples_of(written(tmp_path), 1000) == {"note": "samples.jsonl holds no samples yet.", "steps": []}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "samples.jsonl").mkdir()
    assert samples_of(tmp_path / "other", 1000)["note"] == "samples.jsonl cannot be read: Is a directory."


def test_conversations(tmp_path):
    prompt = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "4"},
        "a text",
    ]
    answer = [{"role": "assistant", "content": "so 4"}]
    turns = [*answer, {"role": "tool", "content": [1]}]
    samples = samples_of(
        written(tmp_path, row(prompt=prompt, completion=answer, **TOKENS), row(completion=turns, **TOKENS)), 10_000
    )
    [group] = samples["steps"][0]["groups"]
    assert group["prompt"] == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": '\n{"tool_calls": [{"name": "add"}]}'},
        {"role": "tool", "content": "4"},
        {"role": "", "content": "a text"},
    ]
    one, several = group["completions"]
    assert one["text"] == "so 4" and one["token_ends"] == [2, 4, 4]
    # The ends count in one message, so the tokens of several have no place.
    assert several["text"] == "[assistant]\nso 4\n\n[tool]\n[1]" and several["token_ends"] is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"rewards": {"a": None, "b": "x", "c": 1e999}}, {"rewards": {"a": None, "b": None, "c": None}}),
        ({"rewards": [1]}, {"rewards": {}}),
        ({"advantage": 10**400}, {"advantage": None}),
        ({"completion": None, "finish_reason": None}, {"text": "", "finish_reason": ""}),
        ({"completion": 4}, {"text": "4"}),
        ({"completion": "a\ud800b\x00\x1b\u202e"}, {"text": "a\ufffdb\x00\x1b\u202e"}),
        ({"mine": {"deep": [1]}, "big": -1e999}, {"extras": {"mine": '{"deep": [1]}', "big": None}}),
        (TOKENS | {"token_ends": [2, 1, 3]}, dict.fromkeys(TOKENS)),
        (TOKENS | {"token_ends": "x"}, dict.fromkeys(TOKENS)),
        (TOKENS | {"logps": [-1.0]}, {"logps": None, "ratios": [1, 1.25, 0.9999]}),
        (TOKENS | {"logps": [-1.0, None, -2.0], "ratios": None}, {"logps": None, "clipped_tokens": None}),
        (TOKENS | {"clipped_tokens": ["x"]}, {"clipped_tokens": []}),
    ],
)
def test_values_that_are_not_what_they_should_be(tmp_path, given, kept):
    samples = samples_of(written(tmp_path, row(**given)), 10_000)
    completion = only(samples)
    assert {name: completion[name] for name in kept} == kept
    assert size(samples)  # neither JSON nor UTF-8 refuses them


def test_what_is_wrong_with_the_file_is_told(tmp_path):
    lines = [row(step=1), row(step=2), row(step=3), row(step=2)]
    text = "".join(json.dumps(values) + "\n" for values in lines) + '{"step": 2, "group": 0, "x: }\n???\n{"step": 3'
    (tmp_path / "samples.jsonl").write_text(text)
    samples = samples_of(tmp_path, 10_000)
    assert [step["step"] for step in samples["steps"]] == [1, 2]
    assert samples["note"] == (
        f"{ALL} 2 damaged lines are left out. The last line is not whole yet and is left out. "
        "A resume went back by 2 written step(s); what was written last counts."
    )


def many(steps=40, groups=8, size=2, text="a <b> & c " * 20):
    details = {"token_ends": list(range(1, 101)), "logps": [-0.12345] * 100, "ratios": [1.2345] * 100}
    return [
        row(step, group, f"{text} {step} {group}", **details)
        for step in range(1, steps + 1) for group in range(groups) for _ in range(size)
    ]  # fmt: skip


def test_steps_go_first_and_evenly_then_groups_then_numbers_then_texts(tmp_path):
    """Each budget is a part of the last one; what was kept is as large as may be, and no larger."""
    written(tmp_path, *many())
    seen = []
    for budget in (5_000_000, 1_000_000, 150_000, 70_000, 60_000, 20_000, 5_000, 500):
        samples = samples_of(tmp_path, budget)
        assert size(samples) <= budget
        steps = [step["step"] for step in samples["steps"]]
        if not steps:
            seen.append((0, 0, None, 0))
            continue
        assert steps[0] == 1 and steps[-1] == 40 and steps == sorted(set(steps))
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert max(gaps) - min(gaps) <= 1
        groups = samples["steps"][0]["groups"]
        assert groups[0]["group"] == 0 and (len(groups) == 1 or groups[-1]["group"] == 7)
        first = groups[0]["completions"][0]
        seen.append((len(steps), len(groups), first["logps"] and first["logps"][0], len(first["text"]) < 200))
    assert seen[0] == (40, 8, -0.1235, False)
    assert 12 < seen[1][0] < 40 and seen[1][1:] == (8, -0.1235, False)
    assert seen[2] == (12, 2, -0.1235, False)
    assert seen[3] == (12, 1, -0.1235, False)
    assert seen[4] == (12, 1, None, False)
    assert seen[5] == (12, 1, None, False)
    assert seen[6][0] < 12 and seen[6][1:3] == (1, None)
    assert seen[7] == (0, 0, None, 0)


def test_the_note_names_everything_that_is_missing(tmp_path):
    written(tmp_path, *many(text="x" * 3000))
    samples = samples_of(tmp_path, 20_000)
    assert samples["note"] == (
        "Samples may take up 20,000 bytes of this page, so it holds 12 of the 40 steps in samples.jsonl, evenly "
        "spread, at most 1 of the up to 8 groups of a step, no numbers of single tokens, and the first 500 characters "
        "of a text. "
        "The file has the rest."
    )
    text = samples["steps"][0]["groups"][0]["completions"][0]["text"]
    assert text == "x" * 500 + " […2,504 more characters are not in this page]"
    none = samples_of(tmp_path, 100)
    assert none == {"note": "No sample fits into the 100 bytes that samples may take up in the page.", "steps": []}


def test_plans_end():
    """However little fits in, the plans become smaller until there is none."""
    plan, count = Plan(steps=10_000, groups=64), 0
    while plan:
        before, plan, count = plan, plan.smaller(fitted=0), count + 1
        assert plan != before
    assert count < 30


def test_a_large_file_is_not_held(tmp_path, monkeypatch):
    """No more is read into memory than a group at a time: the file is larger than what may be allocated."""
    import tracemalloc

    with open(tmp_path / "samples.jsonl", "w") as file:
        for step in range(400):
            file.write(json.dumps(row(step, 0, "x" * 100_000)) + "\n")
    tracemalloc.start()
    samples = samples_of(tmp_path, 2_000_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 12 <= len(samples["steps"]) < 20 and most < 10_000_000 < (tmp_path / "samples.jsonl").stat().st_size
