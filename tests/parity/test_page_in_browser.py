"""The page in a real browser: it opens from a file, asks for nothing, and can be read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parity.report.page import anchor
from parity.report.write import write_report
from tests.parity import browser
from tests.parity.fakes import case
from tests.parity.runs import HOSTILE, run_saying

CHROMIUM = browser.find()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

SEEN = """(() => {
  const e = document.querySelector(%s), r = e.getBoundingClientRect();
  return e.checkVisibility({opacityProperty: true, visibilityProperty: true})
    && r.width > 20 && r.height > 8 && e.innerText.trim().length > 0;
})()"""

# Relative luminance and contrast: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio
PALEST = """(() => {
  const rgba = s => s.match(/[\\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const e of document.body.querySelectorAll("*")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || e.closest("svg")) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 200)];
  }
  return worst;
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """A page full of hostile texts, open."""
    assert CHROMIUM is not None
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, run_saying("".join(HOSTILE), "novel"))
    with browser.opened(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        opened.call("Page.navigate", url=(folder / "index.html").as_uri())
        opened.wait_for("Page.loadEventFired")
        yield opened


def test_it_asks_for_nothing_but_itself(page: browser.Page) -> None:
    """No network: one file, and the empty icon inside of it."""
    page.look("1")
    asked = [
        said["params"]["request"]["url"]
        for said in page.events
        if said["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [
        url for url in asked if url.endswith("/index.html")
    ]
    assert any(url.startswith("file:") for url in asked)


def test_the_console_is_empty(page: browser.Page) -> None:
    """No error, no warning, no violation of the page's own policy."""
    page.look("1")
    loud = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert [said for said in page.events if said["method"] in loud] == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_verdict_matrix_and_a_parting_can_be_seen(
    page: browser.Page, width: int, scheme: str
) -> None:
    """On a desk and on a phone, by day and by night; the page itself never scrolls sideways."""
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 500,
    )
    page.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": scheme}],
    )
    for selector in ("header h1", "#matrix table", "article .sides .parts", "article .command"):
        assert page.look(SEEN % repr(selector)), selector
    assert page.look("document.documentElement.scrollWidth") <= width
    ratio, where = page.look(PALEST)
    assert ratio >= 4.5, where


def test_a_mark_of_the_matrix_leads_to_its_case(page: browser.Page) -> None:
    """A click brings the case into view."""
    place = anchor(case("novel", depth=1).id)
    page.look(f"document.querySelector('#matrix a[href=\"#{place}\"]').click()")
    top = page.look(f"document.getElementById('{place}').getBoundingClientRect().top")
    assert 0 <= top < 400


def test_no_hostile_text_ran(page: browser.Page) -> None:
    """The browser sees the elements that we wrote, and no other."""
    assert page.look("document.querySelectorAll('script, b, iframe, img').length") == 0
