"""The wheel holds every wing, the kernels under fastgrpo.kernels, and the recipes; all of it imports from there.

An editable install works from a script beside the clone too, whose folder has the package's name.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from paths import ROOT


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what setup.py reads, in a folder named fastgrpo, so that nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("packaging") / "fastgrpo"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fastgrpo", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(clone):
    """The folder of an unpacked wheel."""
    folder = clone.parent
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(clone)]
    result = subprocess.run(build, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    unpacked = folder / "unpacked"
    zipfile.ZipFile(built).extractall(unpacked)
    return unpacked


def run_python(wheel, code):
    """A fresh interpreter outside of the checkout, the wheel ahead of any other fastgrpo."""
    environment = {**os.environ, "PYTHONPATH": str(wheel), "PYTHONSAFEPATH": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=wheel.parent, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def files(folder, pattern):
    return {str(path.relative_to(folder)) for path in folder.rglob(pattern)}


def test_every_file_of_the_checkout_is_in_the_wheel(wheel):
    """A folder without __init__.py is no package to find_packages and would stay behind."""
    expected = {f"fastgrpo/{path}" for path in files(ROOT / "fastgrpo", "*.py")}
    expected |= {f"fastgrpo/kernels/{path}" for path in files(ROOT / "kernels", "*.py")}
    assert files(wheel, "*.py") == expected
    recipes = {f"fastgrpo/recipes/{path}" for path in files(ROOT / "fastgrpo" / "recipes", "*.yaml")}
    assert recipes and files(wheel, "*.yaml") == recipes


def test_every_wing_is_in_the_wheel(wheel):
    wings = {path.name for path in (ROOT / "fastgrpo").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert len(wings) >= 10
    assert wings | {"kernels", "recipes"} == {path.name for path in (wheel / "fastgrpo").iterdir() if path.is_dir()}
    assert all((wheel / "fastgrpo" / wing / "__init__.py").exists() for wing in wings)


def test_nothing_else_is_in_the_wheel(wheel):
    assert {path.name.split("-")[0] for path in wheel.iterdir()} == {"fastgrpo"}
    assert not (wheel / "kernels").exists()


def test_every_module_imports_from_the_wheel(wheel):
    modules = sorted(
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in files(wheel, "*.py")
    )
    code = f"""
import importlib
for name in {modules!r}:
    print(importlib.import_module(name).__file__)
"""
    assert all(Path(path).is_relative_to(wheel) for path in run_python(wheel, code))


def test_the_kernels_are_the_wheels_own(wheel):
    code = """
import fastgrpo, fastgrpo.kernels.chunked as chunked
print(chunked.__file__, *fastgrpo.__path__)
"""
    package = str(wheel / "fastgrpo")
    assert run_python(wheel, code) == [f"{package}/kernels/chunked.py", package]


def test_the_loss_runs_from_the_wheel(wheel):
    code = """
import torch, fastgrpo
hidden = torch.ones(2, 3, requires_grad=True)
fastgrpo.linear_grpo_loss(hidden, torch.eye(4, 3), torch.tensor([0, 1]), torch.ones(2)).loss.backward()
print(hidden.grad.isfinite().all().item(), fastgrpo.__version__)
"""
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    version = next(line.split()[1] for line in metadata.read_text().splitlines() if line.startswith("Version:"))
    assert run_python(wheel, code) == ["True", version]


def test_a_script_beside_the_clone_imports_the_package(clone):
    """The clone's folder `fastgrpo` on the script's path must not be taken for a namespace package."""
    folder = clone.parent
    venv.create(folder / "venv", symlinks=True)
    site_packages = next((folder / "venv").glob("lib/python*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    install += ["--disable-pip-version-check", "--target", str(site_packages), "--editable", str(clone)]
    result = subprocess.run(install, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (site_packages / "zz-torch.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    (folder / "script.py").write_text(
        "from fastgrpo import GRPOConfig, linear_grpo_loss\n"
        "import fastgrpo, fastgrpo.kernels.chunked\n"
        "print(GRPOConfig(beta=0.5).beta, fastgrpo.__file__)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [folder / "venv" / "bin" / "python", "script.py"], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert result.stdout.split() == ["0.5", str(clone / "fastgrpo" / "__init__.py")], result.stderr
