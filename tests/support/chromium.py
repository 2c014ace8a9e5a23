"""Debian's Chromium, driven by selenium: one browser for all tests of pages, without network use of its own.

As a command it takes the picture of a report that the README shows:

    python tests/support/chromium.py RUN/report.html PICTURE.png
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-default-apps", "--mute-audio", "--hide-scrollbars", "--window-size=1280,900",
)  # fmt: skip


def find(*names):
    """The path of a program that the tests need. Without it they skip, or fail where FASTGRPO_TEST_BROWSER is set."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        told = f"browser tests need {' or '.join(names)}: apt-get install chromium chromium-driver"
        pytest.fail(told) if os.environ.get("FASTGRPO_TEST_BROWSER") else pytest.skip(told)
    return found


class Browser:
    """A browser, with what the tests of pages ask of it."""

    def __init__(self, profile):
        options = Options()
        options.binary_location = find(*BROWSERS)
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(find("chromedriver")))
        self.driver.set_page_load_timeout(60)

    def open(self, page, width=1280, height=900, dark=False):
        """Open a file or an address at a width, and forget what earlier pages asked for and wrote."""
        self.look(width, height, dark)
        self.driver.get("about:blank")
        self.requests(), self.console()
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)
        # The driver may come back while the browser still changes from the process of the blank page to a new one.
        self.until("return document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self, width=1280, height=900, dark=False):
        """Set the size of the window's inside, which may be smaller than a window can be, and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def requests(self):
        """The addresses that the page has asked for since the last call, without data: and blob: addresses."""
        messages = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith(("data:", "blob:", "about:"))]

    def console(self):
        """What the page has written to the console as errors and warnings since the last call."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]

    def run(self, code, *arguments):
        """Run JavaScript, and return what it returns."""
        return self.driver.execute_script(code, *arguments)

    def text(self, selector):
        """The text of an element."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def all(self, selector, what="textContent"):
        """A property of all elements of a selector. A text that is shown (innerText) is empty outside of the window."""
        return self.run(
            "return Array.from(document.querySelectorAll(arguments[0]), e => e[arguments[1]])", selector, what
        )

    def click(self, selector, seconds=30):
        """Click as a person does: the element is scrolled to and must not lie under another one.

        A diagram that is drawn late moves what stands below it, which a person waits for. An element that is still
        covered or outside of the window after this time is a failure.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                return self.driver.find_element("css selector", selector).click()
            except ElementClickInterceptedException:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def type(self, selector, *keys):
        """Type into an element."""
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def choose(self, selector, value):
        """Choose an option of a select."""
        self.click(f'{selector} option[value="{value}"]')

    def until(self, code, seconds=30):
        """Wait until JavaScript returns something true, and return it. Too late is a failure that names the code."""
        end = time.monotonic() + seconds
        while not (found := self.run(code)):
            assert time.monotonic() < end, f"still not true after {seconds} s: {code}"
            time.sleep(0.05)
        return found

    def picture(self, path):
        """Save what the window shows."""
        assert self.driver.save_screenshot(str(path))


@contextmanager
def opened():
    """A browser with a profile of its own, which is deleted with it."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            yield browser
        finally:
            browser.driver.quit()


@pytest.fixture(scope="session")
def chromium():
    """The one browser of all tests. Import it where it is used; its pages are not closed, but left."""
    with opened() as browser:
        yield browser


def main():
    parser = argparse.ArgumentParser(description="Take a picture of a report.")
    parser.add_argument("report", type=Path, help="the HTML that python -m fastgrpo.report RUN wrote")
    parser.add_argument("picture", type=Path, help="the PNG")
    parser.add_argument("--width", type=int, default=1280, help="of the picture in pixels")
    parser.add_argument("--height", type=int, default=1600, help="of the picture in pixels")
    args = parser.parse_args()
    with opened() as browser:
        browser.open(args.report.resolve(), args.width, args.height)
        time.sleep(1)  # plotly draws after the page has loaded
        browser.picture(args.picture)
    print(args.picture)


if __name__ == "__main__":
    main()
