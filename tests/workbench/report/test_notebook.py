"""A notebook's page: code folded, takeaways first, headings listed, formulas drawn, claims marked, figures in boxes."""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit.workbench.claims import LEGEND
from asrkit.workbench.records import MIME
from asrkit.workbench.report.notebook import Prose, render

CLAIMS = {"joint-memory-20s": "arithmetic checked"}
TAG = "<!-- joint-memory-20s -->"
TAKEAWAY = "* The loss is **3 times** as fast: $a < b$.\n* It needs less memory."


def tagged(source, *tags, outputs=()):
    """A code cell with tags."""
    return new_code_cell(source, metadata={"tags": [*tags]}, outputs=[*outputs])


def displayed(data):
    """An output with these data."""
    return new_output("display_data", data=data)


def markdown(text):
    """The output of `display(Markdown(text))`."""
    return displayed({"text/markdown": text, "text/plain": "<a Markdown object>"})


def picture(alt):
    """The output of `plots.show`."""
    html = f'<img alt="{alt}" src="data:image/svg+xml;base64,AAAA">'
    return displayed({"text/html": html, "text/plain": alt})


def page_of(folder, *cells):
    """The page of a notebook with `cells`, and its body."""
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number}"
    nbformat.write(new_notebook(cells=[*cells]), folder / "x.ipynb")
    page = render(folder / "x.ipynb", CLAIMS, ["02_there"])
    return page, BeautifulSoup(page.body, "html.parser")


def folded(body):
    """Ids of the cells whose code is folded, with the title of the fold."""
    places = {}
    for fold in body.find_all("details", class_="code"):
        assert fold.find(class_="input") and not fold.has_attr("open")
        cell = fold.find_parent(id=re.compile("cell-id="))
        places[cell["id"].removeprefix("cell-id=")] = fold.summary.get_text()
    return places


def test_tagged_code_imports_and_checks_are_folded_and_what_they_print_is_not(tmp_path):
    printed = new_output("stream", name="stdout", text="printed\n")
    _, body = page_of(
        tmp_path,
        new_code_cell("import torch\n\nprint(machine.stamp())"),
        tagged("size: int = 3  # bars", "parameters"),
        new_code_cell("expect_parameters(\n    globals(),\n    size=int,\n)\nx = 1"),
        new_code_cell("x = torch.ones(3)"),
        tagged("publish(x)", "hide-input", outputs=[printed]),
        new_code_cell("def ("),
    )
    assert folded(body) == {
        "c0": "Imports, 3 lines",
        "c1": "Parameters, 1 line",
        "c2": "Check of the parameters, 5 lines",
        "c4": "Code, 1 line",
    }
    assert body.find(class_="output_stdout").find_parent("details") is None


def test_imports_and_parameters_move_to_the_end_with_what_they_print(tmp_path):
    stamp = new_output("stream", name="stdout", text="this machine\n")
    imports = new_code_cell("import torch\n\nprint(machine.stamp())", outputs=[stamp])
    page, body = page_of(
        tmp_path,
        new_markdown_cell("# Why?\n\n## First"),
        imports,
        tagged("size: int = 3  # bars", "parameters"),
        new_code_cell("expect_parameters(rows=1)"),
        tagged("draw()", outputs=[picture("first")]),
    )
    text = str(body)
    places = [
        text.index(part) for part in ("first", "this machine", "size", "Check of")
    ]
    assert places == sorted(places)
    assert [name for _, name in page.headings] == ["First", "How this page was run"]


@pytest.mark.parametrize("where", ["prose", "takeaway"])
def test_marks_are_explained_before_the_first_one(tmp_path, where):
    shown = tagged(
        "show()",
        "takeaway",
        outputs=[
            markdown(f"* It takes 1.6 GB{TAG}." if where == "takeaway" else "* 1.")
        ],
    )
    page, body = page_of(
        tmp_path,
        new_markdown_cell("# Why?\n\nNo mark."),
        new_markdown_cell(f"It takes 1.6 GB{TAG}."),
        shown,
    )
    text = str(body)
    assert page.has_marks
    if where == "takeaway":  # its legend follows the takeaway
        assert "<!--legend-->" not in text
    else:
        assert (
            text.index("No mark") < text.index("<!--legend-->") < text.index("It takes")
        )


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


SLIDER = """<div class="frames" data-label="T">
<div class="frame"><img alt="first" src="data:image/png;base64,A"></div>
<div class="frame" hidden><img alt="second" src="data:image/png;base64,A"></div></div>"""


def test_frames_of_a_slider_reach_the_page_and_its_widget_does_not(tmp_path):
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    data = {**widget, "text/html": SLIDER, "text/plain": "T: 0, 1"}
    page, body = page_of(tmp_path, tagged("frames()", outputs=[displayed(data)]))
    first, second = body.select("[data-label=T] .frame")
    assert not first.has_attr("hidden") and second.has_attr("hidden")
    assert "model_id" not in page.body
    assert [figure["alt"] for figure in page.figures] == ["first"]
    assert page.defects == []


def test_a_power_in_a_takeaway_is_still_one_on_the_index(tmp_path):
    many = markdown("* There are $7.1 \\times 10^{19}$ paths, 10<sup>-3</sup> matter.")
    page, _ = page_of(tmp_path, tagged("show()", "takeaway", outputs=[many]))
    assert page.answer == "There are 7.1×10¹⁹ paths, 10⁻³ matter."


def test_a_tag_in_the_prose_becomes_a_mark_that_leads_to_the_claim(tmp_path):
    text = f"# Why?\n\n| takes |\n|---|\n| 1.6 GB{TAG} |\n\nAgain{TAG}, `x{TAG}`."
    page, body = page_of(tmp_path, new_markdown_cell(text))
    first, second = body.find_all("a", href="claims.html#joint-memory-20s")
    assert first["id"] == "claim-joint-memory-20s" and not second.has_attr("id")
    label = "Claim joint-memory-20s: arithmetic checked"
    assert first["aria-label"] == second["aria-label"] == label
    assert TAG in body.get_text()  # inside code it is code
    assert page.claims and page.has_marks and page.defects == []
    assert body.table.parent["class"] == ["scroll"]


def test_verdicts_in_a_table_have_their_mark_and_say_what_it_means(tmp_path):
    cells = "".join(f"<td>{label}</td>" for label in [*LEGEND, "no verdict"])
    html = f"<style>td {{ color: red }}</style><table><tr>{cells}</tr></table>"
    page, body = page_of(
        tmp_path, tagged("1", outputs=[displayed({"text/html": html})])
    )
    assert page.has_marks and body.style is None
    spans = {span.get_text(): span for span in body.select("td span.mark")}
    assert {label: span["title"] for label, span in spans.items()} == LEGEND
    assert "good" in spans["reproduced"]["class"]
    assert "soft" in spans["too noisy"]["class"]


def test_what_is_wrong_with_a_page_is_a_defect(tmp_path):
    text = (
        "$\\frac{1}{$ and $a < b$, 2 GB<!-- no-such-claim --> and 3<!-- code: fine -->.\n\n"
        '![a far bird](http://example.org/b.png) <img alt="dot" src="data:image/png;base64,AAAA">'
    )
    shown = [displayed({"image/png": "AAAA"}), picture("a lattice")]
    page, body = page_of(tmp_path, new_markdown_cell(text), tagged("1", outputs=shown))
    assert page.defects == [
        "no LaTeX: $\\frac{1}{$",
        "no claim: no-such-claim",
        "a picture is not inside the page",
        "a picture has no alt text",
    ]
    assert [figure["alt"] for figure in page.figures] == ["dot", "a lattice"]
    (box,) = body.find_all("div", class_="picture")
    assert box.img["alt"] == "a lattice"


def test_links_to_notebooks_lead_to_their_pages_or_are_text(tmp_path):
    far = "https://example.org/04_far.ipynb"
    text = f"[here](02_there.ipynb), [gone](03_gone.ipynb#x), [far]({far}), 26 %"
    page, _ = page_of(tmp_path, new_markdown_cell(text))
    here = '<a href="02_there.html">here</a>'
    assert f'{here}, gone, <a href="{far}">far</a>, 26\u00a0%' in page.body


@pytest.mark.parametrize(("markdown", "formulas"), [
    ("costs $5 and $6", 0),
    ("costs 5 \\$ or 6 \\$", 0),
    ("~~~\n$a$\n~~~", 0),
    ("``$a$ ` $b$``", 0),
    ("`x` $a$ `y` $b$", 2),
    ("$a$, $b$ and $x_1$.", 3),
    ("$$a$$ then $b$", 2),
])  # fmt: skip
def test_formulas_become_mathml_and_code_stays_code(markdown, formulas):
    assert Prose({})(markdown).count("<math") == formulas


EVIL = """<meta http-equiv="refresh" content="0;url=http://x"><iframe src="http://x"></iframe>
<b onclick="alert(1)">bold</b><script>alert(2)</script><img src="http://x">"""


def test_outputs_and_takeaways_neither_run_nor_leave_the_page(tmp_path):
    html = tagged("1", outputs=[displayed({"text/html": EVIL})])
    takeaway = tagged("2", "takeaway", outputs=[markdown(f"* first {EVIL}")])
    page, _ = page_of(tmp_path, html, takeaway)
    for text in (page.body, page.takeaway):
        assert ">bold</b>" in text
        assert not re.search("onclick|<script|<meta|<iframe", text)
    assert page.defects == ["a picture has no alt text"] * 2


def test_a_malformed_record_is_a_defect_and_no_record(tmp_path):
    made = displayed({MIME: {"x": 1}})
    page, _ = page_of(tmp_path, tagged("1", outputs=[made]))
    assert page.defects == ["not a record: 'what' is not a str"] and not page.records
