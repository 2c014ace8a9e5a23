"""The form of settings: what is converted, what is refused and how this is told."""

import dataclasses
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fastgrpo.config.fields import (
    Count,
    Keywords,
    Positive,
    Several,
    Whole,
    allowed,
    convert,
    did_you_mean,
    each_of,
    keywords,
    settings_class,
)


@settings_class
class Radio:
    """A radio."""

    name: str
    """Its name."""
    volume: Annotated[Whole, Field(ge=0, le=11)] = 3
    """How loud
    it is."""
    band: Literal["fm", "am"] | None = None
    """Band of the waves."""
    stations: Several[Positive] = (98.5,)
    """Frequencies in MHz."""
    outputs: each_of("speaker", "line") = ()
    """Where the sound goes."""


def test_keyword_arguments_become_their_json_text():
    for value in ({"a": 1, "b": [True, None]}, '{"a": 1, "b": [true, null]}'):
        assert convert("extra", value, Keywords | None) == '{"a": 1, "b": [true, null]}'
    assert convert("extra", None, Keywords | None) is None
    assert keywords("extra", '{"a": 1}') == {"a": 1} and keywords("extra", None) == {}
    for value, told in (
        ("{'a': 1}", "extra must be a dictionary of what JSON can hold, or its text: Expecting"),
        ({"a": object()}, "extra must be a dictionary of what JSON can hold, or its text: Object of type"),
        ("[1]", r"extra must be a dictionary or its JSON text, got \[1\]"),
        (7, "extra must be a dictionary or its JSON text, got 7"),
    ):
        with pytest.raises(ValueError, match=told):
            convert("extra", value, Keywords | None)


@pytest.mark.parametrize(
    "stated, told",
    [
        ({"volume": 12}, r"volume must be in \[0, 11\], got 12"),
        ({"volume": 2.5}, "volume must be a whole number, got 2.5"),
        ({"volume": True}, "volume must be a whole number below 2.63, got True"),
        ({"volume": 2**63}, "volume must be a whole number below 2.63, got 9223372036854775808"),
        ({"band": "lw"}, "band must be one of None, fm, am, got 'lw'"),
        ({"stations": (98.5, -1)}, "stations must be positive, got -1"),
        ({"outputs": "phones"}, "outputs must be one of speaker, line, got 'phones'"),
        ({"name": None}, r"name must be text \(in quotes\), got None"),
        ({"volume": -1, "band": 3}, "volume must be in .*, got -1\nband must be one of None, fm, am, got 3"),
    ],
)
def test_each_mistake_is_told_in_a_line(stated, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        Radio(**{"name": "x", **stated})


def test_an_unknown_or_missing_setting_is_named():
    with pytest.raises(TypeError, match="Radio: unknown setting 'volum'; did you mean 'volume'"):
        Radio(name="x", volum=1)
    with pytest.raises(ValueError, match=r"^name must be given$"):
        Radio()


def test_the_record_is_a_dataclass_with_help():
    radio = Radio(name="x", volume="1e1", stations=101)
    assert (radio.volume, radio.stations, radio.outputs) == (10, (101.0,), ())
    assert dataclasses.replace(radio, volume=2) == Radio(name="x", volume=2, stations=[101])
    assert Radio(name="x", stations=None).stations == (98.5,)
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(Radio)}
    assert helps["volume"] == "How loud it is." and helps["band"] == "Band of the waves."


@pytest.mark.parametrize(
    "kind, words",
    [
        (int, ""), (Count | None, "at least 1"), (Positive, "positive"),
        (Annotated[float, Field(ge=0, lt=1)], "in [0, 1)"),
        (Annotated[float, Field(gt=2)], "above 2"), (Annotated[float, Field(lt=2)], "below 2"),
        (Annotated[float, Field(le=2)], "at most 2"), (Literal["a", True], "one of a, True"),
        (each_of("a", "b"), "one of a, b"),
    ],
)  # fmt: skip
def test_what_is_allowed_is_said_in_words(kind, words):
    assert allowed(kind) == words


def test_the_nearest_name_is_suggested():
    assert did_you_mean("lerning_rate", ["beta", "learning_rate"]) == "; did you mean 'learning_rate'?"
    assert did_you_mean("bta", ["beta"], "--{}".format) == "; did you mean --beta?"
    assert did_you_mean("xyz", ["beta"]) == ""
