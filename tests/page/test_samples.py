"""The samples of a page fit into their bytes, equal samples.jsonl, and come with a note on what was dropped."""

import io
import itertools
import json
import tracemalloc

import pytest
from page_runs import TOOLS, sample

from fastgrpo.page.render import ESCAPES
from fastgrpo.page.samples import BINS, COLUMNS, SampleFile, read_samples

ALL = "All samples in samples.jsonl are in this page."
TOKENS = {
    "token_ends": [2, 4, 4], "logps": [-0.12345, -1.0, 0.0], "ratios": [1.0, 1.25, 0.9999], "clipped_tokens": [1],
}  # fmt: skip


def row(step=1, group=0, completion="so 4", **more):
    return sample(step, 1.0, group, completion, **{"tokens": 3, **more})


def written(folder, *rows):
    (folder / "samples.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows))
    return folder


def samples_of(folder, budget=10_000):
    return read_samples(folder, budget)[0]


def histogram(folder, weights=()):
    return read_samples(folder, 1_000_000, weights)[1]


def size(samples):
    text = json.dumps(samples["steps"], ensure_ascii=False, allow_nan=False)
    return len(text.translate(str.maketrans(ESCAPES)).encode())


def test_the_page_has_all_samples_of_the_file(tmp_path):
    samples = samples_of(written(tmp_path, row(**TOKENS, solution="4"), row(), row(step=9, group=2)))
    completion = {
        "text": "so 4", "rewards": {"correctness": 1.0}, "advantage": 0.5, "finish_reason": "stop", "tokens": 3,
        "clipped": 0.0, "extras": {"solution": "4"}, "token_ends": [2, 4, 4], "logps": [-0.1235, -1, 0],
        "ratios": [1, 1.25, 0.9999], "clipped_tokens": [1],
    }  # fmt: skip
    older = completion | {"extras": {}} | dict.fromkeys(TOKENS)
    assert samples == {"note": ALL, "steps": [
        {"step": 1, "groups": [{"group": 0, "prompt": "2+2=", "completions": [completion, older]}]},
        {"step": 9, "groups": [{"group": 2, "prompt": "2+2=", "completions": [older]}]},
    ]}  # fmt: skip


def test_a_run_without_samples(tmp_path):
    assert samples_of(tmp_path) == {"note": "The run has no samples.jsonl.", "steps": []}
    assert histogram(tmp_path) is None
    assert samples_of(written(tmp_path)) == {"note": "samples.jsonl holds no samples yet.", "steps": []}
    (tmp_path / "other" / "samples.jsonl").mkdir(parents=True)
    assert samples_of(tmp_path / "other")["note"].startswith("samples.jsonl cannot be read")


def test_shows_conversations(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    prompt = [{"role": "user", "content": "2+2?"}, calls, {"role": "tool", "content": "4"}, "a text"]
    answer = [{"role": "assistant", "content": "so 4"}]
    turns = [*answer, {"role": "tool", "content": [1]}]
    rows = [row(prompt=prompt, completion=answer, **TOKENS), row(completion=turns, **TOKENS), row(**TOOLS)]
    rows.append(row(**TOOLS | {"turns": [None], "calls": ["x"]}))
    [group] = samples_of(written(tmp_path, *rows))["steps"][0]["groups"]
    contents = ["2+2?", '\n{"tool_calls": [{"name": "add"}]}', "4", "a text"]
    assert [(turn["role"], turn["content"]) for turn in group["prompt"]] == [
        *zip(("user", "assistant", "tool", ""), contents, strict=True)
    ]
    one, several, tools, older = group["completions"]
    assert one["text"] == "so 4" and one["token_ends"] == [2, 4, 4]
    # The ends count in one message, so the tokens of several have no place.
    assert several["text"] == "[assistant]\nso 4\n\n[tool]\n[1]" and several["token_ends"] is None
    assert tools["text"] == "😀 <add 1>[2] so 2[]" and tools["turn_ends"] == [9, 12, 17, 19, 19]
    assert tools["token_ends"] == [1, 9, 9, 15, 17, 19] and tools["extras"] == {}
    call = {"turn": 1, "name": "add", "arguments": '{"x": 1}', "answer": "2", "failed": False, "latency_s": 0.25}
    assert tools["calls"][0] == call and tools["calls"][1]["failed"]
    assert "prompt" not in one and several["prompt"] == "2+2="  # a reset may change it
    assert older["text"] == "so 4" and older["calls"][0]["name"] == ""


@pytest.mark.parametrize(("given", "kept"), [
    ({"rewards": {"a": None, "b": "x", "c": 1e999}}, {"rewards": {"a": None, "b": None, "c": None}}),
    ({"advantage": 10**400, "rewards": [1]}, {"advantage": None, "rewards": {}}),
    ({"completion": "a\ud800b\x00\x1b\u202e"}, {"text": "a\ufffdb\x00\x1b\u202e"}),
    ({"mine": {"deep": [1]}, "big": -1e999}, {"extras": {"mine": '{"deep": [1]}', "big": None}}),
    (TOKENS | {"token_ends": [2, 1, 3]}, dict.fromkeys(TOKENS)),
    (TOKENS | {"logps": [-1.0]}, {"logps": None, "ratios": [1, 1.25, 0.9999]}),
])  # fmt: skip
def test_replaces_invalid_values(tmp_path, given, kept):
    samples = samples_of(written(tmp_path, row(**given)))
    [completion] = samples["steps"][0]["groups"][0]["completions"]
    assert {name: completion[name] for name in kept} == kept
    assert size(samples)  # neither JSON nor UTF-8 refuses them


def many(text="a <b> & c " * 20):
    details = {"token_ends": list(range(1, 101)), "logps": [-0.12345] * 100, "ratios": [1.2345] * 100}
    places = itertools.product(range(1, 41), range(8), range(2))
    return [row(step, group, f"{text} {step} {group}", **details) for step, group, _ in places]


def test_steps_go_first_and_evenly_then_groups_then_numbers_then_texts(tmp_path):
    written(tmp_path, *many())
    seen = []
    for budget in (5_000_000, 1_000_000, 150_000, 70_000, 60_000, 5_000, 500):
        samples = samples_of(tmp_path, budget)
        assert size(samples) <= budget
        steps = [step["step"] for step in samples["steps"]]
        if not steps:
            seen.append((0, 0, None))
            continue
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert (steps[0], steps[-1]) == (1, 40) and min(gaps) > 0 and max(gaps) - min(gaps) <= 1
        groups = samples["steps"][0]["groups"]
        assert groups[0]["group"] == 0 and (len(groups) == 1 or groups[-1]["group"] == 7)
        first = groups[0]["completions"][0]
        seen.append((len(steps), len(groups), first["logps"] and first["logps"][0]))
    assert seen[0] == (40, 8, -0.1235) and 12 < seen[1][0] < 40 and seen[1][1:] == (8, -0.1235)
    assert seen[2:5] == [(12, 2, -0.1235), (12, 1, -0.1235), (12, 1, None)]
    assert seen[5][0] < 12 and seen[5][1:] == (1, None) and seen[6] == (0, 0, None)


def test_the_note_names_everything_that_is_missing(tmp_path):
    samples = samples_of(written(tmp_path, *many(text="x" * 3000)), 20_000)
    for part in ("20,000 bytes", "12 of the 40 steps", "1 of the up to 8 groups", "first 500 characters"):
        assert part in samples["note"]
    text = samples["steps"][0]["groups"][0]["completions"][0]["text"]
    assert text == "x" * 500 + " […2,504 more characters are not in this page]"
    none = samples_of(tmp_path, 100)
    assert none["steps"] == [] and "No sample fits into the 100 bytes" in none["note"]


def test_a_large_file_is_not_held_in_memory(tmp_path):
    with open(tmp_path / "samples.jsonl", "w") as file:
        for step in range(200):
            file.write(json.dumps(row(step, 0, "x" * 100_000)) + "\n")
    tracemalloc.start()
    samples = samples_of(tmp_path, 2_000_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 12 <= len(samples["steps"]) < 20 and most < 10_000_000 < (tmp_path / "samples.jsonl").stat().st_size


# The file is gone through once.
def line(step, group, text="x"):
    return json.dumps({"step": step, "group": group, "completion": text}).encode() + b"\n"


def opened(*lines):
    return SampleFile(io.BytesIO(b"".join(lines)))


def texts(file, step):
    return [[row["completion"] for row in file.read(step, block)] for block in file.steps[step]]


@pytest.mark.parametrize("damaged", [
    b"\0" * 50, b'{"step": 1}', b'{"step": 1, "group": 0, "completion": "x', b'{"a":' * 9999 + b"}",
])  # fmt: skip
def test_damaged_lines_are_counted(damaged):
    file = opened(line(1, 0, "a"), damaged + b"\n", line(1, 0, "b"))
    # The place of a group begins with its first line and goes on over lines that are none.
    assert file.damaged == 1 and file.steps[1][0].count == 2 and texts(file, 1)[0][0] == "a"
    assert opened(line(1, 0, "a"), damaged + b"\n").damaged == 1


def test_steps_after_a_resume_replace_earlier_versions():
    first = [line(step, 0, f"old {step}") for step in (1, 2, 3, 4)]
    file = opened(*first, line(2, 0, "new 2"), line(3, 0, "new 3"))
    assert list(file.steps) == [1, 2, 3] and file.replaced == {2, 3, 4}
    assert [texts(file, step) for step in file.steps] == [[["old 1"]], [["new 2"]], [["new 3"]]]
    file = opened(line(5, 0, "old"), line(5, 1, "old"), line(5, 0, "new"), line(5, 1, "new"))
    assert texts(file, 5) == [["new"], ["new"]] and file.replaced == {5}


# The histogram counts every kept completion once, in the bin of its total reward.
def test_few_values_have_a_bin_each_and_many_share_bins_and_columns(tmp_path):
    found = histogram(written(tmp_path, sample(1, 0.0), sample(1, 1.0), sample(1, 1.0), sample(2, 0.5)))
    assert found["step"] == [1, 2] and found["edges"] == [-0.25, 0.25, 0.75, 1.25]
    assert found["counts"] == [[1, 0, 2], [0, 1, 0]] and "the 4 completions" in found["note"]
    assert histogram(written(tmp_path, sample(1, 0.25)))["edges"] == [-0.25, 0.75]
    found = histogram(written(tmp_path, *(sample(step, (step * 0.37) % 1 - 0.2) for step in range(1, 601))))
    assert len(found["edges"]) == BINS + 1 and len(found["step"]) == len(found["counts"]) == COLUMNS
    assert found["step"][0] == 3 and found["step"][-1] == 600
    assert all(sum(column) == 3 for column in found["counts"]) and "3 logged steps form one column" in found["note"]


def test_rewards_are_weighted_like_those_of_the_run_and_a_resumed_step_counts_once(tmp_path):
    rewards = {"right": 1.0, "short": 0.5, "added": 0.0}, {"right": 0.0, "short": None, "added": 0.0}
    rows = [sample(1, 0, rewards=each) for each in rewards]
    found = histogram(written(tmp_path, *rows), [1.0, 2.0])
    assert found["edges"] == [-1.0, 1.0, 3.0] and found["counts"] == [[1, 1]]
    rows = [sample(step, 0.0) for step in (1, 2, 3)] + [sample(step, 1.0) for step in (2, 3)]
    found = histogram(written(tmp_path, *rows))
    assert found["step"] == [1, 2, 3] and found["counts"] == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("values", [(1e308, -1e308), (10**400, 1), (float("nan"), 1), (5, 5 + 4e-7), (1e6, 1e6 + 1e-9)])
def test_histogram_accepts_any_number(tmp_path, values):
    found = histogram(written(tmp_path, *(sample(1, 0.0, rewards={"right": value}) for value in values)), [2.0])
    assert found is None or sum(map(sum, found["counts"])) in (1, 2)
