"""Pages from executed notebooks that are written by hand: what a reader finds on them, without running a kernel."""

from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit import files
from asrkit.workbench import claims as ledger
from asrkit.workbench import records
from asrkit.workbench.claims import LEGEND
from asrkit.workbench.report import NotebookRun
from asrkit.workbench.report.columns import record_columns
from asrkit.workbench.report.marks import MARKS, MEANINGS, SIGNS, mark_verdicts
from asrkit.workbench.report.notebook_page import render_page
from asrkit.workbench.report.notebook_run import outcome
from asrkit.workbench.report.plan import command_line
from asrkit.workbench.report.site import build
from asrkit.workbench.report.tidy import tidy
from asrkit.workbench.tables import space_percents

PLAN = {"size": "quick", "device": "auto"}
CLAIMS = {claim.id: claim for claim in ledger.load_claims()}
LISTED = [claim for claim in CLAIMS.values() if not claim.appendix]
TAG = "<!-- joint-memory-20s -->"
HOME = CLAIMS["joint-memory-20s"].notebook


def ship_records_of(folder, monkeypatch):
    real = files.shipped
    monkeypatch.setattr(
        files,
        "shipped",
        lambda name: folder / "data/records" if name == "records" else real(name),
    )


@pytest.fixture(autouse=True)
def no_shipped_records(tmp_path, monkeypatch):
    """The project's claims with the records of `tmp_path`/data/records, of which there are none at first."""
    ship_records_of(tmp_path, monkeypatch)


def built(folder, cells, name=HOME):
    """The pages of a report on one executed notebook with `cells`: its own, and by name."""
    (folder / "runs").mkdir(exist_ok=True)
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number}"
    executed = folder / "runs" / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), executed)
    run = NotebookRun(name=name, parameters={}, **outcome(executed, None))
    _, defects = build(folder, [run], 1.0, PLAN)
    assert defects == []
    pages = {
        page.stem: BeautifulSoup(page.read_text(), "html.parser")
        for page in folder.glob("*.html")
    }
    return pages[name], pages


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The pages of a report on a notebook that quotes a claim and has no records, by name."""
    folder = tmp_path_factory.mktemp("plain")
    text = (
        f"# Why?\n\n| takes |\n|---|\n| 1.6 GB{TAG} |\n\nAgain 1.6 GB{TAG}, `x{TAG}`."
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        ship_records_of(folder, monkeypatch)
        return built(folder, [new_markdown_cell(text)])[1]


def cells_of(pages, claim):
    """Texts of the cells in the row of a claim."""
    row = pages["ledger"].find(id=claim)
    return [" ".join(cell.get_text().split()) for cell in row.find_all("td")]


def measured(what, machine=None, value=3.0, **params):
    """A record of a ratio, by this machine or by another one."""
    made = records.Measurement(
        what, "ratio", "1", value, (value,) * 5, params=params
    ).record()
    return {**made, "machine": {**made["machine"], **(machine or {})}}


def publish(what, metric="ratio", unit="1", value=2.0, **more):
    """An output as `records.publish` leaves it."""
    made = records.Measurement(what, metric, unit, value, **more).record()
    return new_output(
        "display_data", data={records.MIME: made, "text/plain": f"{what}: {metric}"}
    )


def test_a_tag_in_the_prose_leads_to_the_ledger_and_the_ledger_leads_back(plain):
    page = plain[HOME]
    links = page.find_all("a", href="ledger.html#joint-memory-20s")
    assert {link["aria-label"] for link in links} == {
        "Claim joint-memory-20s: arithmetic checked"
    }
    assert len(links) == 2 and len(page.find_all(id="claim-joint-memory-20s")) == 1
    assert TAG in page.find("main").get_text()  # inside code it is code
    back = plain["ledger"].find(id="joint-memory-20s").find_all("a")[-1]
    assert (back["href"], back.get_text()) == (
        f"{HOME}.html#claim-joint-memory-20s",
        "Why?",
    )


@pytest.mark.parametrize("table", ["ledger", "more"])
def test_every_claim_has_a_row_that_can_be_sorted_and_filtered(plain, table):
    rows = plain["ledger"].find(id=table).select("tr[data-verdict]")
    claims = [
        claim for claim in CLAIMS.values() if bool(claim.appendix) == (table == "more")
    ]
    claims.sort(key=lambda claim: claim.source["document"])
    assert [row["id"] for row in rows] == [claim.id for claim in claims] and len(
        claims
    ) > 20
    for row, claim in zip(rows, claims, strict=True):
        cells = row.find_all("td")
        told = [row["data-document"], row["data-needs"], row["data-notebook"]]
        assert told == [claim.source["document"], claim.needs, claim.notebook]
        assert cells[1]["data-value"] == (
            "" if claim.quoted is None else str(claim.quoted)
        )
        assert cells[3]["data-value"] == str(ledger.LABELS.index(row["data-verdict"]))
        assert (f"agrees if {claim.rule}" in cells[1].get_text()) == claim.is_defined
        assert cells[0].find("a", href=claim.source["url"])
        assert [cell.get("data-label") for cell in cells[1:]] == [
            "Published", "Computed here" if claim.formula else "Measured here", "Verdict", "Notebook",
        ]  # fmt: skip


def test_the_appendix_is_folded_and_in_no_count(plain):
    chips = [
        chip.b.get_text() for chip in plain["ledger"].select(".chip[data-verdict]")
    ]
    assert sum(map(int, chips)) == len(LISTED)
    for page in ("index", "ledger"):
        assert f"Of {len(LISTED)} published claims, " in plain[page].get_text()
    fold = plain["ledger"].find(id="more").find_parent("details")
    assert not fold.has_attr("open")


def test_each_document_has_an_answer_above_its_claims(plain):
    answers = plain["ledger"].select(".answers > li")
    assert len(answers) == len({claim.source["document"] for claim in CLAIMS.values()})
    for answer in answers:
        link = answer.select_one(".tally a")
        group = plain["ledger"].find(id=link["href"].removeprefix("#"))
        claims = len(group.select("tr[data-verdict]"))
        assert link.get_text().split()[0] == str(claims)
        marks = [mark.get_text() for mark in answer.select(".mark")]
        assert sum(int(mark.split()[0]) for mark in marks) == claims
        assert group.select_one("tr.group a")["href"] == answer.h3.a["href"]


def test_what_a_cpu_measured_of_a_claim_about_a_gpu_is_shown_with_what_differs(
    tmp_path,
):
    claim = next(
        one for one in LISTED if one.needs == "cuda" and one.arms and one.is_defined
    )
    output = publish(claim.id, value=3.0, params={"arms": list(claim.arms)})
    _, pages = built(tmp_path, [new_code_cell("1", outputs=[output])])
    why = "measured on a CPU, and the claim is about a GPU"
    _, _, here, verdict, _ = cells_of(pages, claim.id)
    assert here == "3×"
    assert verdict.startswith("evidence, not comparable") and why in verdict


def test_what_another_machine_recorded_stands_with_what_it_is_there(tmp_path):
    ratios = [one for one in LISTED if one.kind == "ratio" and one.arms and one.quoted]
    cuda = next(one for one in ratios if one.needs == "cuda" and not one.formula)
    cpu = next(one for one in ratios if one.needs == "cpu" and not one.formula)
    gpu = {
        "id": "f" * 12,
        "gpus": [{"name": "H200", "memory.total": "1", "driver_version": "5"}],
    }
    other = {"id": "e" * 12, "gpus": [], "cpu_model": "Abacus"}
    made = [
        measured(cuda.id, gpu, cuda.quoted, arms=list(cuda.arms), device="cuda"),
        measured(cpu.id, other, arms=list(cpu.arms)),
    ]
    records.append(tmp_path / "data/records/bench.jsonl", *made)
    _, pages = built(tmp_path, [new_markdown_cell("# Why?")])
    told = cells_of(pages, cuda.id)[2]
    assert told.startswith(f"{cuda.show(cuda.quoted)} (reproduced there) H200, commit ")
    assert "Abacus" in cells_of(pages, cpu.id)[2]
    for one in (cuda, cpu):
        cell = pages["ledger"].find(id=one.id).find_all("td")[2]
        assert cell["data-label"] == "Recorded elsewhere"
    assert "On H200: 1 reproduced." in pages["ledger"].find("header").get_text()
    missing = next(one for one in LISTED if one.needs == "cuda" and one.id != cuda.id)
    assert cells_of(pages, missing.id)[2] == "not recorded yet"


def test_a_page_with_marks_says_what_they_and_the_verdicts_mean(plain):
    legend = plain["ledger"].select("#verdicts div")
    said = {part.dt.get_text().strip(): part.dd.get_text() for part in legend}
    assert said == LEGEND and [*LEGEND] == [*ledger.LABELS]
    for page in (HOME, "ledger"):
        (line,) = plain[page].select("p.marks")
        assert all(sign in line.get_text() for sign in SIGNS.values())
    assert not plain["records"].select("p.marks")


def test_verdicts_in_a_table_have_their_mark_and_say_what_it_means():
    rows = "".join(
        f"<tr><td>x</td><td>{label}</td></tr>" for label in [*LEGEND, "no verdict"]
    )
    body = tidy(f"<table><tbody>{rows}</tbody></table>")
    assert mark_verdicts(body) == len(LEGEND)
    for span in body.select("td span"):
        label = span.get_text()
        assert span["title"] == LEGEND[label]
        assert span["class"] == f"mark {MARKS.get(label, 'soft')}"
    assert {*MARKS} <= {*LEGEND} and {*MARKS.values()} | {"soft"} == {*SIGNS} == {
        *MEANINGS
    }


def test_a_report_without_a_record_or_a_copy_of_the_notebook_is_a_report(tmp_path):
    run = NotebookRun(
        name="gone",
        status="failed",
        seconds=0.0,
        parameters={},
        sha256="",
        error="killed",
    )
    sentence, defects = build(tmp_path, [run], 1.0, PLAN)
    index = (tmp_path / "index.html").read_text()
    assert sentence.startswith("0 of 1 notebooks ran.") and defects == []
    assert "gone: killed" in index and 'id="findings"' not in index
    assert "<h1>gone</h1>" in (tmp_path / "gone.html").read_text()


def test_records_stand_in_one_table_at_the_end_and_beside_the_figure_of_their_cell(
    tmp_path,
):
    shape = {"shape": [2, 80, 41], "dtype": "float16", "phase": "backward"}
    alt = {"image/png": {"alt": "bars"}}
    png = new_output("display_data", data={"image/png": "AAAA"}, metadata=alt)
    outputs = [
        publish("joint-memory-20s"),
        publish("peak", "peak", "B", 2.0**20, params=shape),
        png,
    ]
    text, pages = built(tmp_path, [new_code_cell("1", outputs=outputs)])
    table = text.find(id="records").find_parent("section")
    assert (
        "joint-memory-20s: ratio" not in text.get_text()
        and len(text.select("p.kept")) == 1
    )
    assert table.find("a", href="ledger.html#joint-memory-20s") and table.find(
        "details"
    )
    for page in (table, pages["records"]):
        cells = [cell.get_text() for cell in page.find_all("td")]
        assert {"1 MiB", "float16", "backward", "2×80×41"} <= {*cells}
    figure = pages["figures"].find("figure")
    assert (
        figure.find("a", href=f"{HOME}.html#cell-id=c0") and figure.img["alt"] == "bars"
    )
    assert "peak 1 MiB" in " ".join(figure.get_text().split())


def test_styles_and_scripts_are_gone_and_text_that_speaks_of_them_stays(tmp_path):
    made = '<style>p{}</style><p style="color:red">kept</p><script>alert(1)</script>'
    made += '<table><tr style="text-align: right;"><th></th><th>n</th></tr></table>'
    output = new_output("display_data", data={"text/html": made})
    prose = '# Why?\n\nIt says style="color:red" in prose.'
    page, _ = built(
        tmp_path, [new_markdown_cell(prose), new_code_cell("1", outputs=[output])]
    )
    main = page.find("main")
    assert 'style="color:red"' in main.get_text() and main.find("p", string="kept")
    assert not main.find_all(["style", "script"]) and not main.find_all(style=True)
    assert main.find("tr", attrs={"data-align": "right"}).find_parent(
        "div", class_="scroll"
    )
    assert [cell["scope"] for cell in main.find_all("th")] == ["row"]


@pytest.mark.parametrize(("before", "after"), [
    ("<h1>a</h1><h3>b</h3><h2>c</h2>", "<h1>a</h1><h2>b</h2><h2>c</h2>"),
    ("<h2>a</h2><h1>b</h1><h4>c</h4>", "<h1>a</h1><h2>b</h2><h3>c</h3>"),
    ('<p id="a">1</p><p class="x" id="a">2</p><a href="#main">5</a>', '<p id="nb-a">1</p><p class="x">2</p><a href="#nb-main">5</a>'),
    ('<p id="cell-id=x"><a href="#cell-id=x" id="claim-y">1</a><a href="#records">2</a></p>',) * 2,
    ('<h2 id="records">a</h2>', '<h1 id="nb-records">a</h1>'),
])  # fmt: skip
def test_headings_come_in_order_and_an_id_stands_once(before, after):
    assert str(tidy(before)) == after


def test_each_figure_scrolls_in_a_box_of_its_own_and_the_frames_of_a_slider_in_one():
    image = '<img alt="A figure" src="data:image/svg+xml;base64,AAAA">'
    frames = f'<div class="frame">{image}</div><div class="frame" hidden>{image}</div>'
    photo = '<img alt="A photo" src="data:image/png;base64,AAAA">'
    body = tidy(
        f'<p>{image}</p><div class="frames" data-label="n">{frames}</div>{photo}'
    )
    boxes = body.find_all("div", class_="scroll picture")
    assert [len(box.find_all("img")) for box in boxes] == [1, 2]


def test_what_is_not_inside_the_page_leaves_its_words_and_links_lead_to_pages(tmp_path):
    text = (
        '# Where?\n\n![a far bird](http://example.org/b.png) <img alt="dot" src="data:image/png;base64,AAAA">'
        "\n\n[here](02_there.ipynb), [gone](03_gone.ipynb#x) and [far](https://example.org/04_far.ipynb)"
    )
    nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), tmp_path / "x.ipynb")
    found = render_page(tmp_path / "x.ipynb", {}, {"02_there": "There?"})
    assert found.title == "Where?" and found.defects == [
        "a picture is not inside the page"
    ]
    assert [figure["alt"] for figure in found.figures] == ["dot"]
    assert "a far bird" in found.body and "example.org/b.png" not in found.body
    links = '<a href="02_there.html">here</a>, gone and <a href="https://example.org/04_far.ipynb">far</a>'
    assert links in found.body


@pytest.mark.parametrize(
    ("unit", "metric", "value", "told"),
    [("s/s", "rtfx", 4.5, "4.5× real time"), ("B", "peak", 2.0**21, "2 MiB"), ("fraction", "wer", 0.125, "12.5 %"),
     ("1", "ratio", 2.0, "2 ×"), ("1", "count", 3.0, "3"), ("ms", "latency", 1.5, "1.5 ms")],
)  # fmt: skip
def test_values_come_with_their_unit(unit, metric, value, told):
    assert (
        record_columns(records.Measurement("x", metric, unit, value).record())["median"]
        == told
    )


@pytest.mark.parametrize(("typed", "told"), [
    (["cli.py", "report", "02", "-p", "x", "a b"], "asrkit report 02 -p x 'a b'"),
    (["/srv/bin/asrkit", "--out", str(Path.home() / "reports")], "asrkit --out ~/reports"), ([], ""),
])  # fmt: skip
def test_the_command_is_told_as_it_was_typed(typed, told):
    assert command_line(typed) == told


@pytest.mark.parametrize(("text", "spaced"), [
    ("26% of 9.1%", "26\u00a0% of 9.1\u00a0%"), ("26 % and 26\u00a0%", "26\u00a0% and 26\u00a0%"), ("a % b, 5%d", "a % b, 5%d"),
])  # fmt: skip
def test_a_per_cent_has_one_form(text, spaced):
    assert space_percents(text) == spaced
