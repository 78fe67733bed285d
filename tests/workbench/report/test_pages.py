"""Pages from executed notebooks that are written by hand: what a reader finds on them, without running a kernel."""

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit import files
from asrkit.workbench import claims as ledger
from asrkit.workbench import records
from asrkit.workbench.claims import LEGEND
from asrkit.workbench.report.execute import SITE_PAGES, NotebookRun, outcome
from asrkit.workbench.report.findings import value_with_unit
from asrkit.workbench.report.notebook import SIGNS
from asrkit.workbench.report.pages import build

PLAN = {"size": "quick", "device": "auto", "commands": ["asrkit report"]}
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


def built(folder, cells, name=HOME, **more):
    """The pages of a report on executed notebooks: one of `cells`, and `more` by name."""
    (folder / "runs").mkdir(exist_ok=True)
    runs = []
    for stem, of_notebook in {name: cells, **more}.items():
        for number, cell in enumerate(of_notebook):
            cell["id"] = f"c{number}"
        executed = folder / "runs" / f"{stem}.ipynb"
        nbformat.write(new_notebook(cells=of_notebook), executed)
        runs.append(outcome(stem, executed.parent, {}))
    _, defects = build(folder, runs, 1.0, PLAN)
    assert defects == []
    return {
        page.stem: BeautifulSoup(page.read_text(), "html.parser")
        for page in folder.glob("*.html")
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The pages of a report on two notebooks, the first of which quotes a claim and shows a takeaway, by name."""
    folder = tmp_path_factory.mktemp("plain")
    takeaway = {"text/markdown": "* The loss is **3 times** as fast."}
    picture = {"text/html": '<img alt="a lattice" src="data:image/svg+xml;base64,AA">'}
    outputs = [new_output("display_data", data=data) for data in (takeaway, picture)]
    shows = new_code_cell("1", metadata={"tags": ["takeaway"]}, outputs=outputs)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ship_records_of(folder, monkeypatch)
        return built(
            folder,
            [new_markdown_cell(f"# Why?\n\nIt takes 1.6 GB{TAG}."), shows],
            other=[new_markdown_cell("# Is it small?")],
        )


def cells_of(pages, claim):
    """Texts of the cells in the row of a claim."""
    row = pages["claims"].find(id=claim)
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


def test_a_claim_leads_to_where_a_notebook_quotes_it(plain):
    back = plain["claims"].find(id="joint-memory-20s").find_all("a")[-1]
    href = f"{HOME}.html#claim-joint-memory-20s"
    assert (back["href"], back.get_text()) == (href, "Why?")
    assert plain[HOME].find(id="claim-joint-memory-20s")


@pytest.mark.parametrize("table", ["listed", "more"])
def test_every_claim_has_a_row_with_a_cell_under_each_heading(plain, table):
    table = plain["claims"].find(id=table)
    rows = table.select("tr[data-verdict]")
    claims = [
        claim
        for claim in CLAIMS.values()
        if bool(claim.appendix) == (table["id"] == "more")
    ]
    claims.sort(key=lambda claim: claim.source["document"])
    assert [row["id"] for row in rows] == [claim.id for claim in claims] and len(
        claims
    ) > 20
    heads = [head.get_text() for head in table.select("thead th")]
    for row, claim in zip(rows, claims, strict=True):
        cells = row.find_all("td")
        labels = [cell.get("data-label") for cell in cells]
        labels[0], labels[3] = "Claim", "Measured or computed here"
        assert labels == heads
        assert (f"agrees if {claim.rule}" in cells[1].get_text()) == claim.is_defined
        assert cells[0].find("a", href=claim.source["url"])


def test_the_appendix_is_folded_and_in_no_count(plain):
    for page in ("index", "claims"):
        assert f"Of {len(LISTED)} published claims, " in plain[page].get_text()
    fold = plain["claims"].find(id="more").find_parent("details")
    assert not fold.has_attr("open")


def test_each_document_has_an_answer_above_its_claims(plain):
    answers = plain["claims"].select(".answers > li")
    assert len(answers) == len({claim.source["document"] for claim in CLAIMS.values()})
    for answer in answers:
        link = answer.select_one(".tally a")
        group = plain["claims"].find(id=link["href"].removeprefix("#"))
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
    pages = built(tmp_path, [new_code_cell("1", outputs=[output])])
    why = "measured on a CPU, and the claim is about a GPU"
    _, _, _, here, verdict, _ = cells_of(pages, claim.id)
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
    pages = built(tmp_path, [new_markdown_cell("# Why?")])
    told = cells_of(pages, cuda.id)[2]
    assert told.startswith(
        f"{cuda.show(cuda.quoted)} (reproduced there) on H200, commit "
    )
    assert "Abacus" in cells_of(pages, cpu.id)[2]
    for one in (cuda, cpu):
        cell = pages["claims"].find(id=one.id).find_all("td")[2]
        assert cell["data-label"] == "Recorded elsewhere"
    assert "On H200: 1 reproduced." in pages["claims"].find("header").get_text()
    missing = next(one for one in LISTED if one.needs == "cuda" and one.id != cuda.id)
    assert cells_of(pages, missing.id)[2] == "–"


def test_a_page_with_marks_says_what_they_and_the_verdicts_mean(plain):
    legend = plain["claims"].select("#verdicts div")
    said = {part.dt.get_text().strip(): part.dd.get_text() for part in legend}
    assert said == LEGEND and [*LEGEND] == [*ledger.LABELS]
    for page in (HOME, "claims"):
        (line,) = plain[page].select("p.marks")
        assert all(sign in line.get_text() for sign in SIGNS.values())
    assert not plain["other"].select("p.marks")


def test_a_report_without_a_record_or_a_copy_of_the_notebook_is_a_report(tmp_path):
    run = NotebookRun(name="gone", status="failed", error="killed")
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
    pages = built(tmp_path, [new_code_cell("1", outputs=outputs)])
    assert "joint-memory-20s: ratio" not in pages[HOME].get_text()
    assert len(pages[HOME].select("p.kept")) == 1
    table = pages[HOME].find(id="records").find_parent("section")
    cells = [cell.get_text() for cell in table.select("details td")]
    shown = "phase=backward, dtype=float16, shape=[2, 80, 41]"
    assert {"1.05\u00a0MB", shown} <= {*cells}
    figure = pages["figures"].find("figure")
    assert (
        figure.find("a", href=f"{HOME}.html#cell-id=c0") and figure.img["alt"] == "bars"
    )
    assert "peak 1.05 MB" in " ".join(figure.get_text().split())


def test_a_card_has_the_question_the_answer_a_picture_and_minutes(plain):
    first, second = plain["index"].select(".cards > li")
    assert first.h3.get_text().split() == [HOME[:2], "Why?"]
    text = first.get_text()
    assert "The loss is 3 times as fast." in text
    assert first.img["alt"] == "a lattice" and "1 min to read · ran in 0 s" in text
    assert second.img is None and "3 times" not in second.get_text()
    assert "3 times" in plain[HOME].find(class_="takeaway").get_text()


def test_every_page_leads_to_those_about_the_run_and_to_its_neighbours(plain):
    for name, page in plain.items():
        links = page.select("nav.site a")
        assert [link["href"] for link in links] == [
            f"{other}.html" for other in SITE_PAGES
        ]
        here = [link["href"] for link in links if link.get("aria-current") == "page"]
        assert here == ([f"{name}.html"] if name in SITE_PAGES else [])
    (after,) = {link.get_text() for link in plain[HOME].find_all("a", rel="next")}
    (before,) = {link.get_text() for link in plain["other"].find_all("a", rel="prev")}
    assert (after, before) == ("Is it small?\u00a0→", "←\u00a0Why?")


@pytest.mark.parametrize(
    ("unit", "metric", "value", "told"),
    [("s/s", "rtfx", 4.5, "4.5× real time"), ("B", "peak", 2.0**21, "2.1 MB"), ("fraction", "wer", 0.125, "12.5 %"),
     ("1", "ratio", 2.0, "2×"), ("1", "count", 3.0, "3"), ("ms", "latency", 1.5, "1.5 ms")],
)  # fmt: skip
def test_values_come_with_their_unit(unit, metric, value, told):
    record = records.Measurement("x", metric, unit, value).record()
    assert value_with_unit(record) == told.replace(" ", "\u00a0")
