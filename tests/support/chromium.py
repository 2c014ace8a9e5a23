"""Debian's Chromium, driven by selenium: one browser for all tests of pages, without network use of its own."""

import json
import os
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

ARGUMENTS = (  # beside those of chromedriver
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-component-update", "--hide-scrollbars",
    "--window-size=1280,900",
)  # fmt: skip


def find(*names):
    """The path of a program that the tests need. Without it they skip, or fail where FASTGRPO_TEST_BROWSER is set."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        told = f"browser tests need {' or '.join(names)}: apt-get install chromium chromium-driver"
        pytest.fail(told) if os.environ.get("FASTGRPO_TEST_BROWSER") else pytest.skip(told)
    return found


class Browser:
    def __init__(self, profile):
        options = Options()
        options.binary_location = find("chromium", "chromium-browser", "google-chrome")
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
        return self.driver.execute_script(code, *arguments)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def all(self, selector, what="textContent"):
        """A property of all elements of a selector. A text that is shown (innerText) is empty outside of the window."""
        code = "return Array.from(document.querySelectorAll(arguments[0]), e => e[arguments[1]])"
        return self.run(code, selector, what)

    def click(self, selector, seconds=30):
        """Scroll to an element and click it. A diagram that is drawn late may cover it for a while."""
        waiting = WebDriverWait(self.driver, seconds, 0.05, [ElementClickInterceptedException])
        waiting.until(lambda driver: driver.find_element("css selector", selector).click() is None)

    def type(self, selector, *keys):
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def choose(self, selector, value):
        self.click(f'{selector} option[value="{value}"]')

    def until(self, code, seconds=30):
        """Wait until JavaScript returns something true, and return it. Too late is a failure that names the code."""
        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: self.run(code), f"still not true: {code}")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """The one browser of all tests, with an empty profile. Import it where it is used."""
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.driver.quit()
