"""Settings survive a round trip through flags, YAML, JSON, and the parsers of transformers."""

import dataclasses
import json
from typing import Literal, get_args, get_origin

import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from trl import ScriptArguments, TrlParser

from fastgrpo import GRPOConfig
from fastgrpo.config.fields import bare, hints
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import TrainConfig

# Settings that others have an effect with only.
ENABLING = {
    "use_peft": True, "beta": 0.1, "sync_ref_model": True, "use_adaptive_entropy": True, "log_completions": True,
    "metric_for_best_model": "reward", "importance_sampling_mode": "token_mask", "loss_type": "sapo",
    "report_to": ("wandb", "trackio"),
}  # fmt: skip
# tyro reads the word None as None where a setting may be that, and takes a word after a dash for a flag.
WORDS = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text and text[0] != "-" and text != "None"
)
NUMBERS = st.one_of(st.integers(0, 5), st.floats(1e-9, 1e6), st.sampled_from([0.1, 1.0, 2.0, 1e-30, 1e6, 2**40]))
KEYWORDS = st.dictionaries(WORDS, st.one_of(st.none(), st.booleans(), st.integers(), WORDS), max_size=2)


def values_of(name):
    kind, whole = bare(hints(TrainConfig)[name]), hints(TrainConfig)[name]
    if name.endswith("_kwargs"):
        found = KEYWORDS.map(json.dumps)
        if name == "reward_model_kwargs":
            found = st.dictionaries(st.sampled_from(["device", "separator"]), WORDS).map(json.dumps)
    elif get_origin(kind) is Literal:
        found = st.sampled_from(get_args(kind))
    elif get_origin(kind) is list:
        item = bare(get_args(kind)[0])
        choices = get_args(item) if get_origin(item) is Literal else None
        item = st.sampled_from(choices) if choices else NUMBERS if item is float else WORDS
        found = st.lists(item, min_size=1, max_size=3).map(tuple)
    else:
        found = {bool: st.booleans(), int: NUMBERS.map(int), float: NUMBERS.map(float)}.get(kind, WORDS)
    return found | st.none() if type(None) in get_args(whole) else found


@st.composite
def stated(draw):
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    chosen = draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    given = {name: value for name, value in ENABLING.items() if draw(st.booleans())}
    given |= {name: draw(values_of(name)) for name in chosen}
    try:
        TrainConfig(**given)
    except ValueError:
        assume(False)
    return given


def flags(given):
    for name, value in given.items():
        if isinstance(value, tuple):
            yield from (f"--{name}", *map(str, value))
        else:
            yield f"--{name}={value}"


def test_settings_come_back_from_flags_and_yaml(tmp_path):
    path = tmp_path / "mine.yaml"

    @settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
    @given(stated(), st.data())
    def turn(given, data):
        config = TrainConfig(**{"task": "dataset", **given})
        every = dataclasses.asdict(config)
        assert TrainConfig(**json.loads(json.dumps(every))) == config  # as config.json of a run holds it
        in_file = set(data.draw(st.lists(st.sampled_from(sorted(every)), unique=True), "in the file"))
        path.write_text(yaml.safe_dump({name: list(v) if isinstance(v, tuple) else v for name, v in every.items()
                                        if name in in_file}, allow_unicode=True))  # fmt: skip
        rest = {name: value for name, value in every.items() if name not in in_file}
        assert parse([*flags(rest), "--config", str(path)], TrainConfig) == config

    turn()


@dataclasses.dataclass
class OwnArguments:
    note: str = "none"


def test_the_parser_of_trl_reads_a_file_and_flags(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("beta: 0.04\nlearning_rate: 5e-5\nreport_to: [tensorboard]\nnote: x\nlora_target_modules: all\n"
                    "use_peft: true\n")  # fmt: skip
    argv = ["--config", str(path), "--num_generations", "4"]
    own, config = TrlParser((OwnArguments, GRPOConfig)).parse_args_and_config(argv)
    assert own.note == "x" and config == GRPOConfig(
        beta=0.04, learning_rate=5e-5, report_to="tensorboard", num_generations=4, use_peft=True,
        lora_target_modules="all",
    )  # fmt: skip
    argv = ["--dataset_name", "a/b", "--beta", "0.1"]  # ScriptArguments names the data set, so GRPOConfig must not
    script, config = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config(argv)
    assert script.dataset_name == "a/b" and config == GRPOConfig(beta=0.1)
