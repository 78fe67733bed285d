"""The order of a notebook's page: code folded, takeaways first, headings listed, titles as links."""

import re

import nbformat
import pytest
from asrkit.workbench.report.notebook_page import render_page
from asrkit.workbench.report.notebook_run import outcome
from asrkit.workbench.report.site import build
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit.workbench.report import NotebookRun

PLAN = {"size": "quick", "device": "auto"}
TAKEAWAY = "* The loss is **3 times** as fast: $a < b$.\n* It needs less memory."


def tagged(source, *tags, outputs=()):
    """A code cell with tags."""
    return new_code_cell(source, metadata={"tags": [*tags]}, outputs=[*outputs])


def markdown(text):
    """What `display(Markdown(text))` leaves."""
    data = {
        "text/markdown": text,
        "text/plain": "<IPython.core.display.Markdown object>",
    }
    return new_output("display_data", data=data)


def picture(alt):
    """What `plots.show` leaves."""
    html = f'<img alt="{alt}" src="data:image/svg+xml;base64,AAAA">'
    return new_output("display_data", data={"text/html": html, "text/plain": alt})


def page_of(folder, *cells):
    """The page of a notebook with `cells`, and its body."""
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number}"
    nbformat.write(new_notebook(cells=[*cells]), folder / "x.ipynb")
    page = render_page(folder / "x.ipynb", {})
    return page, BeautifulSoup(page.body, "html.parser")


def folded(body):
    """Ids of the cells whose code is folded, with what stands in its place."""
    places = {}
    for fold in body.find_all("details", class_="code"):
        cell = fold.find_parent(id=re.compile("cell-id="))["id"].removeprefix(
            "cell-id="
        )
        assert fold.find(class_="input") and not fold.has_attr("open")
        places[cell] = fold.summary.get_text()
    return places


def test_tagged_code_imports_and_checks_are_folded_and_what_they_print_is_not(tmp_path):
    said = new_output("stream", name="stdout", text="said\n")
    _, body = page_of(
        tmp_path,
        new_code_cell("import torch\n\nprint(machine.stamp())"),
        tagged("size: int = 3  # bars", "parameters"),
        new_code_cell("expect_parameters(\n    globals(),\n    size=int,\n)\nx = 1"),
        new_code_cell("import torch\nx = torch.ones(3)"),
        tagged("publish(x)", "hide-input", outputs=[said]),
        new_code_cell("def ("),
    )
    assert folded(body) == {
        "c0": "Imports, 3 lines",
        "c1": "Parameters, 1 line",
        "c2": "Check of the parameters, 5 lines",
        "c4": "Code, 1 line",
    }
    assert body.find(class_="output_stdout").find_parent("details") is None


def test_a_takeaway_moves_to_the_top_with_its_formulas(tmp_path):
    page, body = page_of(
        tmp_path,
        new_markdown_cell("# Why?\n\nText."),
        tagged("show()", "takeaway", outputs=[markdown(TAKEAWAY)]),
    )
    assert "3 times" in page.takeaway and "<math" in page.takeaway
    assert "3 times" not in body.get_text() and folded(body) == {"c1": "Code, 1 line"}
    assert page.answer.startswith("The loss is 3 times as fast:")


def test_a_page_lists_its_headings_and_each_link_lands(tmp_path):
    page, body = page_of(
        tmp_path,
        new_markdown_cell("# Why `x`?\n\n## One & two\n\n### Inside\n\n## Three"),
    )
    assert [heading.text.rstrip("¶") for heading in page.headings] == [
        "One & two",
        "Three",
    ]
    assert all(body.find("h2", id=heading.id) for heading in page.headings)
    assert page.heading == "Why <code>x</code>?" and body.find("h1") is None


def test_the_cover_is_the_first_figure_unless_a_cell_is_tagged(tmp_path):
    first = tagged("draw()", outputs=[picture("first")])
    second = tagged("draw()", "cover", outputs=[picture("second")])
    assert page_of(tmp_path, first)[0].cover["alt"] == "first"
    assert page_of(tmp_path, first, second)[0].cover["alt"] == "second"
    assert page_of(tmp_path, new_code_cell("1"))[0].cover is None


def test_frames_of_a_slider_reach_the_page_and_its_widget_does_not(tmp_path):
    frames = "".join(
        f'<div class="frame" data-name="{number}"{" hidden" if number else ""}>'
        f'<img alt="frame {number}" src="data:image/svg+xml;base64,AAAA"></div>'
        for number in range(3)
    )
    data = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
        "text/html": f'<div class="frames" data-label="T">{frames}</div>',
        "text/plain": "T: 0, 1, 2",
    }
    cell = new_code_cell("frames()", outputs=[new_output("display_data", data=data)])
    page, body = page_of(tmp_path, cell)
    assert [frame.has_attr("hidden") for frame in body.find_all(class_="frame")] == [
        False,
        True,
        True,
    ]
    assert (
        body.find(class_="frames")["data-label"] == "T" and "model_id" not in page.body
    )
    assert [figure["alt"] for figure in page.figures] == [
        "frame 0"
    ] and page.defects == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Texts of the pages of a report on two notebooks, the first of which has a takeaway."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "runs").mkdir()
    cells = {
        "01_first": [
            new_markdown_cell(
                "# Is it fast?\n\nSee [02_second.ipynb](02_second.ipynb)."
            ),
            tagged(
                "show()", "takeaway", outputs=[markdown(TAKEAWAY), picture("a lattice")]
            ),
        ],
        "02_second": [new_markdown_cell("# Is it small?")],
    }
    runs = []
    for name, of_notebook in cells.items():
        path = folder / "runs" / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=of_notebook), path)
        runs.append(NotebookRun(name=name, parameters={}, **outcome(path, None)))
    _, defects = build(folder, runs, 1.0, PLAN)
    assert defects == []
    return {path.stem: path.read_text() for path in folder.glob("*.html")}


def test_links_to_notebooks_say_their_titles(site):
    first = BeautifulSoup(site["01_first"], "html.parser")
    links = [link.get_text() for link in first.find_all("a", href="02_second.html")]
    assert sorted(set(links)) == ["Is it small?", "Is it small?\u00a0→"]
    second = BeautifulSoup(site["02_second"], "html.parser")
    assert {link.get_text() for link in second.find_all("a", rel="prev")} == {
        "←\u00a0Is it fast?"
    }


def test_a_card_has_the_question_the_answer_a_picture_and_minutes(site):
    index = BeautifulSoup(site["index"], "html.parser")
    first, second = index.select(".cards > li")
    assert first.h3.get_text().split() == ["01", "Is", "it", "fast?"]
    assert "The loss is 3 times as fast" in first.get_text()
    assert (
        first.img["alt"] == "a lattice"
        and "1 min to read · ran in 0 s" in first.get_text()
    )
    assert second.img is None and "3 times" not in second.get_text()


def test_every_page_about_the_run_leads_to_the_others(site):
    about = ["index", "ledger", "figures", "records", "machine"]
    for name, text in site.items():
        links = BeautifulSoup(text, "html.parser").select("nav.site a")
        assert [link["href"] for link in links] == [f"{other}.html" for other in about]
        here = [link["href"] for link in links if link.get("aria-current") == "page"]
        assert here == ([f"{name}.html"] if name in about else [])


def test_a_power_in_a_takeaway_is_still_one_on_the_index(tmp_path):
    many = markdown(
        "* There are $7.1 \\times 10^{19}$ paths, and 10<sup>-3</sup> of them matter."
    )
    page, _ = page_of(tmp_path, tagged("show()", "takeaway", outputs=[many]))
    assert page.answer == "There are 7.1×10¹⁹ paths, and 10⁻³ of them matter."
