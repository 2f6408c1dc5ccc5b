# SPDX-License-Identifier: Apache-2.0
"""The page of `carryforward inspect` in headless Chromium, driven by selenium. `make test-all` installs both."""

import os
import shutil
import time
from itertools import pairwise

import pytest
from helpers.html_reports import MARKUP, random_report

webdriver = pytest.importorskip("selenium.webdriver", reason="make test-all: it installs selenium")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="make test-all: it installs Chromium and its driver")
COUNT = 50_000


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # Chromium's sandbox does not run as root
        options.add_argument("--no-sandbox")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Gains and pieces of a text of 50,000 tokens, and the address of its page."""
    pieces = [*MARKUP, *(f" word{i}" if i % 3 else f" w{i}." for i in range(190))]
    tokens, pieces, page = random_report(COUNT, window=300, pieces=pieces)
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page, encoding="utf-8", newline="")
    return tokens, pieces, path.as_uri()


@pytest.fixture
def opened(browser, report):
    """The browser with the page just opened, and the report's gains and pieces."""
    tokens, pieces, address = report
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [_scheme("light")]})
    browser.get(address)
    # keys that arrive before the first paint are dropped
    assert wait_for(lambda: split_tokens(browser)[0])
    yield browser, tokens, pieces
    assert browser.get_log("browser") == [], "the console stays empty"


def _scheme(name):
    return {"name": "prefers-color-scheme", "value": name}


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


def focused(browser):
    """The token that has the focus, or None."""
    return browser.execute_script(
        "return document.activeElement.dataset.i === undefined ? null : Number(document.activeElement.dataset.i)"
    )


def card(browser):
    return browser.execute_script("return document.getElementById('card').innerText")


def split_tokens(browser):
    """The number of token elements, and the windows that have some."""
    return browser.execute_script(
        "return [document.querySelectorAll('.token').length,"
        " [...document.querySelectorAll('.window')].flatMap((s, w) => s.querySelector('.token') ? [w] : [])]"
    )


def wait_for(condition):
    """Wait until a condition is true: observers run after the next frame."""
    for _ in range(100):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_texts_are_not_interpreted_as_markup(opened):
    browser, _, pieces = opened
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.text')].map((text) => text.textContent).join('')"
    )
    assert shown == "".join(pieces).replace("\0", "\ufffd"), "every character, in token elements or not"
    assert browser.title.startswith("<script>document.title='2'</script>"), "no script in text or title has run"
    assert browser.execute_script("return document.scripts.length") == 2
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.querySelectorAll('main b:not(.mark b), main img').length") == 0
    for panel in ("by-position", "by-window", "attention", "weights"):
        assert (
            browser.execute_script(f"return document.querySelector('#{panel} svg').getBoundingClientRect().height") > 50
        )


def test_long_words_and_narrow_screens_do_not_overflow(opened):
    browser, *_ = opened
    browser.execute_script("document.querySelector('.entry span').textContent = 'long'.repeat(600)")
    overflow = "const node = document.querySelector(arguments[0]); return node.scrollWidth - node.clientWidth"
    assert browser.execute_script(overflow, ".panels") <= 0
    size = browser.get_window_size()
    browser.set_window_size(500, 800)
    try:
        assert browser.execute_script(overflow, "html") <= 0
    finally:
        browser.set_window_size(size["width"], size["height"])


LABELS = """
const range = document.createRange();
return [...document.querySelectorAll("#scale span")].map((span) => {
  range.selectNodeContents(span);
  const box = range.getBoundingClientRect();
  return [box.left, box.right];
}).filter(([left, right]) => right > left)
"""


@pytest.mark.parametrize("width", [420, 360, 700, 1400])
def test_labels_of_the_colour_scale_do_not_overlap(opened, width):
    browser, *_ = opened
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        labels = browser.execute_script(LABELS)
        assert len(labels) >= 7
        assert all(right <= left for (_, right), (left, _) in pairwise(labels))
        assert all(left >= 0 and right <= width for left, right in labels)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        link = "const link = document.querySelector('.to-text'); return link.getBoundingClientRect().width > 0"
        assert browser.execute_script(link) == (width < 1080), "figures stand before the text: a link leads past them"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_only_windows_near_the_viewport_have_token_elements(opened):
    browser, tokens, _ = opened
    count, windows = split_tokens(browser)
    assert windows[0] == 0
    assert count < 5_000
    last = len(tokens.windows) - 1
    browser.execute_script("document.querySelector('.window:last-child').scrollIntoView({behavior: 'instant'})")
    assert wait_for(lambda: last in split_tokens(browser)[1] and 0 not in split_tokens(browser)[1])
    assert split_tokens(browser)[0] < 5_000


def test_pointing_at_a_token_shows_its_figures(opened):
    browser, tokens, pieces = opened
    i = next(i for i in range(301, COUNT) if pieces[i].startswith(" word"))
    press(browser, "n", "n")
    token = browser.find_element("css selector", f'[data-i="{i}"]')
    ActionChains(browser).move_to_element(token).perform()
    shown = card(browser)
    assert shown.startswith(pieces[i].strip())
    assert f"window 2, token {i - 300}" in shown
    gain = tokens.gain[i]
    assert f"{abs(gain):.2f}" in shown or f"{abs(gain) - 0.005:.2f}" in shown
    for side in (tokens.with_state, tokens.without):
        assert all(f"<b>{alternative}</b></script>" in shown for alternative in side.top_ids[i])
    classes = token.get_attribute("class").split()
    strong = abs(gain) >= 0.08 * browser.execute_script(
        "return JSON.parse(document.getElementById('data').textContent).scale"
    )
    assert ("helped" in classes) == (strong and gain > 0)
    assert ("hurt" in classes) == (strong and gain < 0)


def test_navigation_by_keyboard(opened):
    browser, tokens, _ = opened
    press(browser, Keys.ARROW_RIGHT)
    assert focused(browser) == 0
    assert "The first token is not predicted" in card(browser)
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focused(browser) == 2
    assert "log-probability" in browser.execute_script("return document.activeElement.getAttribute('aria-label')")
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press(browser, Keys.ARROW_LEFT)
    assert focused(browser) == 1
    press(browser, Keys.ARROW_DOWN)
    below = focused(browser)
    assert below > 1
    press(browser, Keys.ARROW_UP)
    assert focused(browser) < below
    press(browser, "n")
    assert focused(browser) == tokens.windows[1].score_from
    press(browser, "n", "n", "p")
    assert focused(browser) == tokens.windows[2].score_from
    assert browser.execute_script(
        "const box = document.activeElement.getBoundingClientRect(); return box.top > 0 && box.bottom < innerHeight"
    )
    press(browser, "+")
    helped = focused(browser)
    assert helped > tokens.windows[2].score_from
    press(browser, "-")
    assert focused(browser) > helped
    assert tokens.gain[helped] > 0 > tokens.gain[focused(browser)]
    press(browser, Keys.ESCAPE)
    assert focused(browser) is None


def test_the_list_of_keys(opened):
    browser, *_ = opened
    shown = "return document.getElementById('help').open"
    press(browser, "?")
    assert browser.execute_script(shown)
    press(browser, "n")
    assert focused(browser) is None, "keys do not reach the text while the list is open"
    press(browser, Keys.ESCAPE)
    assert not browser.execute_script(shown)
    browser.find_element("id", "help-button").click()
    assert browser.execute_script(shown)


def test_light_and_dark(opened):
    browser, *_ = opened

    def brightness():
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    light = brightness()
    press(browser, "t")
    dark = brightness()
    assert dark < 200 < 600 < light
    browser.find_element("id", "theme").click()
    assert brightness() == light
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [_scheme("dark")]})
    assert brightness() == light, "the choice overrides the system's setting"
    browser.refresh()
    assert brightness() == dark


def test_clicks_on_words_and_bars_go_to_the_text(opened):
    browser, tokens, pieces = opened
    entry = browser.find_element("css selector", "#words .entry")
    word = entry.find_element("css selector", "span").text
    entry.click()
    assert word.casefold() in pieces[focused(browser)].casefold()
    bar = browser.find_elements("css selector", "#by-window .bar")[10]
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", bar)
    assert focused(browser) == tokens.windows[11].score_from
    assert "now" in bar.get_attribute("class")
