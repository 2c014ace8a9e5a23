"""The histogram of rewards counts every kept completion once, in the bin of its total reward."""

import json

import pytest
from page_runs import sample

from fastgrpo.page.samples import BINS, COLUMNS, read_samples


def reward_histogram(folder, weights=()):
    return read_samples(folder, 1_000_000, weights)[1]


def write(folder, rows):
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_few_values_have_a_bin_each(tmp_path):
    rows = [sample(1, 0.0), sample(1, 1.0), sample(1, 1.0), sample(2, 0.5)]
    found = reward_histogram(write(tmp_path, rows))
    assert found["step"] == [1, 2] and found["edges"] == [-0.25, 0.25, 0.75, 1.25]
    assert found["counts"] == [[1, 0, 2], [0, 1, 0]]
    assert found["note"].startswith("It rests on the 4 completions that samples.jsonl kept of 2 logged steps")


def test_many_values_share_bins_and_many_steps_share_columns(tmp_path):
    rows = [sample(step, (step * 0.37) % 1 - 0.2) for step in range(1, 601)]
    found = reward_histogram(write(tmp_path, rows))
    assert len(found["edges"]) == BINS + 1 and len(found["step"]) == len(found["counts"]) == COLUMNS
    assert found["step"][0] == 3 and found["step"][-1] == 600
    assert all(sum(column) == 3 for column in found["counts"])
    assert "3 logged steps are joined to a column" in found["note"]


def test_rewards_are_weighted_like_those_of_the_run(tmp_path):
    rows = [sample(1, 0, rewards={"right": 1.0, "short": 0.5}), sample(1, 0, rewards={"right": 0.0, "short": None})]
    found = reward_histogram(write(tmp_path, rows), [1.0, 2.0])
    assert found["edges"] == [-1.0, 1.0, 3.0] and found["counts"] == [[1, 1]]


def test_what_holds_no_reward_has_no_histogram(tmp_path):
    assert reward_histogram(tmp_path) is None
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "rewards": {}}\n[1]\n{"step": 1, "rewards": {"a": nul')
    assert reward_histogram(tmp_path) is None
    found = reward_histogram(write(tmp_path, [sample(1, 0.25)]))  # one value alone
    assert found["edges"] == [-0.25, 0.75] and found["counts"] == [[1]]


def test_values_that_lie_on_no_grid_are_not_shown_at_another_value(tmp_path):
    found = reward_histogram(write(tmp_path, [sample(1, 0.0), sample(1, 0.4), sample(1, 1.0)]))
    assert len(found["edges"]) == BINS + 1 and sum(found["counts"][0]) == 3 and found["counts"][0][-1] == 1


def test_what_a_resumed_run_wrote_again_counts_once(tmp_path):
    rows = [sample(step, 0.0) for step in (1, 2, 3)] + [sample(step, 1.0) for step in (2, 3)]
    found = reward_histogram(write(tmp_path, rows))
    assert found["step"] == [1, 2, 3] and found["counts"] == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    "values", [(1e308, -1e308), (5e-10, 1e300), (10**400, 1.0), (float("nan"), 1.0), ("x", 1.0), (1e308, 1e308)]
)
@pytest.mark.parametrize("weights", [(), ["x"], 5, [2.0]])
def test_odd_numbers_stop_nothing(tmp_path, values, weights):
    found = reward_histogram(write(tmp_path, [sample(1, 0.0, rewards={"right": value}) for value in values]), weights)
    assert found is None or sum(map(sum, found["counts"])) in (1, 2)
