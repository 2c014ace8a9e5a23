"""Packages that one can do without: one that is there, one that is not, and one that is broken."""

import pytest

from fastgrpo.policy.device import package_obstacle


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package_obstacle.cache_clear()
    yield tmp_path
    package_obstacle.cache_clear()


def test_one_that_loads(folder):
    (folder / "package_that_loads.py").write_text("")
    assert package_obstacle("package_that_loads") is None


def test_one_that_is_not_there_comes_with_the_command(folder):
    assert package_obstacle("some_package.inside") == "needs the package: pip install some-package"


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_one_that_does_not_load_is_named_with_the_reason(folder, caplog, error):
    name = f"package_of_{error.lower()}"
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "inside.py").write_text(f"raise {error}('undefined symbol:\\n  _ZN3c10')")
    expected = f"{name} is installed but does not load ({error}: undefined symbol: _ZN3c10); remove it, then pip"
    for _ in range(2):
        assert package_obstacle(f"{name}.inside").startswith(f"needs a package that loads: {expected}")
    assert len(caplog.records) == 1 and caplog.records[0].getMessage().startswith(expected)
