"""A notebook's page: code folded, takeaways first, headings listed, formulas drawn, claims marked, figures in boxes."""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit.workbench.claims import LABELS, LEGEND
from asrkit.workbench.records import MIME
from asrkit.workbench.report.notebook import MARKS, SIGNS, Prose, render

CLAIMS = {"joint-memory-20s": "arithmetic checked"}
TAG = "<!-- joint-memory-20s -->"
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
    page = render(folder / "x.ipynb", CLAIMS, ["02_there"])
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
        new_code_cell("x = torch.ones(3)"),
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
        new_markdown_cell("# Why?\n\n## One & two\n\n### Inside\n\n## Three"),
    )
    assert [text for _, text in page.headings] == ["One & two", "Three"]
    assert all(body.find("h2", id=name) for name, _ in page.headings)
    assert page.title == "Why?" and body.find("h1") is None


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


def test_a_power_in_a_takeaway_is_still_one_on_the_index(tmp_path):
    many = markdown(
        "* There are $7.1 \\times 10^{19}$ paths, and 10<sup>-3</sup> of them matter."
    )
    page, _ = page_of(tmp_path, tagged("show()", "takeaway", outputs=[many]))
    assert page.answer == "There are 7.1×10¹⁹ paths, and 10⁻³ of them matter."


def test_a_tag_in_the_prose_becomes_a_mark_that_leads_to_the_claim(tmp_path):
    text = (
        f"# Why?\n\n| takes |\n|---|\n| 1.6 GB{TAG} |\n\nAgain 1.6 GB{TAG}, `x{TAG}`."
    )
    page, body = page_of(tmp_path, new_markdown_cell(text))
    links = body.find_all("a", href="claims.html#joint-memory-20s")
    assert [link.get("id") for link in links] == ["claim-joint-memory-20s", None]
    assert {link["aria-label"] for link in links} == {
        "Claim joint-memory-20s: arithmetic checked"
    }
    assert TAG in body.get_text()  # inside code it is code
    assert page.claims and page.has_marks and page.defects == []
    assert body.table.parent["class"] == ["scroll"]


def test_verdicts_in_a_table_have_their_mark_and_say_what_it_means(tmp_path):
    labels = [*LEGEND, "no verdict"]
    rows = "".join(f"<tr><td>x</td><td>{label}</td></tr>" for label in labels)
    html = f"<style>td {{ color: red }}</style><table><tbody>{rows}</tbody></table>"
    output = new_output("display_data", data={"text/html": html})
    page, body = page_of(tmp_path, new_code_cell("1", outputs=[output]))
    assert page.has_marks and [*LEGEND] == [*LABELS] and body.style is None
    spans = body.select("td span")
    assert [span.get_text() for span in spans] == [*LEGEND]
    for span in spans:
        label = span.get_text()
        assert span["title"] == LEGEND[label]
        assert span["class"] == ["mark", MARKS.get(label, "soft")]
    assert {*MARKS} <= {*LEGEND} and {*MARKS.values(), "soft"} == {*SIGNS}


def test_what_is_wrong_with_a_page_is_a_defect_and_links_lead_to_pages(tmp_path):
    text = (
        "It says $\\frac{1}{$ and $a < b$, 26 % and 2 GB<!-- no-such-claim --> and 3<!-- code: fine -->.\n\n"
        '![a far bird](http://example.org/b.png) <img alt="dot" src="data:image/png;base64,AAAA">\n\n'
        "[here](02_there.ipynb), [gone](03_gone.ipynb#x) and [far](https://example.org/04_far.ipynb)"
    )
    shown = [
        new_output("display_data", data={"image/png": "AAAA"}),
        picture("a lattice"),
    ]
    page, body = page_of(
        tmp_path, new_markdown_cell(text), new_code_cell("1", outputs=shown)
    )
    assert page.defects == [
        "no LaTeX: $\\frac{1}{$",
        "no claim: no-such-claim",
        "a picture is not inside the page",
        "a picture has no alt text",
    ]
    assert [figure["alt"] for figure in page.figures] == ["dot", "a lattice"]
    boxes = body.find_all("div", class_="picture")
    assert [box.img["alt"] for box in boxes] == ["a lattice"]
    links = '<a href="02_there.html">here</a>, gone and <a href="https://example.org/04_far.ipynb">far</a>'
    assert links in page.body and "26\u00a0%" in page.body


@pytest.mark.parametrize(("markdown", "formulas"), [
    ("costs $5 and $6", 0), ("costs 5 \\$ or 6 \\$", 0), ("~~~\n$a$\n~~~", 0), ("``$a$ ` $b$``", 0), ("`$a$`", 0),
    ("`x` $a$ `y` $b$", 2), ("$a$, $b$ and $x_1$.", 3), ("$$a$$ then $b$", 2),
])  # fmt: skip
def test_formulas_become_mathml_and_code_stays_code(markdown, formulas):
    assert Prose({})(markdown).count("<math") == formulas


def test_outputs_and_takeaways_neither_run_nor_leave_the_page(tmp_path):
    evil = (
        '<meta http-equiv="refresh" content="0;url=http://x"><iframe src="http://x">'
        '</iframe><b onclick="alert(1)">bold</b><script>alert(2)</script>'
    )
    html = new_output("display_data", data={"text/html": evil})
    page, _ = page_of(
        tmp_path,
        tagged("1", outputs=[html]),
        tagged(
            "2", "takeaway", outputs=[markdown(f"* first <img src='http://x'> {evil}")]
        ),
    )
    for text in (page.body, page.takeaway):
        assert ">bold</b>" in text
        assert not re.search("onclick|<script|<meta|<iframe", text)
    assert "a picture has no alt text" in page.defects


def test_a_malformed_record_is_a_defect_and_no_record(tmp_path):
    made = new_output("display_data", data={MIME: {"x": 1}})
    page, _ = page_of(tmp_path, tagged("1", outputs=[made]))
    assert page.defects == ["no record: missing field what"] and not page.records
