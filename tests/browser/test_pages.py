"""The report in a real chromium: by mouse and keyboard, on a phone, on paper, in the dark, without a script.

What is opened is the newest report of the whole series. For its pictures:
ASRKIT_SCREENSHOTS=figures .venv/bin/python -m pytest tests/browser/test_pages.py -k "drawn and report"
"""

import io

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

pytestmark = [pytest.mark.browser, pytest.mark.live]

PHONE = {
    "viewport": {"width": 360, "height": 740},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}
LOOKS = {"report": {}, "report_dark": {"color_scheme": "dark"}, "report_phone": PHONE}
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
HEADINGS = {"heading-order": {"enabled": True}, "empty-heading": {"enabled": True}}


@pytest.fixture(scope="module")
def pages(series):
    """Every page of the report: name -> address."""
    return {
        path.stem: path.resolve().as_uri() for path in sorted(series.glob("*.html"))
    }


def pixels(shown):
    """The pixels of a window, or of a part of it: rows, columns, RGB."""
    return np.asarray(Image.open(io.BytesIO(shown.screenshot())).convert("RGB"))


def test_a_link_to_a_claim_of_the_appendix_unfolds_it(window, pages):
    page = window().open(pages["claims"])
    row = page.locator("#more tr[data-verdict]").last
    assert row.is_hidden()
    page.goto(f"{pages['claims']}#{row.get_attribute('id')}")
    assert row.is_visible()


def test_without_a_script_every_claim_is_in_a_plain_table(window, pages):
    page = window(java_script_enabled=False).open(pages["claims"])
    assert page.locator("#listed tr[data-verdict]:visible").count() > 50


def test_on_a_phone_each_claim_is_a_block_that_names_its_values(window, pages):
    page = window(**PHONE).open(pages["claims"])
    cell = page.locator("#listed td[data-label=Verdict]").first
    assert cell.evaluate("one => getComputedStyle(one).display") == "grid"
    label = cell.evaluate("one => getComputedStyle(one, '::before').content")
    assert label == '"Verdict"' and page.locator("#listed thead").is_hidden()


def folds(page):
    """Whether each fold of code is open."""
    return page.locator("details.code").evaluate_all(
        "all => all.map(fold => fold.open)"
    )


def test_how_much_code_is_shown_is_chosen_once_for_all_pages(window, pages):
    tabs = window()
    page = tabs.open(pages["01_transducer"])
    choice, code = page.get_by_label("Code"), page.locator(".input_area")
    assert len(folds(page)) >= 2 and not any(folds(page))
    assert 0 < code.locator("visible=true").count() < code.count()
    choice.select_option("all")
    assert all(folds(page)) and code.locator("visible=true").count() == code.count()
    choice.select_option("none")
    other = tabs.open(pages["02_joint_memory"])
    assert other.get_by_label("Code").input_value() == "none"
    assert other.locator(".input_area").locator("visible=true").count() == 0
    page.reload()
    assert page.get_by_label("Code").input_value() == "none"


def frame(page):
    """The slider's text, and the words of the visible pictures."""
    box = page.locator(".frames").first
    words = (
        box.locator("img")
        .locator("visible=true")
        .evaluate_all("all => all.map(one => one.alt)")
    )
    return box.locator("output").inner_text(), words


def test_a_slider_is_moved_by_the_keyboard_and_shows_one_frame_at_a_time(window, pages):
    page = window().open(pages["01_transducer"])
    slider = page.locator(".frames").first.get_by_role("slider")
    assert slider.get_attribute("aria-valuetext") == frame(page)[0]
    seen = [frame(page)]
    for key in ("ArrowRight", "Home", "End"):
        slider.press(key)
        seen.append(frame(page))
    assert all(len(words) == 1 for _, words in seen)
    assert len({name for name, _ in seen}) == len({words[0] for _, words in seen}) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_is_dark_on_a_dark_page(window, pages, scheme):
    page = window(color_scheme=scheme).open(pages["02_joint_memory"])
    image = page.locator("main img[src^='data:image/svg']").first
    image.scroll_into_view_if_needed()
    seen = pixels(image)
    assert len(np.unique(seen.reshape(-1, 3), axis=0)) > 20
    assert np.median(seen) < 60 if scheme == "dark" else np.median(seen) > 200


def test_on_a_phone_a_figure_scrolls_in_its_box(window, pages):
    page = window(**PHONE).open(pages["02_joint_memory"])
    figure = page.locator(".picture").first
    sizes = figure.evaluate("box => [box.clientWidth, box.scrollWidth, box.tabIndex]")
    assert sizes[0] < 360 < 600 < sizes[1] and sizes[2] == 0
    assert against(page) == []


def test_no_page_is_wider_than_a_phone(window, pages):
    phone = window(**PHONE)
    wide = {}
    for name, url in pages.items():
        page = phone.open(url)
        wide[name] = page.evaluate("document.documentElement.scrollWidth")
    assert wide == dict.fromkeys(pages, 360)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_against_wcag_a_and_aa(window, pages, scheme):
    tabs, found = window(color_scheme=scheme), {}
    # It takes seconds a page.
    some = {"index", "claims", "figures", "machine"}
    some |= {"01_transducer", "02_joint_memory"}
    for name in some:
        page = tabs.open(pages[name])
        page.evaluate(
            "document.querySelectorAll('details').forEach(fold => (fold.open = true))"
        )
        found[name] = against(page)
        page.close()
    assert found == {name: [] for name in found}


def against(page):
    """Rules of WCAG A and AA that the page breaks, each with the first element that does."""
    results = Axe().run(
        page,
        options={
            "runOnly": {"type": "tag", "values": WCAG},
            "rules": HEADINGS,
            "resultTypes": ["violations"],
        },
    )
    return [
        (rule["id"], rule["nodes"][0]["html"][:200])
        for rule in results.response["violations"]
    ]


@pytest.mark.parametrize("name", LOOKS)
def test_the_report_is_drawn_and_the_dark_is_dark(window, pages, shots, name):
    page = window(**LOOKS[name]).open(pages["index"])
    page.screenshot(path=shots / f"{name}.png")
    seen = pixels(page)
    assert len(np.unique(seen.reshape(-1, 3), axis=0)) > 50
    assert np.median(seen) < 60 if "dark" in name else np.median(seen) > 200
