"""The page in a real Chromium: what is on it can be seen and read, and mouse, keyboard and filters do what they should."""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from made_page import DAMAGED, PASSING, TOKENS
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from epd_conformance.report.html import Page
from epd_conformance.report.html.page import TrendPoint, anchor, build
from epd_conformance.report.html.write import render, save
from epd_conformance.verdict import Outcome, Verdict

WIDE, NARROW = 1280, 390
# WCAG AA for text of this size.
CONTRAST = 4.5
SMALLEST_PX = 12

# Every visible text that is too small or too faint, and everything that sticks out of the page: [what, how much].
TROUBLE = """
const found = [];
const number = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
const light = (colour) => { const part = (v) => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const [r, g, b] = number(colour); return .2126 * part(r) + .7152 * part(g) + .0722 * part(b); };
const behind = (element) => { for (let e = element; e; e = e.parentElement) { const colour = getComputedStyle(e).backgroundColor;
  const values = number(colour); if (values.length < 4 || values[3] > 0) return colour; } return 'rgb(255, 255, 255)'; };
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const element = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
  if (!text || element.closest('script, style, noscript, option, title') || !element.checkVisibility()) continue;
  const style = getComputedStyle(element), size = parseFloat(style.fontSize);
  if (size < arguments[0]) found.push([`${size} px: ${text}`.slice(0, 80), size]);
  const ink = element instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x), contrast = (a + .05) / (b + .05);
  if (contrast < arguments[1]) found.push([`contrast ${contrast.toFixed(2)}: ${text}`.slice(0, 80), contrast]);
}
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) found.push(['the page scrolls sideways', document.documentElement.scrollWidth]);
for (const element of document.querySelectorAll('main *, header *')) {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= width + 1 || !element.checkVisibility() || element.closest('.wide')) continue;
  found.push([element.outerHTML.slice(0, 80), box.right]);
}
for (const name of document.querySelectorAll('tbody th[scope=row]')) {
  if (name.checkVisibility() && name.clientWidth < 40) found.push([`broken into letters: ${name.textContent}`, name.clientWidth]);
}
return found;
"""


def required() -> bool:
    """Whether a missing browser is a failure: in continuous integration a skipped test would be a hole that nobody sees."""
    return bool(os.environ.get("CI") or os.environ.get("EPD_REQUIRE_BROWSER"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    names = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in names.items() if path is None]
    if missing and not required():
        pytest.skip(f"{' and '.join(missing)} not found: install Debian's chromium and chromium-driver")
    assert not missing, f"{' and '.join(missing)} not found, and this environment asks for it"
    options = webdriver.ChromeOptions()
    options.binary_location = str(names["chromium"])
    for argument in (
        "--headless",
        # A container's root has no user namespaces to make a sandbox of; the page is our own.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(str(names["chromedriver"])))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(page: Page, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The made run's page, with a trend."""
    older = TrendPoint(page.report.run.started.replace(year=1960), Outcome.CONFORMANT, {Verdict.PASS: 70}, "older")
    evidences = {view.record.id: view.shown.cell.to_json() for view in page.cells if view.shown.cell is not None}
    logs = {log.path: log.lines for log in page.logs}
    path = tmp_path_factory.mktemp("html") / "report.html"
    save(path, render(build(page.report, evidences, logs, [older])))
    return path.as_uri()


Open = Callable[..., webdriver.Chrome]


@pytest.fixture
def opened(browser: webdriver.Chrome, address: str) -> Open:
    """`opened(width, dark=True)`: the page, anew, in a window of this width."""

    def open_page(width: int = WIDE, *, dark: bool = False, media: str = "", fragment: str = "") -> webdriver.Chrome:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
        browser.get("about:blank")
        browser.get(address + fragment)
        return browser

    return open_page


def details(browser: webdriver.Chrome, cell: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, f"details[data-cell={anchor('c', cell)}]")


def drawn(browser: webdriver.Chrome, selector: str) -> bool:
    """Whether an element takes up room on the page; unlike Selenium, this does not guess from the document."""
    script = "const e = document.querySelector(arguments[0]); return e.checkVisibility() && e.getBoundingClientRect().height > 9"
    return bool(browser.execute_script(script, selector))


def visible(browser: webdriver.Chrome) -> list[str]:
    names = browser.find_elements(By.CSS_SELECTOR, "details.cell:not([hidden]) .cell-id")
    return [str(name.get_property("textContent")) for name in names]


def trouble(browser: webdriver.Chrome) -> list[Any]:
    found = browser.execute_script(TROUBLE, SMALLEST_PX, CONTRAST)
    assert isinstance(found, list)
    return found


def pixels_contrast(element: WebElement) -> float:
    """Contrast between the lightest and the darkest pixel of what is really drawn."""
    picture = Image.open(io.BytesIO(base64.b64decode(element.screenshot_as_base64))).convert("L")
    darkest, lightest = picture.getextrema()
    assert isinstance(darkest, int) and isinstance(lightest, int)

    def light(value: int) -> float:
        part = value / 255
        return float(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)

    return (light(lightest) + 0.05) / (light(darkest) + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_everything_can_be_read(opened: Open, width: int, dark: bool) -> None:
    browser = opened(width, dark=dark)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert trouble(browser) == []
    for selector in (
        "#outcome",
        "#glance .tally",
        ".matrix",
        ".matrix.faults",
        ".trend",
        ".tokens",
        "svg.timeline",
        ".pictures",
    ):
        element = browser.find_element(By.CSS_SELECTOR, selector)
        assert element.is_displayed(), selector
        assert pixels_contrast(element) > 3, selector
    assert browser.get_log("browser") == [], "the page's own policy stops nothing that it needs"


def test_the_check_sees_what_cannot_be_read(opened: Open) -> None:
    browser = opened(NARROW)
    browser.execute_script(
        "document.querySelector('.meaning').style.color = '#ccc'; document.querySelector('.headline').style.fontSize = '9px';"
        "document.querySelector('#glance').style.width = '600px';"
        "const name = document.querySelector('.faults tbody th').style; name.display = 'block'; name.width = '20px'"
    )
    told = " ".join(str(what) for what, _ in trouble(browser))
    assert "contrast" in told and "9 px" in told and "sideways" in told and "letters" in told


def test_a_square_leads_to_the_place_where_the_tokens_part(opened: Open) -> None:
    browser = opened()
    cell = details(browser, TOKENS)
    square = browser.find_element(By.CSS_SELECTOR, f".matrix a[href='#{anchor('c', TOKENS)}']")

    def click() -> None:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", square)
        square.click()

    assert cell.get_attribute("open") is None
    click()
    assert cell.get_attribute("open") is not None
    expected, observed = cell.find_elements(By.CSS_SELECTOR, ".tokens td.first")
    assert expected.is_displayed() and observed.is_displayed()
    assert int(observed.text) == int(expected.text) + 1
    assert "first divergence: output token 3, margin" in cell.text
    for part in (f"what {TOKENS} expects", f"run {TOKENS}", "Timeline", "Inputs"):
        assert part in cell.text
    # The same square once more, after the cell was closed by hand.
    cell.find_element(By.TAG_NAME, "summary").click()
    click()
    assert cell.get_attribute("open") is not None


def test_filters_and_search_narrow_the_list(opened: Open, page: Page) -> None:
    browser = opened()
    every = visible(browser)
    assert len(every) == len(page.cells)
    browser.find_element(By.CSS_SELECTOR, ".toggles button[data-verdict=fail]").click()
    assert len(visible(browser)) == 3 and TOKENS in visible(browser)
    browser.find_element(By.ID, "search").send_keys("one-row digest")
    assert visible(browser) == [DAMAGED]
    assert browser.find_element(By.ID, "found").text == f"1 of {len(every)} cells"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#matrix .square:not(.aside)")) == 1
    browser.find_element(By.ID, "search").send_keys(" nothing")
    assert browser.find_element(By.ID, "nothing").is_displayed()
    browser.find_element(By.ID, "search").send_keys(Keys.ESCAPE)
    assert visible(browser) == every
    browser.find_element(By.CSS_SELECTOR, "#owner option:nth-child(2)").click()
    owners = {view.record.id: str(view.item.owner) for view in page.cells}
    assert {owners[name] for name in visible(browser)} == {
        browser.find_element(By.CSS_SELECTOR, "#owner option:nth-child(2)").text
    }


def test_the_keyboard_goes_through_the_list(opened: Open) -> None:
    browser = opened()
    keys = browser.switch_to.active_element.send_keys

    def focused() -> str:
        return str(
            browser.execute_script(
                "return document.activeElement.querySelector('.cell-id')?.textContent || document.activeElement.id"
            )
        )

    order = visible(browser)
    keys("j")
    assert focused() == order[0]
    for key, place in (("j", 1), (Keys.ARROW_DOWN, 2), ("k", 1), (Keys.ARROW_UP, 0), ("k", 0)):
        browser.switch_to.active_element.send_keys(key)
        assert focused() == order[place], key
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert details(browser, order[0]).get_attribute("open") is not None
    browser.switch_to.active_element.send_keys("/")
    assert focused() == "search"
    browser.switch_to.active_element.send_keys("one-row", Keys.ENTER)
    assert focused() == DAMAGED
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert visible(browser) == order


def test_on_paper_what_did_not_pass_is_whole(opened: Open) -> None:
    browser = opened(media="print")
    assert details(browser, TOKENS).get_attribute("open") is None
    assert drawn(browser, f"#{anchor('c', TOKENS)} td.first")
    assert drawn(browser, f"#{anchor('c', DAMAGED)} svg.timeline")
    assert not drawn(browser, f"#{anchor('c', PASSING[0])}")
    assert not drawn(browser, "form.filter") and not drawn(browser, "nav")


def test_without_scripts_everything_is_there_but_the_filters(opened: Open, browser: webdriver.Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened(fragment=f"#{anchor('c', TOKENS)}")
        for selector in ("#outcome", ".matrix", "noscript", f"details[data-cell={anchor('c', PASSING[0])}]"):
            assert drawn(browser, selector), selector
        assert not drawn(browser, "form.filter")
        # The browser itself opens what an address points into.
        assert drawn(browser, f"#{anchor('c', TOKENS)} td.first")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
