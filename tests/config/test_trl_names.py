"""The list of TRL's arguments: it has every field of `trl.GRPOConfig`, with its default, in one place."""

import dataclasses
import re

import pytest

from fastgrpo.config import trl
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.trl import ACCEPTED, BATCH, IDLE_WHY, INSTEAD, MADE, OLDER, OTHER_DEFAULTS, SAME, THEIRS

OURS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


@pytest.fixture(scope="module")
def defaults():
    theirs = pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed (extra: integrations)")
    fields = dataclasses.fields(theirs.GRPOConfig)
    return {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}


def test_every_field_of_trl_is_listed_once(defaults):
    assert {*SAME, *THEIRS} - OLDER == {*defaults}
    rows = (*trl.TRANSLATED, *trl.IDLE, *trl.REFUSED)
    listed = [*SAME, *(name for row in rows for name in row[0].split())]
    assert len(listed) == len({*listed})


def test_each_default_is_trls(defaults):
    for name in BATCH:
        assert BATCH[name] == defaults[name], name
    for name in defaults.keys() & INSTEAD.keys():
        assert not defaults[name] or defaults[name] == ACCEPTED[name][0], name
    for name in SAME:
        assert OTHER_DEFAULTS.get(name, OURS[name]) == defaults[name], name


def test_trls_defaults_are_never_refused(defaults):
    for name, default in defaults.items():
        GRPOConfig(**{name: default})
    every = GRPOConfig(**defaults)
    changed = {name: getattr(every, name) for name in OURS if getattr(every, name) != OURS[name]}
    assert changed == {  # TRL's batch of 8 completions is one group, and these defaults are others here
        "prompts_per_step": 1,
        "gradient_checkpointing": True,
        "use_liger_kernel": False,
        "eval_on_start": False,
    }


def test_settings_are_settings_and_the_rest_is_none():
    assert SAME.keys() <= OURS.keys()
    assert not THEIRS & OURS.keys()
    assert OTHER_DEFAULTS.keys() <= SAME.keys() and ACCEPTED.keys() <= INSTEAD.keys()
    for name, default in OTHER_DEFAULTS.items():
        assert default != OURS[name], name


def test_texts_are_sentences_and_remedies():
    for text in (*SAME.values(), *IDLE_WHY.values(), *MADE.values()):
        assert not text or text.endswith("."), text
    for text in INSTEAD.values():
        assert re.match("[a-z]", text) and not text.endswith("."), text
