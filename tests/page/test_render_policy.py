"""What a page may do, and how texts of a run reach it: as JSON that no script element and no style can be ended by."""

import base64
import hashlib
import json
import re

import pytest

from fastgrpo.page.render import SCRIPTS, asset, policy, render


@pytest.fixture(scope="module")
def page():
    texts = [
        "</script><script>1</script>",
        "<!--<script>",
        "]]>",
        "&lt;",
        "\u2028",
        "@@styles@@",
        "@@policy@@",
        "\\u003c",
    ]
    return texts, render({"title": "", "runs": texts})


def test_texts_come_back_and_hold_nothing_that_html_reads(page):
    texts, html = page
    [held] = re.findall(r'<script id="payload" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert json.loads(held)["runs"] == texts
    assert not re.search("[<>&\u2028]", held)


def test_only_the_scripts_that_are_there_may_run(page):
    scripts = re.findall(r"<script>(.*?)</script>", page[1], re.DOTALL)
    assert len(scripts) == 2 and len(scripts[0]) > 1_000_000 and asset("samples.js") in scripts[1]
    for script in scripts:
        code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{code}'" in policy(page[1])
    assert f'content="{policy(page[1])}"' in page[1]
    assert "unsafe-eval" not in policy(page[1]) and policy(page[1]).startswith(
        "default-src 'none'; script-src 'sha256-"
    )


def test_nothing_is_loaded_from_elsewhere_and_no_data_becomes_html(page):
    """plotly's bundle holds addresses of its own, so the files that are written here are looked at, not the page."""
    for name in ("style.css", *SCRIPTS, "page.html"):
        text = asset(name)
        addresses = set(re.findall(r"https?://[^\s\"'`]+", text)) - {"http://www.w3.org/2000/svg"}  # a name of XML
        assert not addresses and not re.search(r"url\(|@import", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
