"""docs/settings.md and docs/from-trl.md are what the code says: each setting, and each argument of TRL."""

import dataclasses
import re
import subprocess

from paths import ROOT

from fastgrpo.config.page import from_trl, page, sections
from fastgrpo.config.settings import SelectionConfig, SFTConfig, TrainConfig
from fastgrpo.config.trl import SAME, THEIRS
from fastgrpo.config.validation import on_resume

PAGE = (ROOT / "docs" / "settings.md").read_text()


def test_the_page_is_made_from_the_code():
    assert page() == PAGE, "run `make settings`"


def test_every_setting_has_one_row():
    rows = re.findall(r"^\| `--(\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
    fields = [*dataclasses.fields(TrainConfig)]
    fields += [f for r in (SFTConfig, SelectionConfig) for f in dataclasses.fields(r) if f.name in r.__annotations__]
    assert [name for name, _ in rows] == [field.name for field in fields]
    for field, (_, row) in zip(fields, rows, strict=True):
        cells = [cell.strip() for cell in row.split("|")]
        assert len(cells) == 5 and cells[1] == field.metadata["help"] and cells[4] == on_resume(field.name)


def test_the_page_of_trl_is_made_from_the_code():
    told = (ROOT / "docs" / "from-trl.md").read_text()
    assert from_trl() == told, "run `make settings`"
    for name in (*SAME, *THEIRS):
        assert f"`{name}`" in told, name


def test_every_section_is_introduced_by_a_sentence():
    assert len(sections()) == PAGE.count("\n## ")
    for section in sections():
        assert section.__doc__.splitlines()[0] in PAGE


def test_the_makefile_writes_the_page():
    """What make would run, as make itself reads the file: a rule that is not well formed fails here."""
    planned = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "pages"], capture_output=True, text=True, cwd=ROOT
    )
    assert planned.returncode == 0, planned.stderr
    for command in ("page from-trl > docs/from-trl.md", "page > docs/settings.md"):
        assert f"python -m fastgrpo.config.{command}" in planned.stdout
