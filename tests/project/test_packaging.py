"""The wheel, built from the sdist, holds what it should and works where pip installs it (slow)."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest
import tiny
import torch
from paths import ROOT

TOP = ("setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Built from a copy of what setup.py reads, in a folder named fastgrpo: nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("packaging") / "fastgrpo"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fastgrpo", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in TOP:
        shutil.copy(ROOT / name, source)
    folder = source.parent / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(build, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    unpacked = built.parent / "unpacked"
    (packed,) = built.glob("*.whl")
    zipfile.ZipFile(packed).extractall(unpacked)
    return unpacked


def files(folder, pattern):
    return {str(path.relative_to(folder)) for path in folder.rglob(pattern)}


@pytest.mark.slow
def test_the_distributions_hold_the_code_and_nothing_else(built, wheel):
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    code = {f"fastgrpo/{path}" for path in files(ROOT / "fastgrpo", "*.py")}
    kernels = files(ROOT / "kernels", "*.py")
    assert held >= set(TOP) | code | {f"kernels/{path}" for path in kernels}
    assert files(wheel, "*.py") == code | {f"fastgrpo/kernels/{path}" for path in kernels}
    recipes = {f"fastgrpo/recipes/{path}" for path in files(ROOT / "fastgrpo" / "recipes", "*.yaml")}
    assert recipes and files(wheel, "*.yaml") == recipes
    assert {path.name.split("-")[0] for path in wheel.iterdir()} == {"fastgrpo"}


def run_in(python, folder, *arguments):
    """Run the Python of an environment in a folder; what the shell says of Python does not count."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


LOSS = """
import torch, fastgrpo
hidden, head = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
targets, old = torch.randint(11, (2, 5)), -torch.rand(2, 5)
knobs = {"old_logps": old, "ref_logps": old, "beta": 0.04}
out = fastgrpo.linear_grpo_loss(hidden, head, targets, torch.tensor([1.0, -1.0]), **knobs)
out.loss.backward()
print(bool(hidden.grad.any() and head.grad.any() and out.loss.isfinite()))
"""
SMALL_JOB = (
    "-m", "fastgrpo.train", "--model_name_or_path", "model", "--output_dir", "run", "--max_steps", "2",
    "--prompts_per_step", "2", "--num_generations", "2", "--max_completion_length", "4", "--max_eval_samples", "2",
    "--report_to", "tensorboard",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "[train]"], ids=["torch and triton only", "train"])
def test_an_installation(built, tmp_path, extra):
    """pip fetches everything, as for a user; PIP_EXTRA_INDEX_URL may name the index of PyTorch's CPU builds."""
    (packed,) = built.glob("*.whl")
    venv.create(tmp_path / "env", symlinks=True, with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    command = ("-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"torch=={torch.__version__}")
    done = run_in(python, tmp_path, *command, f"fastgrpo{extra} @ {packed.as_uri()}")
    assert done.returncode == 0, done.stderr
    assert run_in(python, tmp_path, "-c", LOSS).stdout == "True\n"
    tiny.save(tmp_path / "model")
    job = run_in(python, tmp_path, *SMALL_JOB)
    others = "pytest", "trl", "lightning", "peft", "accelerate", "kernels", "tests"
    if extra:
        assert job.returncode == 0, job.stderr
        assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").stat().st_size > 0
        assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
        assert any((tmp_path / "run" / "tensorboard").iterdir())
    else:
        others += "numpy", "transformers", "datasets", "tokenizers", "psutil"
        assert job.returncode == 2 and "pip install 'fastgrpo[train]'" in job.stderr, job.stderr
    look = f"import importlib.util; print([name for name in {others!r} if importlib.util.find_spec(name)])"
    assert run_in(python, tmp_path, "-c", look).stdout == "[]\n"


@pytest.mark.slow
def test_installing_changes_no_newer_torch_or_triton(built, tmp_path, monkeypatch):
    venv.create(tmp_path / "env", symlinks=True, with_pip=True)
    site_packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    for name, version, needs in (("torch", "2.15.0", "Requires-Dist: triton~=3.9.0\n"), ("triton", "3.9.0", "")):
        folder = site_packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        (folder / "RECORD").write_text("")
        (folder / "INSTALLER").write_text("pip")
    (packed,) = built.glob("*.whl")
    extras = f"fastgrpo[train,lora,quantization,rewards] @ {packed.as_uri()}"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # which may cap torch
    command = ("-m", "pip", "install", "--dry-run", "--quiet", "--report", "plan.json", extras)
    done = run_in(tmp_path / "env" / "bin" / "python", tmp_path, *command)
    assert done.returncode == 0, done.stderr
    plan = [item["metadata"] for item in json.loads((tmp_path / "plan.json").read_text())["install"]]
    versions = {item["name"]: item["version"] for item in plan}
    assert "fastgrpo" in versions and not {"torch", "triton"} & {*versions}
    assert versions["transformers"] != "5.24.0"
