"""The documentation site: it builds strictly, loads nothing from elsewhere, and its search works (slow)."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from chromium import chromium  # noqa: F401
from paths import ROOT

pytestmark = pytest.mark.slow
LOADING = {  # tag -> the attribute whose address a browser loads by itself
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href",
}  # fmt: skip


def build(config, site):
    """Build a site strictly. Returns the exit code and stderr."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    built = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    return built.returncode, built.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    code, said = build(ROOT / "mkdocs.yml", folder)
    assert code == 0, said
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


def test_the_search_works_on_a_page_that_is_opened_from_disk(site, chromium):  # noqa: F811
    chromium.open(site / "api" / "loss.html")
    chromium.type("input.md-search__input", "overlong punishment")
    links = "return Array.from(document.querySelectorAll('.md-search-result__link'), e => e.href)"
    found = chromium.until(f"const found = (() => {{ {links} }})(); return found.length && found", 60)
    assert any("api/rewards.html" in link for link in found)
    assert all(address.startswith("file:") for address in chromium.requests())


def test_a_mistake_stops_the_build(tmp_path):
    """A site of two pages with the configuration of the whole one: each mistake is named."""
    (tmp_path / "docs").mkdir()
    for name in ("docs/hooks.py", "fastgrpo", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in {
        "mkdocs.yml": f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md, api.md]\n",
        "CONTRIBUTING.md": "# Contributing\n\nSee [a page](docs/api.md#names).\n",
        "docs/api.md": "# Names\n\n::: fastgrpo.loss.objective.Objective\n",
        "docs/index.md": "# Start\n\n[A page](gone.md), [a heading](api.md#gone), [code](../gone.py) `[](link.md)`.\n",
        "docs/stray.md": "# No part of the site\n",
    }.items():
        (tmp_path / name).write_text(text)
    code, said = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert code == 1 and "link.md" not in said
    for mistake in ("gone.md", "'#gone'", "../gone.py", "stray.md", "fastgrpo.linear_grpo_loss is public"):
        assert mistake in said, said
