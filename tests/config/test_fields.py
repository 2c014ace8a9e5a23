"""What a setting's field records, and what is refused from it."""

import dataclasses
from dataclasses import dataclass

import pytest

from fastgrpo.config.fields import (
    REQUIRED,
    Interval,
    Keywords,
    Setting,
    When,
    check_conditions,
    check_fields,
    did_you_mean,
    documented,
    keywords,
    setting,
    setting_of,
    typed,
)

LOUD = When("loud is True", lambda settings: settings.loud)


@documented
@dataclass(frozen=True)
class Radio:
    """A radio."""

    volume: int = setting(3, "How loud it is.", within=Interval(at_least=0, at_most=11, why="it has no twelve"))
    band: str | None = setting(None, "Band of the waves.", choices=(None, "fm", "am"), resume="free")
    stations: tuple[float, ...] = setting((), "Frequencies in MHz.", within=Interval(above=0))
    loud: bool = setting(False, "Play to the neighbours.")
    echo: float = setting(0.0, "Seconds of echo.", active=LOUD)


def test_keyword_arguments_become_their_json_text():
    for value in ({"a": 1, "b": [True, None]}, '{"a": 1, "b": [true, null]}'):
        assert typed("extra", value, Keywords | None) == '{"a": 1, "b": [true, null]}'
    assert typed("extra", None, Keywords | None) is None
    assert keywords("extra", '{"a": 1}') == {"a": 1} and keywords("extra", None) == {}
    for value, told in (
        ("{'a': 1}", "extra must be a dictionary of what JSON can hold, or its text: Expecting"),
        ({"a": object()}, "extra must be a dictionary of what JSON can hold, or its text: Object of type"),
        ("[1]", r"extra must be a dictionary or its JSON text, got \[1\]"),
        (7, "extra must be a dictionary or its JSON text, got 7"),
    ):
        with pytest.raises(ValueError, match=told):
            typed("extra", value, Keywords | None)


def test_the_reason_of_an_interval_is_told():
    with pytest.raises(ValueError, match=r"^volume must be in \[0, 11\], got 12: it has no twelve$"):
        check_fields(Radio(volume=12))


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"band": "lw"}, "band must be one of None, fm, am, got 'lw'"),
        ({"stations": (98.5, -1)}, "stations must be positive, got -1"),
        ({"volume": None}, "volume must be given, got None"),
    ],
)
def test_what_a_field_does_not_allow(settings, match):
    with pytest.raises(ValueError, match=match):
        check_fields(Radio(**settings))


def test_a_setting_without_effect_is_refused():
    check_conditions(Radio(loud=True, echo=0.5))
    remedy = "leave it out or, where a recipe sets it, pass --echo 0.0"
    with pytest.raises(ValueError, match=rf"^echo has an effect only where loud is True; {remedy}$"):
        check_conditions(Radio(echo=0.5))


def test_help_and_docstring_hold_everything():
    fields = {field.name: field for field in dataclasses.fields(Radio)}
    assert fields["volume"].metadata["help"] == "How loud it is. It must be in [0, 11]."
    assert fields["echo"].metadata["help"] == "Seconds of echo. It has an effect only where loud is True."
    assert setting_of(fields["band"]) == Setting("Band of the waves.", (None, "fm", "am"), resume="free")
    assert Radio.__doc__.splitlines()[:3] == ["A radio.", "", "Attributes:"]
    assert "    band: Band of the waves. It must be one of None, fm, am." in Radio.__doc__


def test_a_setting_may_have_to_be_given():
    @dataclass(frozen=True)
    class Named:
        size: int = setting(1, "Its size.")
        name: str = setting(REQUIRED, "Its name.")

    assert Named(name="x").name == "x"
    with pytest.raises(TypeError, match="name"):
        Named()


def test_the_nearest_name_is_suggested():
    assert did_you_mean("lerning_rate", ["beta", "learning_rate"]) == "; did you mean 'learning_rate'?"
    assert did_you_mean("bta", ["beta"], "--{}".format) == "; did you mean --beta?"
    assert did_you_mean("xyz", ["beta"]) == ""
