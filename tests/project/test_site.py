"""The documentation site: it builds strictly, loads nothing from elsewhere, and documents every public name."""

import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from chromium import BROWSERS, find
from mkdocstrings import Inventory
from paths import ROOT
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

PUBLIC = ("fastgrpo", *(f"fastgrpo.{wing}" for wing in ("config", "data", "rewards", "trainer")))
LOADING = {  # tag -> the attribute whose address a browser loads by itself
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href",
}  # fmt: skip


def build(config, site):
    """Build a site in a process of its own, strictly. Returns the exit code and what it said."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    built = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    return built.returncode, built.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
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


def is_elsewhere(address):
    return bool(re.match(r"\s*(https?:)?//", address))


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        found = Addresses(page)
        assert found.loaded and not [address for address in found.loaded if is_elsewhere(address)], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text()), style.name


def test_links_lead_to_files_of_the_site(site):
    """Those to sources and pictures of the repository too, which the site shows itself."""
    found = set()
    for page in site.rglob("*.html"):
        addresses = Addresses(page)
        for address in addresses.linked + addresses.loaded:
            path = unquote(urlsplit(address).path)
            if path and not urlsplit(address).scheme and page.name != "404.html":
                target = (page.parent / path).resolve()
                assert target.is_file(), f"{page.relative_to(site)}: {address}"
                found.add(target.relative_to(site).as_posix())
    shown = {"repository/CONTRIBUTING.html", "repository/benchmarks/results/bandit.png", "examples/plain_loop.py.html"}
    assert shown <= found
    code = re.sub("<[^>]*>", "", (site / "examples" / "plain_loop.py.html").read_text())
    assert "import torch" in code


def test_markdown_is_rendered_as_it_is_meant(site):
    """mkdocs reads some of what other programs take for a block, a table or a list as plain text."""
    for page in site.rglob("*.html"):
        prose = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", page.read_text())
        assert not re.search(r"```|\]\(|\|\s*---|<p>[^<]*\n[-*] ", prose), page.relative_to(site)


def test_public_names_have_their_place_and_their_docstring(site):
    """What `__all__` of a public package names when it is imported, not what the site's builder took for public."""
    with open(site / "objects.inv", "rb") as file:
        places = Inventory.parse_sphinx(file)
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in set(module.__all__) - {"__version__"}:
            thing = getattr(module, name)
            path = f"{thing.__module__}.{thing.__qualname__}"
            assert thing.__doc__, path
            assert path in places and f"{package}.{name}" in places, path
            page, _, anchor = places[path].uri.partition("#")
            assert f'id="{anchor.replace("$", path)}"' in (site / page).read_text(), path


def test_the_search_finds_prose_and_names(site):
    """The index is a script beside the pages, so that it is read without a server."""
    texts = json.loads((site / "search" / "search_index.js").read_text().removeprefix("var __index = "))["docs"]
    places = {text["location"] for text in texts}
    assert {"loss.html", "api/loss.html#fastgrpo.linear_grpo_loss"} <= places
    assert not any(place.startswith("repository/") and ".py" in place for place in places)


@pytest.fixture
def driver():
    """A browser that writes down what a page asks for."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    options.binary_location = find(*BROWSERS)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(find("chromedriver")))
    yield driver
    driver.quit()


def test_the_search_works_on_a_page_that_is_opened_from_disk(site, driver):
    driver.get((site / "api" / "loss.html").as_uri())
    driver.find_element("css selector", "input.md-search__input").send_keys("overlong punishment")
    found = WebDriverWait(driver, 60).until(lambda d: d.find_elements("css selector", ".md-search-result__link"))
    assert any("objectives.html" in link.get_attribute("href") for link in found)
    messages = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked and not [address for address in asked if not address.startswith(("file:", "data:", "blob:"))]
    assert not [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]


def test_what_is_broken_stops_the_build(tmp_path):
    """A site of two pages with the configuration of the whole one: each mistake is named, and the build fails."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("docs/hooks.py", "fastgrpo", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md, api.md, hour.md]\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n\nSee [a page](docs/api.md#names).\n")
    (docs / "api.md").write_text("# Names\n\n::: fastgrpo.loss.objective.Objective\n")
    (docs / "index.md").write_text(
        "# Start\n\nTo [a page](gone.md), [a heading](api.md#gone), [a file](../fastgrpo/gone.py), "
        "[a page outside](../CONTRIBUTING.md#gone), [code](../setup.py) and `[no](link.md)`.\n"
    )
    (tmp_path / "setup.py").write_text("print('a page of code')\n")
    (docs / "stray.md").write_text("# No part of the site\n")
    outputs = [{"output_type": "stream", "text": ["1\n", "2\n"]}, {"data": {"image/png": "iVBORw0KGgo="}}]
    cells = [
        {"cell_type": "markdown", "source": ["# An hour\n", "\n", "To [a page](lost.md) and [code](../setup.py)."]},
        {"cell_type": "code", "source": ["print(1)\n", "print(2)"], "outputs": outputs},
    ]
    (docs / "hour.ipynb").write_text(json.dumps({"cells": cells}))
    code, said = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert code == 1
    hour = (tmp_path / "site" / "hour.html").read_text()
    assert "data:image/png;base64,iVBORw0KGgo=" in hour and 'href="repository/setup.py.html"' in hour
    assert "print(1)\nprint(2)" in re.sub("<[^>]*>", "", hour) and "1\n2\n" in re.sub("<[^>]*>", "", hour)
    assert (tmp_path / "site" / "hour.ipynb").is_file()
    for mistake in (
        "docs/index.md links to gone.md, which is not there",
        "docs/hour.ipynb links to lost.md, which is not there",
        "'api.md' does not contain an anchor '#gone'",
        "docs/index.md links to ../fastgrpo/gone.py, which is not there",
        "'repository/CONTRIBUTING.md' does not contain an anchor '#gone'",
        "stray.md",
        "fastgrpo.linear_grpo_loss is public, and no page of docs/api documents it",
    ):
        assert mistake in said, said
    assert "setup.py" not in said and "link.md" not in said
