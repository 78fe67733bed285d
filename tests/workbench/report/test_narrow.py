"""What of a page is read on a phone: rows as blocks, figures that scroll; verdicts with their marks, one form of per cent."""

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit.workbench.ledger import LEGEND
from asrkit.workbench.report import narrow
from asrkit.workbench.report.marks import MARKS, MEANINGS, SIGNS, mark_verdicts
from asrkit.workbench.report.notebook_page import render_page
from asrkit.workbench.report.sanitise import clean
from asrkit.workbench.typography import space_percents

LONG = "A sentence that is longer than any column of a phone"


def table(names, *rows, caption=""):
    """HTML of a table with a head."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def labelled(html):
    """The table of a page after `label_cells`."""
    body = clean(html)
    narrow.label_cells(body)
    return body.find("table")


def test_cells_of_a_table_with_sentences_carry_the_names_of_their_columns():
    made = labelled(table(["claim", "published", "why"], [LONG, "–", ""], ["b", "6×", "noisy"]))
    assert "stacked" in made["class"] and made["role"] == "table"
    labels = [
        [cell["data-label"] for cell in row.find_all("td")] for row in made.tbody.find_all("tr")
    ]
    assert labels == [["claim", "published", "why"]] * 2
    absent = [cell for cell in made.tbody.find_all("td") if "none" in cell.get("class", "")]
    assert len(absent) == 2 and not any(cell.get_text().strip("–") for cell in absent)
    roles = {part.name: part["role"] for part in made.find_all(role=True)}
    assert roles["tr"] == "row" and roles["td"] == "cell" and roles["th"] == "columnheader"


def test_the_two_heads_of_a_pandas_table_become_one_name_a_column():
    html = (
        "<table><thead><tr><th></th><th>ms</th><th>what</th></tr><tr><th>variant</th><td></td><td></td></tr></thead>"
        f"<tbody><tr><th>a</th><td>1</td><td>{LONG}</td></tr></tbody></table>"
    )
    row = labelled(html).tbody.tr
    assert [cell["data-label"] for cell in row.find_all(["th", "td"])] == ["variant", "ms", "what"]
    assert row.th["role"] == "rowheader"


@pytest.mark.parametrize("html", [
    table(["a", "b", "c"], ["1", "2", "3"]),  # numbers
    table(["a", "b"], [LONG, "1"]),  # two columns fit
    table(["a", "b", "c"], [LONG, "1"]),  # a cell is missing
    f"<table><tbody><tr><td>{LONG}</td><td>1</td><td>2</td></tr></tbody></table>",
    f"<table><thead><tr><th colspan=3>all</th></tr></thead><tbody><tr><td>{LONG}</td></tr></tbody></table>",
])  # fmt: skip
def test_other_tables_stay_tables(html):
    made = labelled(html)
    assert "stacked" not in made.get("class", "") and not made.find_all(attrs={"data-label": True})


def test_each_figure_scrolls_in_a_box_of_its_own_and_the_frames_of_a_slider_in_one():
    image = '<img alt="A figure" src="data:image/svg+xml;base64,AAAA">'
    frames = f'<div class="frame">{image}</div><div class="frame" hidden>{image}</div>'
    photo = '<img alt="A photo" src="data:image/png;base64,AAAA">'
    body = clean(f'<p>{image}</p><div class="frames" data-label="n">{frames}</div>{photo}')
    narrow.box_figures(body)
    boxes = body.find_all("div", class_="scroll picture")
    assert [len(box.find_all("img")) for box in boxes] == [1, 2]
    assert len(boxes[1].find_all("div", class_="frame")) == 2
    assert not body.find("img", alt="A photo").find_parent(class_="scroll picture")


def test_verdicts_in_a_table_have_their_mark_and_say_what_it_means():
    labels = [*LEGEND, "no verdict"]
    body = clean(table(["claim", "verdict", "why"], *([LONG, label, ""] for label in labels)))
    narrow.label_cells(body)
    assert mark_verdicts(body) == len(LEGEND)
    found = {span.get_text(): span for span in body.select("td span.mark, td span[class^=mark]")}
    assert [*found] == [*LEGEND]
    for label, span in found.items():
        assert span["title"] == LEGEND[label]
        assert span["class"] == f"mark {MARKS.get(label, 'soft')}"
    assert {*MARKS} <= {*LEGEND} and {*MARKS.values()} | {"soft"} == {*SIGNS} == {*MEANINGS}


@pytest.mark.parametrize(("text", "spaced"), [
    ("26% of 9.1%", "26\u00a0% of 9.1\u00a0%"), ("26 % and 26\u00a0%", "26\u00a0% and 26\u00a0%"),
    ("a % b, 5%d", "a % b, 5%d"), ("(5%)", "(5\u00a0%)"),
])  # fmt: skip
def test_a_per_cent_has_one_form(text, spaced):
    assert space_percents(text) == spaced
    assert space_percents(spaced) == spaced


def test_per_cents_have_one_form_in_prose_tables_output_and_words_of_figures_and_not_in_code(
    tmp_path,
):
    import nbformat

    html = '<img alt="Bars of 5%" src="data:image/svg+xml;base64,AAAA">' + table(["a"], ["6%"])
    outputs = [
        new_output("stream", text="7% done\n"),
        new_output("display_data", data={"text/html": html}),
    ]
    cells = [
        new_markdown_cell("# How?\n\nIt is 8% of `9%`."),
        new_code_cell("x = '4%'", outputs=outputs, metadata={"tags": ["hide-input"]}),
    ]
    found = new_output("display_data", data={"text/markdown": "* It is 5% and\n  more."})
    tags = {"tags": ["hide-input", "takeaway"]}
    cells.append(new_code_cell("points", outputs=[found], metadata=tags))
    nbformat.write(new_notebook(cells=cells), tmp_path / "x.ipynb")
    page = render_page(tmp_path / "x.ipynb", {})
    text = BeautifulSoup(page.body, "html.parser").get_text()
    for form in ("6\u00a0%", "7\u00a0%", "8\u00a0%", "9%", "4%"):
        assert form in text
    assert page.figures[0]["alt"] == "Bars of 5\u00a0%"
    assert page.answer == "It is 5\u00a0% and more."
