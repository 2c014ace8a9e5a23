"""The documentation site: it builds strictly, and loads nothing from elsewhere (slow)."""

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow
LOADED = r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*?\s(?:src|href|data)=[\"']?([^\"'\s>]+)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    return folder


def test_every_page_is_whole(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(LOADED, page.read_text())
        assert loaded and not any(re.match(r"(https?:)?//", address) for address in loaded), page.name
        prose = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", page.read_text())
        assert not re.search(r"```|\]\(|\|\s*---|<p>[^<]*\n[-*] ", prose), page.relative_to(site)
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text()), style.name
    assert (site / "repository" / "CONTRIBUTING.html").is_file()
