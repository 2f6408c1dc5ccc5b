# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: headless Chromium, driven by selenium. Skipped where one of the two is missing."""

import os
import shutil
import time

import pytest
from test_html_report import NASTY, invented

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser: pip install selenium")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with its driver here: apt-get install chromium chromium-driver"
)
COUNT = 50_000


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # Chromium's sandbox is not for root
        options.add_argument("--no-sandbox")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    """Figures and pieces of a text of 50,000 tokens, and where its page is."""
    pieces = [*NASTY, *(f" word{i}" if i % 3 else f" w{i}." for i in range(190))]
    found, pieces, made = invented(COUNT, window=300, pieces=pieces)
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(made, encoding="utf-8", newline="")
    return found, pieces, path.as_uri()


@pytest.fixture
def opened(browser, inspected):
    """The page, just opened, and what is known of it."""
    found, pieces, address = inspected
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [_scheme("light")]})
    browser.get(address)
    # keys that come before anything is painted are dropped
    assert settled(lambda: filled(browser)[0])
    yield browser, found, pieces
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


def filled(browser):
    """How many tokens are elements, and the windows they are in."""
    return browser.execute_script(
        "return [document.querySelectorAll('.token').length,"
        " [...document.querySelectorAll('.window')].flatMap((s, w) => s.querySelector('.token') ? [w] : [])]"
    )


def settled(wanted):
    """Wait until something is so; observers run after the next frame."""
    for _ in range(100):
        if wanted():
            return True
        time.sleep(0.02)
    return False


def test_what_is_text_stays_text(opened):
    browser, _, pieces = opened
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.text')].map((one) => one.textContent).join('')"
    )
    assert shown == "".join(pieces).replace("\0", "\ufffd"), "character by character, cut into tokens or not"
    assert browser.title.startswith("<script>document.title='2'</script>"), "no script in text or title has run"
    assert browser.execute_script("return document.scripts.length") == 2
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.querySelectorAll('main b:not(.mark b), main img').length") == 0
    for panel in ("by-position", "by-window", "attention", "weights"):
        assert (
            browser.execute_script(f"return document.querySelector('#{panel} svg').getBoundingClientRect().height") > 50
        )


def test_a_long_word_and_a_narrow_screen_push_nothing_out(opened):
    browser, *_ = opened
    browser.execute_script("document.querySelector('.entry span').textContent = 'long'.repeat(600)")
    wider = "const one = document.querySelector(arguments[0]); return one.scrollWidth - one.clientWidth"
    assert browser.execute_script(wider, ".panels") <= 0
    size = browser.get_window_size()
    browser.set_window_size(500, 800)
    try:
        assert browser.execute_script(wider, "html") <= 0
    finally:
        browser.set_window_size(size["width"], size["height"])


def test_only_what_is_near_is_cut_into_tokens(opened):
    browser, found, _ = opened
    count, windows = filled(browser)
    assert windows[0] == 0
    assert count < 5_000
    last = len(found.windows) - 1
    browser.execute_script("document.querySelector('.window:last-child').scrollIntoView({behavior: 'instant'})")
    assert settled(lambda: last in filled(browser)[1] and 0 not in filled(browser)[1])
    assert filled(browser)[0] < 5_000


def test_pointing_at_a_token_shows_its_figures(opened):
    browser, found, pieces = opened
    i = next(i for i in range(301, COUNT) if pieces[i].startswith(" word"))
    press(browser, "n", "n")
    token = browser.find_element("css selector", f'[data-i="{i}"]')
    ActionChains(browser).move_to_element(token).perform()
    told = card(browser)
    assert told.startswith(pieces[i].strip())
    assert f"window 2, token {i - 300}" in told
    gain = found.gain[i]
    assert f"{abs(gain):.2f}" in told or f"{abs(gain) - 0.005:.2f}" in told
    for side in (found.with_state, found.without):
        assert all(f"<b>{token}</b></script>" in told for token in side.top_ids[i])
    classes = token.get_attribute("class").split()
    strong = abs(gain) >= 0.08 * browser.execute_script(
        "return JSON.parse(document.getElementById('data').textContent).scale"
    )
    assert ("helped" in classes) == (strong and gain > 0)
    assert ("hurt" in classes) == (strong and gain < 0)


def test_the_keyboard_is_enough(opened):
    browser, found, _ = opened
    press(browser, Keys.ARROW_RIGHT)
    assert focused(browser) == 0
    assert "Nothing stands before it" in card(browser)
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
    assert focused(browser) == found.windows[1].score_from
    press(browser, "n", "n", "p")
    assert focused(browser) == found.windows[2].score_from
    assert browser.execute_script(
        "const box = document.activeElement.getBoundingClientRect(); return box.top > 0 && box.bottom < innerHeight"
    )
    press(browser, "+")
    helped = focused(browser)
    assert helped > found.windows[2].score_from
    press(browser, "-")
    assert focused(browser) > helped
    assert found.gain[helped] > 0 > found.gain[focused(browser)]
    press(browser, Keys.ESCAPE)
    assert focused(browser) is None


def test_a_list_of_keys(opened):
    browser, *_ = opened
    shown = "return document.getElementById('help').open"
    press(browser, "?")
    assert browser.execute_script(shown)
    press(browser, "n")
    assert focused(browser) is None, "keys are the list's while it is open"
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
    assert brightness() == light, "what was chosen stays"
    browser.refresh()
    assert brightness() == dark


def test_words_and_bars_lead_into_the_text(opened):
    browser, found, pieces = opened
    entry = browser.find_element("css selector", "#words .entry")
    word = entry.find_element("css selector", "span").text
    entry.click()
    assert word.casefold() in pieces[focused(browser)].casefold()
    bar = browser.find_elements("css selector", "#by-window .bar")[10]
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", bar)
    assert focused(browser) == found.windows[11].score_from
    assert "now" in bar.get_attribute("class")
