"""The documentation site: it builds strictly, and loads nothing from elsewhere (slow)."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow
LOADING = {  # tag -> the attribute whose address a browser loads by itself
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    return folder


class Addresses(HTMLParser):
    """Collects what a page loads and what it links to."""

    def __init__(self, page):
        super().__init__()
        self.loaded, self.linked = [], []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if address := attributes.get(LOADING.get(tag)):
            self.loaded.append(address)
        elif tag == "a" and attributes.get("href"):
            self.linked.append(attributes["href"])


def test_every_page_is_whole(site):
    """It loads nothing from elsewhere, its links lead to files of the site, and its Markdown is rendered."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        found = Addresses(page)
        assert found.loaded and not any(re.match(r"\s*(https?:)?//", address) for address in found.loaded), page.name
        for address in found.linked + found.loaded if page.name != "404.html" else ():
            path = unquote(urlsplit(address).path)
            if path and not urlsplit(address).scheme:
                assert (page.parent / path).resolve().is_file(), f"{page.relative_to(site)}: {address}"
        prose = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", page.read_text())
        assert not re.search(r"```|\]\(|\|\s*---|<p>[^<]*\n[-*] ", prose), page.relative_to(site)
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text()), style.name
    assert (site / "repository" / "CONTRIBUTING.html").is_file()
