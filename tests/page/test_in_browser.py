"""The page in Debian's Chromium: clicks, typing and visible text; texts of a run are never executed."""

import itertools

import pytest
from chromium import chromium  # noqa: F401, a fixture
from page_runs import NASTY, TOKENS, TOOLS, sample, write_run
from selenium.webdriver.common.keys import Keys

from fastgrpo import report as report_command


def row(step, group, completion, reward, **more):
    rewards = {"right": reward, "<b>short</b>": -reward}
    more = {"prompt": f"sum {step}.{group}", "rewards": rewards, "advantage": reward - 1, "clipped": 0.4, **more}
    return sample(step, reward, group, completion, tokens=5 - reward, **more)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page of two runs: one with tokens and texts that try to do something, an older one without."""
    folder = tmp_path_factory.mktemp("report")
    turns = [{"role": "system", "content": "Add <b>"}, {"role": "tool", "content": "\x1b[2J4"}]
    places = itertools.product((1, 5, 40), (0, 1), (0, 2, 1))
    rows = [row(step, group, f"answer {i} of {step}.{group}", i) for step, group, i in places]
    rows += [row(41, 0, text, i, prompt=turns, mine="<u>extra</u>") for i, text in enumerate(NASTY[:-1])]
    rows += [row(41, 0, NASTY[-1], 4, **TOKENS), row(42, 0, "", 0, **TOOLS), row(42, 0, "b", 1, prompt="own")]
    new = write_run(folder / "<new> run", samples=rows, config={"seed": 42, "beta": 0.01})
    older = [row(step, 0, f"old {step}", 1) for step in (1, 30)]
    old, bare = (write_run(folder / name, samples=rows, config={"seed": 7, "beta": 0.01})
                 for name, rows in (("older", older), ("bare", [])))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_command, "draw_curves", lambda run, **_: run / "curves.png")
        assert report_command.main([*map(str, (new, old, bare)), "--output", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture
def page(chromium, report):  # noqa: F811
    chromium.open(report)
    yield chromium
    assert chromium.console() == []
    assert chromium.run("return typeof window.pwned") == "undefined"


def where(page):
    return page.text(".where").partition(":")[0]


def cards(page):
    return page.all("#samples .completion .text")


def go(page, step, group=0, by="", find=""):
    """Choose a step, a group, the colors and a search."""
    steps = page.all("#samples-step option")
    page.choose("#samples-step", steps.index(str(step)))
    page.choose("#samples-group", group)
    page.choose("#samples-color", by)
    if find:
        search(page, find)
    assert where(page).startswith(f"Step {step}, group {group + 1} ")


def search(page, text):
    page.type("#samples-search", Keys.CONTROL + "a", Keys.NULL, text, Keys.ENTER)


def test_opens_from_disk_without_requests(page, report):
    assert page.requests() == [report.as_uri()]
    assert where(page) == "Step 1, group 1 of 2" and cards(page)[0] == "answer 0 of 1.0"
    # It would not get anything either: its own policy forbids it.
    asked = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('asked'), () => done('refused'))"
    assert page.driver.execute_async_script(asked) == "refused" and page.requests() == []
    assert "violates" in page.console()[0]


def test_a_click_moves_between_steps_groups_and_runs(page):
    page.click("[aria-label='Next step']")
    assert where(page) == "Step 5, group 1 of 2" and cards(page)[1] == "answer 2 of 5.0"
    page.click("[aria-label='Next group']")
    assert where(page) == "Step 5, group 2 of 2" and cards(page)[1] == "answer 2 of 5.1"
    page.click("[aria-label='Next group']")
    page.click("[aria-label='Previous step']")
    page.choose("#samples-group", 0)
    assert where(page) == "Step 1, group 1 of 2"
    page.choose("#samples-step", 2)
    assert where(page) == "Step 40, group 1 of 2" and "sum 40.0" in page.text("#samples .prompt")
    assert page.run("return document.querySelector('.where').getAttribute('role')") == "status"
    page.choose("#samples-run", 1)  # which is at the nearest step, and has no per-token values
    assert where(page) == "Step 30, group 1 of 1" and cards(page) == ["old 30"]
    assert page.all("#samples-color option") == ["nothing"]
    page.choose("#samples-run", 0)
    assert page.all("#samples-color option") == ["nothing", "log-prob", "ratio", "clipped or not"]


def test_completions_are_sorted(page):
    def order():
        return [int(text.split()[1]) for text in cards(page)]

    assert order() == [0, 2, 1]
    names = page.all("#samples-sort option")
    assert names == ["in order of generation", "reward", "advantage", "length", "reward right", "reward <b>short</b>"]
    orders = {"reward:right": [2, 1, 0], "reward:<b>short</b>": [0, 1, 2], "tokens": [0, 1, 2], "order": [0, 2, 1]}
    for value, expected in orders.items():
        page.choose("#samples-sort", value)
        assert order() == expected, value
    page.choose("#samples-sort", "advantage")
    page.click("#samples input[type=checkbox]")
    assert order() == [0, 1, 2]
    # A card keeps its number, and tells its numbers by name.
    assert page.all("#samples .completion h4") == ["Completion 1", "Completion 3", "Completion 2"]
    assert page.all("#samples .completion:first-child .facts :is(dt, dd)") == [
        "reward", "0", "right", "0", "<b>short</b>", "0", "advantage", "−1", "ended by", "stop", "tokens", "5",
        "tokens clipped in the update", "40 %",
    ]  # fmt: skip


def test_completions_of_one_prompt_stand_beside_each_other_for_all_runs(page):
    page.click("#samples-beside")
    shown = """return Array.from(document.querySelectorAll(".column"), (column) =>
      [column.querySelector("h4"), ...column.querySelectorAll(".text")].map((e) => e.textContent));"""
    assert page.run(shown) == [
        ["<new> run, step 1", "answer 0 of 1.0", "answer 2 of 1.0", "answer 1 of 1.0"], ["older, step 1", "old 1"],
    ]  # fmt: skip
    page.click("[aria-label='Next step']")  # no other run has its prompt
    assert [column[0] for column in page.run(shown)] == ["<new> run, step 5"]


def test_a_search_lists_hits_jumps_to_them_and_marks_them(page):
    search(page, "ANSWER 2")
    assert page.text(".told") == "6 texts match."
    assert page.all("#samples .completion mark") == ["answer 2"]
    page.click("#samples .hits li:nth-child(4) button")
    assert where(page) == "Step 5, group 2 of 2"
    assert page.run("return document.activeElement.textContent") == "answer 2 of 5.1"
    search(page, "sum (")
    assert page.text(".told") == "0 texts match." and page.all("#samples .hits li") == []
    search(page, "sum 40.1")
    page.click("#samples .hits button")
    assert where(page) == "Step 40, group 2 of 2" and page.all("#samples .prompt mark") == ["sum 40.1"]
    search(page, "OWN")  # of one completion
    assert page.text(".told") == "1 text matches." and len(page.all("#samples .hits li")) == 1
    page.click("#samples .hits button")
    assert where(page) == "Step 42, group 1 of 1" and page.all("#samples .completion mark") == ["own"]
    page.choose("#samples-run", 2)
    assert where(page) == "There are no samples to show." and all(page.all("#samples .hits, .told", "hidden"))


def test_answers_of_tools_are_greyed_between_drawn_tokens(page):
    for by, tokens in (("", []), ("logps", ["😀", " <add 1>", "", " so", " 2", ""])):
        go(page, 42, by=by)
        assert cards(page) == ["😀 <add 1>[2] so 2[]", "own", "b"]  # a reset has changed a prompt
        assert page.all("#samples .completion .answer") == ["[2]", "[]"]
        assert page.all("#samples .completion .token") == tokens
    assert page.all("#samples .calls tbody td") == [
        "1", 'add {"x": 1}', "2", "250", "2", "<b> {}", "{'error': 'x'}", "1",
    ]  # fmt: skip
    assert page.all("#samples .calls .down") == ["{'error': 'x'}"]


def test_tokens_are_colored_and_tell_their_numbers(page):
    go(page, 41, by="logps")
    spans = "#samples .completion:nth-child(5) .token"
    # Two units of JavaScript make the first character; the last token shows nothing.
    assert page.all(spans) == ["😀", " ", "ja,", " 4", ""]
    assert page.all(spans, "className") == ["token p0", "token p1", "token p3", "token p5", "token p2 empty"]
    assert len(page.all("#samples .legend .token")) == 6
    assert "No per-token values of this kind were logged" in page.text("#samples .completion")
    page.choose("#samples-color", "ratios")
    assert page.all(spans, "className") == ["token r2", "token r0 clip", "token r3", "token r4 clip", "token r2 empty"]
    page.choose("#samples-color", "clipped")
    assert [name.split()[1] for name in page.all(spans, "className")] == ["c0", "c1", "c0", "c1", "c0"]
    told = page.all(spans, "title")
    assert told[1] == "token 2 of 5 · log-prob −0.3 (p 74.08 %) · ratio 0.7 · clipped"
    assert told[4] == "token 5 of 5 · log-prob −1 (p 36.79 %) · ratio 1"


def test_scripts_in_texts_are_shown_and_not_run(page):
    go(page, 41)
    shown = cards(page)
    assert shown[:2] == list(NASTY[:2])
    assert shown[2] == r"\x1b[31mred\x1b[0m \x00 \u202egnp.exe\u202c tab" + "\there\nnew line " + "\\u{e0041}\ufffd."
    fourth = "#samples .completion:nth-child(4)"
    assert len(shown[3]) < 5000 and page.text(f"{fourth} > button") == "Show all 1,000,000 characters"
    assert page.all("#samples .prompt .role") == ["system", "tool"] and "\\x1b[2J4" in page.text("#samples .prompt")
    assert page.all("#samples .completion:first-child dd")[-1] == "<u>extra</u>"
    assert page.all("#samples-run option") == ["<new> run", "older", "bare"]
    for tag in ("img", "svg[onload]", "u", "i", ".text b"):
        assert page.all(f"#samples {tag}") == [], tag


def test_a_button_adds_a_chart(page):
    page.type("#charts .after select", Keys.ARROW_DOWN)
    assert page.all(".more h3") == []
    page.click("#charts .after button")
    assert page.all(".more h3, .more .note") == ["step_time", "seconds of the whole step"]
    assert page.all("#charts .after option") == ["num_tokens"]


def test_lists_settings_that_differ(page):
    names = "#settings tbody tr:not([hidden]) th"
    shown = [name.partition(" ")[0] for name in page.all(names)]
    assert "seed" in shown and "beta" not in shown
    page.click("#settings input[type=checkbox]")
    assert len(page.all(names)) == 4
    page.type("#settings input[type=search]", "see")
    assert [name.partition(" ")[0] for name in page.all(names)] == ["seed"]
