"""The page is whole: every part of its skeleton is filled, and no text of the payload can end its element."""

import json

import pytest

from fastgrpo.page.render import SCRIPTS, asset, render


def payload_of(page):
    return json.loads(page.split('type="application/json">')[1].split("</script>")[0])


def test_every_part_is_filled():
    page = render({"title": "a", "runs": []})
    assert payload_of(page) == {"title": "a", "runs": []}
    for name in ("style.css", *SCRIPTS):
        assert asset(name).strip() in page, name


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "@@scripts@@", "a\u2028b\\ud800"]
)
def test_text_stays_text(text):
    page = render({"title": text})
    assert payload_of(page)["title"] == text and page.count("<!--<script>") == render({}).count("<!--<script>")
    assert page.count("alert(1)</script>") == 0


def test_elements_are_made_in_one_place():
    """Two functions of one name would differ sooner or later."""
    made = [name for name in SCRIPTS if "document.createElement(" in asset(name)]
    assert made == ["page.js"] == list(SCRIPTS[:1])


def test_numbers_that_json_has_not_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"title": float("nan")})


def test_half_a_character_is_an_escape():
    page = render({"title": "a\ud800b", "runs": []})
    assert page.encode("utf-8") and "a\\ud800b" in page
