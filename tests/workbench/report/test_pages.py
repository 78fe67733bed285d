"""The content of pages from notebooks whose outputs are written by hand, so that no kernel runs."""

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
PLAN |= {"notebooks": ["other.ipynb"]}
GLOSSARY = "# Glossary\n\nTerms.\n\n### Encoder frame\n\nA vector.\n"
CLAIMS = {claim.id: claim for claim in ledger.load_claims()}
LISTED = [claim for claim in CLAIMS.values() if not claim.appendix]
TAG = "<!-- joint-memory-20s -->"
TERM = "[frame](glossary.md#encoder-frame)"
HOME = CLAIMS["joint-memory-20s"].notebook


def ship_records_of(folder, monkeypatch):
    """Makes asrkit read its records from `folder`/data/records, which is empty at first."""
    real = files.shipped
    own = {"records": folder / "data/records"}
    monkeypatch.setattr(files, "shipped", lambda name: own.get(name) or real(name))


@pytest.fixture(autouse=True)
def own_records(tmp_path, monkeypatch):
    ship_records_of(tmp_path, monkeypatch)


def built(folder, cells, **others):
    """The pages of a report on executed notebooks: one of `cells`, and others by name."""
    (folder / "runs").mkdir()
    runs = []
    for stem, of_notebook in {HOME: cells, **others}.items():
        for number, cell in enumerate(of_notebook):
            cell["id"] = f"c{number}"
        executed = folder / "runs" / f"{stem}.ipynb"
        nbformat.write(new_notebook(cells=of_notebook), executed)
        runs.append(outcome(stem, executed.parent, {}))
    (folder / "glossary.md").write_text(GLOSSARY)
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
    asks = new_markdown_cell("**Question 1.** How much?")
    with pytest.MonkeyPatch.context() as monkeypatch:
        ship_records_of(folder, monkeypatch)
        return built(
            folder,
            [new_markdown_cell(f"# Why?\n\nIt takes 1.6 GB{TAG}."), shows, asks],
            other=[new_markdown_cell(f"# Is it small?\n\nA {TERM} is.")],
        )


def test_a_term_leads_to_its_entry_in_the_glossary(plain):
    entry = plain["glossary"].find(id="encoder-frame")
    assert (entry.get_text(), entry.find_next("p").get_text()) == (
        "Encoder frame",
        "A vector.",
    )
    words = plain["glossary"].get_text()
    assert "A notebook links a term once" in words and "Terms." not in words
    assert (
        plain["other"].find("a", string="frame")["href"]
        == "glossary.html#encoder-frame"
    )


def test_a_claim_leads_to_where_a_notebook_quotes_it(plain):
    back = plain["claims"].find(id="joint-memory-20s").find_all("a")[-1]
    href = f"{HOME}.html#claim-joint-memory-20s"
    assert (back["href"], back.get_text()) == (href, "Why?")
    assert plain[HOME].find(id="claim-joint-memory-20s")


@pytest.mark.parametrize("name", ["listed", "more"])
def test_every_claim_has_a_row_with_a_cell_under_each_heading(plain, name):
    table = plain["claims"].find(id=name)
    rows = table.select("tr[data-verdict]")
    claims = [
        one.id for one in CLAIMS.values() if bool(one.appendix) == (name == "more")
    ]
    assert sorted(row["id"] for row in rows) == sorted(claims)
    _, *heads = [head.get_text() for head in table.select("thead th")]
    for row in rows:
        claim = CLAIMS[row["id"]]
        _, *cells = row.find_all("td")
        labels = [cell.get("data-label") for cell in cells]
        assert labels == heads
        assert row.find("a", href=claim.source["url"])
        assert (f"agrees if {claim.rule}" in row.get_text()) == claim.is_defined


def test_the_appendix_is_folded_and_in_no_count(plain):
    for page in ("index", "claims"):
        assert f"{len(LISTED)} published claims, " in plain[page].get_text()
        counts = plain[page].select(".outcomes li > :first-child")
        assert sum(int(count.get_text()) for count in counts) == len(LISTED)
    fold = plain["claims"].find(id="more").find_parent("details")
    assert not fold.has_attr("open")


def test_each_document_has_a_bar_of_its_claims_above_them(plain):
    answers = plain["claims"].select(".sources tr")
    assert len(answers) == len({claim.source["document"] for claim in CLAIMS.values()})
    for answer in answers:
        link = answer.select_one("td.n a")
        group = plain["claims"].find(id=link["href"].removeprefix("#"))
        bar = answer.select_one(".stack")
        numbers = [int(part.get_text()) for part in bar.find_all("span")]
        assert numbers == [
            int(part.split()[0]) for part in bar["aria-label"].split("; ")
        ]
        claims = len(group.select("tr[data-verdict]"))
        assert sum(numbers) == claims and link.get_text().startswith(f"{claims} ")


def test_the_index_says_how_many_claims_wait_for_a_gpu_and_what_settles_them(plain):
    said = " ".join(plain["index"].find("header").get_text().split())
    assert (
        "waiting for a GPU" in said and "python -m benchmarks all --device cuda" in said
    )


def test_what_another_machine_recorded_stands_with_what_it_is_there(tmp_path):
    claim = CLAIMS["ctc-greedy-batched"]
    params = {"arms": [*claim.arms], "device": "cuda"}
    samples = (claim.quoted,) * 3
    made = records.Measurement(
        claim.id, "ratio", "1", claim.quoted, samples, params=params
    )
    record = made.record()
    card = {"name": "H200", "memory.total": "1", "driver_version": "5"}
    record["machine"] |= {"id": "f" * 12, "gpus": [card]}
    records.append(tmp_path / "data/records/bench.jsonl", record)
    claims = built(tmp_path, [new_markdown_cell("# Why?")])["claims"]
    cell = claims.find(id=claim.id).select_one("td[data-label='Recorded elsewhere']")
    shown = " ".join(cell.get_text().split())
    assert shown.startswith("1.1× (reproduced there) on H200, commit ")
    assert "Recorded on H200: 1 reproduced by measurement." in claims.get_text()


def test_a_page_with_marks_says_what_they_and_the_verdicts_mean(plain):
    legend = plain["claims"].select("#verdicts div")
    meanings = {part.dt.get_text().strip(): part.dd.get_text() for part in legend}
    assert meanings == LEGEND
    (line,) = plain[HOME].select("p.marks")
    assert all(sign in line.get_text() for sign in SIGNS.values())
    assert not plain["other"].select("p.marks")
    for page in ("index", "claims"):
        marked = {
            mark.get_text() for mark in plain[page].select(".outcomes .mark.good")
        }
        assert marked == {"checked by arithmetic"}
        first = plain[page].select_one(".mark")
        assert first.find_parent(class_="outcomes")


def test_a_report_without_a_record_or_a_copy_of_the_notebook_is_a_report(tmp_path):
    run = NotebookRun(name="gone", status="failed", error="killed")
    sentence, defects = build(tmp_path, [run], 1.0, PLAN)
    index = (tmp_path / "index.html").read_text()
    assert sentence.startswith("0 of 1 notebook ran.") and defects == []
    assert "gone: killed" in index and 'id="findings"' not in index
    assert "<h1>gone</h1>" in (tmp_path / "gone.html").read_text()


def test_records_stand_in_one_table_at_the_end_and_beside_the_figure_of_their_cell(
    tmp_path,
):
    params = {"shape": [2, 80, 41], "dtype": "float16", "phase": "backward"}
    peak = records.Measurement("peak", "peak", "B", 2.0**20, params=params).record()
    alt = {"image/png": {"alt": "bars"}}
    outputs = [
        new_output("display_data", data={records.MIME: peak, "text/plain": "a line"}),
        new_output("display_data", data={"image/png": "AAAA"}, metadata=alt),
    ]
    pages = built(tmp_path, [new_code_cell("1", outputs=outputs)])
    assert "a line" not in pages[HOME].get_text()
    table = pages[HOME].find(id="records").find_parent("section")
    cells = {cell.get_text() for cell in table.select("details td")}
    assert {"1.05\u00a0MB", "phase=backward, dtype=float16, shape=[2, 80, 41]"} <= cells
    figure = pages["figures"].find("figure")
    assert figure.find("a", href=f"{HOME}.html#cell-id=c0")
    assert "peak 1.05 MB" in " ".join(figure.get_text().split())


def test_a_card_has_the_question_the_answer_a_picture_and_times(plain):
    first, second = plain["index"].select(".cards > li")
    assert first.h3.get_text().split() == [HOME[:2], "Why?"]
    assert "The loss is 3 times as fast." in first.get_text()
    asked = "1 min to read · 1 question · ran in 0 s"
    assert asked in first.get_text() and asked in plain[HOME].get_text()
    assert "1 min to read · ran in 0 s" in second.get_text()
    assert first.img["alt"] == "a lattice" and second.img is None
    takeaway = plain[HOME].find(class_="takeaway")
    assert "3 times" in takeaway.get_text() and takeaway.has_attr("open")


def test_every_page_leads_to_those_about_the_run_and_to_its_neighbours(plain):
    site = [f"{name}.html" for name in SITE_PAGES]
    for name, page in plain.items():
        assert [link["href"] for link in page.select("nav.site a")] == site
        here = [link["href"] for link in page.select("nav.site a[aria-current=page]")]
        assert here == ([f"{name}.html"] if name in SITE_PAGES else [])
    (after,) = {link.get_text() for link in plain[HOME].find_all("a", rel="next")}
    (before,) = {link.get_text() for link in plain["other"].find_all("a", rel="prev")}
    assert (after, before) == ("Is it small?\u00a0→", "←\u00a0Why?")


@pytest.mark.parametrize(("unit", "metric", "value", "shown"), [
    ("s/s", "rtfx", 4.5, "4.5× real time"),
    ("B", "peak", 2.0**21, "2.1 MB"),
    ("fraction", "wer", 0.125, "12.5 %"),
    ("1", "ratio", 2.0, "2×"),
    ("1", "count", 3.0, "3"),
    ("ms", "latency", 1.5, "1.5 ms"),
])  # fmt: skip
def test_values_come_with_their_unit(unit, metric, value, shown):
    record = {"unit": unit, "metric": metric, "value": value}
    assert value_with_unit(record) == shown.replace(" ", "\u00a0")
