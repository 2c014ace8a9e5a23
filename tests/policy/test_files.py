"""The files of a model: which fields are refused, and what cannot be named in them."""

import json
import re

import pytest
import tiny

from fastgrpo.policy.load import loading, read_config, read_json


@pytest.fixture
def folder(tmp_path):
    """Writes the config of a tiny model with some fields changed, and returns its folder."""

    def write(file="config.json", **fields):
        tiny.config().save_pretrained(tmp_path)
        path = tmp_path / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **fields}))
        return tmp_path

    return write


def test_a_config_without_faults_is_read(folder):
    config = read_config(folder())
    assert config.num_hidden_layers == 2 and config._attn_implementation is None


def test_inner_configs_choose_no_implementation(tmp_path):
    kernel = {
        "attn_implementation": "any/kernel",
        "_attn_implementation": "any/kernel",
        "_experts_implementation": "x/y",
    }
    inner = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "head_dim": 8, **kernel}
    config = {"model_type": "gemma3", "text_config": inner, "vision_config": inner, **kernel}
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = read_config(tmp_path)
    for part in (config, config.text_config, config.vision_config, config.get_text_config()):
        assert part._attn_implementation is None and part._experts_implementation is None


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"config.json: quantization_config .*\(fp8\)"),
        ({"rms_norm_eps": "x"}, "config.json: Field 'rms_norm_eps' expected float, got str"),
        ({"model_type": None}, "the config.json of .* cannot be loaded"),
    ],
)
def test_a_field_that_cannot_be_used_is_named_with_its_file(folder, fields, match):
    with pytest.raises(ValueError, match=match):
        read_config(folder(**fields))


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"dtype": None}, {"quantization_config": None}])
def test_what_models_have_is_accepted(folder, fields):
    assert read_config(folder(**fields)).num_hidden_layers == 2


def test_a_file_that_is_not_there_has_no_fields(tmp_path):
    assert read_json(tmp_path, "config.json") == {}
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        read_json(tmp_path / "nowhere", "config.json")


def test_adapters_have_the_config_of_their_base(folder, tmp_path_factory):
    adapters = tmp_path_factory.mktemp("adapters")
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder())}))
    assert read_config(adapters).num_hidden_layers == 2


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), AttributeError("x"), KeyError("x"), EOFError(), OSError("x")]
)
def test_whatever_a_library_raises_names_the_folder(tmp_path, error):
    told = re.escape(f"the model of '{tmp_path}' cannot be loaded (the files may be damaged or incomplete): ")
    with pytest.raises(ValueError, match=told), loading(tmp_path, "model"):
        raise error


@pytest.mark.parametrize("error", [MemoryError(), PermissionError(13, "no"), RuntimeError("Cannot allocate memory")])
def test_what_is_no_fault_of_the_files_passes(tmp_path, error):
    with pytest.raises(type(error)), loading(tmp_path, "model"):
        raise error


def test_code_is_refused_with_the_remedy(tmp_path):
    with (
        pytest.raises(ValueError, match=r"comes with Python code .* --trust_remote_code True"),
        loading("org/name", "x"),
    ):
        raise ValueError("pass trust_remote_code=True")
