"""Pages from executed notebooks that are written by hand: what a reader finds on them, without running a kernel."""

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit import files
from asrkit.workbench import ledger, records
from asrkit.workbench.ledger import LEGEND
from asrkit.workbench.report import NotebookRun
from asrkit.workbench.report.columns import record_columns
from asrkit.workbench.report.frame import page_context
from asrkit.workbench.report.marks import MARKS, MEANINGS, SIGNS, mark_verdicts
from asrkit.workbench.report.notebook_page import render_page
from asrkit.workbench.report.notebook_run import outcome
from asrkit.workbench.report.plan import command_line
from asrkit.workbench.report.prose import prose
from asrkit.workbench.report.site import build
from asrkit.workbench.report.tidy import tidy
from asrkit.workbench.typography import space_percents

PLAN = {"size": "quick", "device": "auto"}


class Ledger(HTMLParser):
    """Rows of a table of claims: attributes of the row, and of each cell with its text."""

    def __init__(self, text, table="ledger"):
        super().__init__()
        self.rows, self.sorts = {}, []
        self.row = None
        start = text.index(f'<table id="{table}"')
        self.feed(text[start : text.index("</table>", start)])

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "tr":
            self.row = self.rows.setdefault(attrs["id"], (attrs, [])) if "id" in attrs else None
        elif tag == "td" and self.row:
            self.row[1].append({**attrs, "text": "", "links": []})
        elif tag == "a" and self.row:
            self.row[1][-1]["links"].append(attrs["href"])

    def handle_data(self, data):
        if self.row and self.row[1]:
            self.row[1][-1]["text"] += data


@pytest.fixture(autouse=True)
def no_shipped_records(tmp_path, monkeypatch):
    """The project's claims with the records of `tmp_path`/data/records, of which there are none at first."""
    ship_records_of(tmp_path, monkeypatch)


def ship_records_of(folder, monkeypatch):
    real = files.shipped
    monkeypatch.setattr(
        files,
        "shipped",
        lambda name: folder / "data/records" if name == "records" else real(name),
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Texts of the pages of a report on a notebook without records, by name."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as monkeypatch:
        ship_records_of(folder, monkeypatch)
        return built(folder, [new_markdown_cell("# Why?")])[1]


def publish(what, metric="ratio", unit="1", value=2.0, **more):
    """An output as `records.publish` leaves it."""
    sealed = records.Measurement(what, metric, unit, value, **more).record()
    return new_output(
        "display_data", data={records.MIME: sealed, "text/plain": f"{what}: {metric}"}
    )


def built(folder, cells, name="01_transducer"):
    """Texts of the pages of a report on one executed notebook with `cells`: its own, and by name."""
    (folder / "runs").mkdir(exist_ok=True)
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number}"
    executed = folder / "runs" / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), executed)
    _, defects = build(
        folder, [NotebookRun(name=name, parameters={}, **outcome(executed, None))], 1.0, PLAN
    )
    assert defects == []
    pages = {page.stem: page.read_text() for page in folder.glob("*.html")}
    return pages[name], pages


def test_a_tag_in_the_prose_leads_to_the_ledger_and_the_ledger_leads_back(tmp_path):
    tag = "<!-- joint-memory-20s -->"
    text = f"# Why?\n\n| takes |\n|---|\n| 1.6 GB{tag} |\n\nAgain 1.6 GB{tag}, `x{tag}`."
    home = next(claim.notebook for claim in ledger.load_claims() if claim.id == "joint-memory-20s")
    text, pages = built(tmp_path, [new_markdown_cell(text), new_code_cell("1")], home)
    name = "Claim joint-memory-20s: arithmetic checked"
    assert (
        text.count('href="ledger.html#joint-memory-20s"') == text.count(f'aria-label="{name}"') == 2
    )
    assert (
        text.count('id="claim-joint-memory-20s"') == 1 and "&lt;!-- joint-memory-20s --&gt;" in text
    )
    row, cells = Ledger(pages["ledger"]).rows["joint-memory-20s"]
    assert (
        row["data-notebook"] == home and f"{home}.html#claim-joint-memory-20s" in cells[-1]["links"]
    )


@pytest.mark.parametrize("table", ["ledger", "more"])
def test_every_claim_has_a_row_that_can_be_sorted_and_filtered(plain, table):
    found = Ledger(plain["ledger"], table).rows
    claims = [claim for claim in ledger.load_claims() if bool(claim.appendix) == (table == "more")]
    assert len(claims) > 20
    assert [*found] == [
        claim.id for claim in sorted(claims, key=lambda claim: claim.source["document"])
    ]
    for claim in claims:
        row, cells = found[claim.id]
        assert row["data-document"] == claim.source["document"] and row["data-needs"] == claim.needs
        assert row["data-verdict"] in ledger.LABELS and cells[3]["data-value"] == str(
            ledger.LABELS.index(row["data-verdict"])
        )
        assert cells[1]["data-value"] == ("" if claim.quoted is None else str(claim.quoted))
        tolerance = f"agrees if {claim.rule}"
        assert cells[1]["text"].strip().endswith(tolerance) == claim.is_defined
        assert claim.source["url"] in cells[0]["links"]
        assert (claim.appendix in cells[0]["text"]) or not claim.appendix
        assert [cell.get("data-label") for cell in cells[1:]] == [
            "Published", "Computed here" if claim.formula else "Measured here", "Verdict", "Notebook",
        ]  # fmt: skip
        is_computed = cells[2]["text"].strip().endswith("computed")
        assert is_computed == bool(claim.formula and claim.quoted is not None)


def test_the_appendix_is_folded_and_in_no_count(plain):
    text = plain["ledger"]
    listed = [claim for claim in ledger.load_claims() if not claim.appendix]
    chips = re.findall(r'data-verdict="([^"]+)">[^<]*<b>(\d+)</b>', text)
    assert sum(int(count) for _, count in chips) == len(listed)
    assert all(label in ledger.LABELS for label, _ in chips)
    for page in ("index", "ledger"):
        assert f"Of {len(listed)} published claims, " in plain[page]
    folded = text[text.index('<h2 id="appendix">') : text.index('<table id="more"')]
    assert "<details><summary>" in folded and "</details>" not in folded


def test_each_document_has_an_answer_above_its_claims(plain):
    page = BeautifulSoup(plain["ledger"], "html.parser")
    documents = {claim.source["document"] for claim in ledger.load_claims()}
    answers = page.select(".answers > li")
    assert len(answers) == len(documents)
    for answer in answers:
        marks = [mark.get_text() for mark in answer.select(".mark")]
        link = answer.select_one(".tally a")
        group = page.find(id=link["href"].removeprefix("#"))
        claims = len(group.select("tr[data-verdict]"))
        assert link.get_text() == f"{claims} claim{'s' if claims != 1 else ''}"
        assert sum(int(mark.split()[0]) for mark in marks) == claims
        assert answer.get_text().count("Our view: ") == 1
        assert group.select_one("tr.group a")["href"] == answer.h3.a["href"]


def test_evidence_that_cannot_settle_a_claim_is_shown_with_what_differs(tmp_path):
    claim = next(
        claim
        for claim in ledger.load_claims()
        if claim.needs == "cuda" and claim.arms and claim.is_defined and not claim.appendix
    )
    cell = new_code_cell(
        "1", outputs=[publish(claim.id, value=3.0, params={"arms": list(claim.arms)})]
    )
    pages = built(tmp_path, [new_markdown_cell("# Why?"), cell])[1]
    row, cells = Ledger(pages["ledger"]).rows[claim.id]
    assert row["data-verdict"] == "evidence, not comparable"
    why = "measured on a CPU, and the claim is about a GPU"
    assert cells[2]["text"].strip() == f"3× not comparable: {why}" and why in cells[3]["text"]


def test_the_ledger_says_what_each_verdict_means_and_which_notebooks_are_to_come(tmp_path, plain):
    assert [*LEGEND] == [*ledger.LABELS]
    tag = "<!-- joint-memory-20s -->"
    text, pages = built(tmp_path, [new_markdown_cell(f"# Why?\n\n1.6 GB{tag}")])
    index = pages["ledger"]
    legend = re.search(r'(?s)<details class="legend" id="verdicts">.*?</details>', index)[0]
    assert re.findall(r"<dt><span[^>]*>([^<]*)", legend) == [*LEGEND] and all(
        words in legend for words in LEGEND.values()
    )
    for page in (text, index):  # a page that has marks says what they mean
        line = re.search(r'(?s)<p class="marks soft">.*?</p>', page)[0]
        assert all(sign in line for sign in SIGNS.values())
    assert 'class="marks' not in plain["01_transducer"]
    series = {path.stem for path in (files.HERE.parent / "notebooks").glob("*.ipynb")}
    rows, grids = (
        Ledger(index).rows,
        {claim.id for claim in ledger.load_claims() if claim.unit == "lines"},
    )
    for name, (row, cells) in rows.items():
        home = row["data-notebook"]
        told = (
            ""
            if home == "01_transducer" or not series
            else " not in this run"
            if home in series
            else " to come"
        )
        page = "Why?" if home == "01_transducer" else home
        assert cells[4]["text"].strip() == page + told
        assert ("lines of a table" in cells[1]["text"]) == (name in grids)


def test_what_a_gpu_recorded_is_told_with_its_machine_and_what_none_has_recorded_too(tmp_path):
    claim = next(
        c
        for c in ledger.load_claims()
        if c.needs == "cuda" and c.kind == "ratio" and c.arms and c.quoted and not c.appendix
    )
    made = records.Measurement(
        claim.id, "ratio", "1", 3.0, (3.0,) * 5, params={"arms": list(claim.arms), "device": "cuda"}
    ).record()
    gpu = {"name": "H200", "memory.total": "1 MiB", "driver_version": "570.1", "uuid": "0"}
    made = {
        **made,
        "machine": {**made["machine"], "id": "f" * 12, "gpus": [gpu]},
        "captured_at": "2026-01-02T00:00:00Z",
    }
    cpu = next(
        c
        for c in ledger.load_claims()
        if c.needs == "cpu"
        and c.kind == "ratio"
        and c.arms
        and c.quoted
        and not c.formula
        and not c.appendix
    )
    other = records.Measurement(
        cpu.id, "ratio", "1", 3.0, (3.0,) * 5, params={"arms": list(cpu.arms)}
    ).record()
    other = {
        **other,
        "machine": {**other["machine"], "id": "e" * 12, "gpus": [], "cpu_model": "Abacus"},
    }
    records.append(tmp_path / "data/records/bench.jsonl", made, other)
    pages = built(tmp_path, [new_markdown_cell("# Why?")])[1]
    rows = Ledger(pages["ledger"]).rows
    told = rows[claim.id][1][2]["text"]
    assert "3×" in told and all(
        part in told for part in ("H200", "driver 570.1", "torch", "commit", "2026-01-02")
    )
    assert "another CPU: Abacus" in rows[cpu.id][1][2]["text"]
    assert [rows[name][1][2]["data-label"] for name in (claim.id, cpu.id)] == [
        "Recorded on reference GPU",
        "Recorded on another machine",
    ]
    for name, (row, cells) in rows.items():
        if row["data-needs"] == "cuda" and name != claim.id:
            assert cells[2]["text"].strip() == "not recorded yet", name
    assert "H200" in pages["machine"]
    assert "No record comes from a GPU machine yet" not in pages["machine"]


def test_a_report_without_a_record_or_a_copy_of_the_notebook_is_a_report(tmp_path):
    run = NotebookRun(
        name="gone", status="failed", seconds=0.0, parameters={}, sha256="", error="killed"
    )
    sentence, defects = build(tmp_path, [run], 1.0, PLAN)
    index = (tmp_path / "index.html").read_text()
    assert sentence.startswith("0 of 1 notebooks ran.") and defects == []
    assert "gone: killed" in index and 'id="findings"' not in index
    assert "<h1>gone</h1>" in (tmp_path / "gone.html").read_text()


def test_records_of_a_page_stand_in_one_table_at_its_end(tmp_path):
    shape = {"shape": [2, 80, 41], "dtype": "float16", "phase": "backward"}
    cells = [
        new_markdown_cell("# Why?"),
        new_code_cell(
            "one",
            outputs=[
                publish("joint-memory-20s"),
                publish("peak", "peak", "B", 3.0 * 2**20, params=shape),
            ],
        ),
        new_code_cell(
            "two", outputs=[publish("share", "share", "fraction", 0.25, samples=(0.2, 0.25, 0.5))]
        ),
    ]
    text, pages = built(tmp_path, cells)
    table = text[text.index('id="records"') :]
    assert "joint-memory-20s: ratio" not in text and text.count("published</p>") == 2
    assert '<a href="ledger.html#joint-memory-20s">' in table and "<details>" in table
    for cell in ("3 MiB", "float16", "backward", "2×80×41", "25 %", "22.5 – 37.5"):
        assert f">{cell}</td>" in table and f">{cell}</td>" in pages["records"], cell


def test_a_figure_names_its_cell_and_the_records_of_it(tmp_path):
    png = new_output(
        "display_data", data={"image/png": "AAAA"}, metadata={"image/png": {"alt": "bars"}}
    )
    cells = [new_code_cell("draw", outputs=[png, publish("peak", "peak", "B", 2.0**20)])]
    pages = built(tmp_path, cells)[1]
    figure = re.search(r"(?s)<figure>.*?</figure>", pages["figures"])[0]
    assert (
        'href="01_transducer.html#cell-id=c0"' in figure
        and "peak 1 MiB" in figure
        and 'alt="bars"' in figure
    )


def test_styles_and_scripts_are_gone_and_text_that_speaks_of_them_stays(tmp_path):
    made = '<style>p{}</style><p style="color:red" onclick="x()">kept</p><script>alert(1)</script>'
    made += '<table><tr style="text-align: right;"><th></th><th>n</th></tr></table>'
    cells = [
        new_markdown_cell(
            '# Why?\n\nIt says style="color:red" in prose and `style="x"` in code.\n\n| a |\n|--:|\n| 1 |'
        ),
        new_code_cell(
            "x = '<p style=\"a\">'", outputs=[new_output("display_data", data={"text/html": made})]
        ),
    ]
    text, _ = built(tmp_path, cells)
    body = text[text.index("<main") : text.index("</main>")]
    assert ">kept</p>" in body and "alert" not in body and "<style" not in body
    assert body.count('style="color:red"') == 1 and "&lt;p style=" in body
    assert body.count('data-align="right"') == 3 and '<div class="scroll"><table>' in body
    assert "<th></th>" not in body and '<th scope="row">n</th>' in body


@pytest.mark.parametrize(
    ("before", "levels"),
    [
        ("<h1>a</h1><h3>b</h3><h2>c</h2>", "122"),
        ("<h2>a</h2><h1>b</h1><h4>c</h4>", "123"),
        ("<h1>a</h1><h2>b</h2><h3>c</h3><h2>d</h2>", "1232"),
    ],
)
def test_headings_come_in_order_under_one_title(before, levels):
    assert (
        "".join(re.findall(r"<h(\d)", str(tidy(before))))
        == "".join(re.findall(r"</h(\d)", str(tidy(before))))
        == levels
    )


def test_an_id_stands_once_on_a_page_and_is_none_of_the_pages_own():
    body = tidy(
        '<p id="a">1</p><p class="x" id="a">2</p><p id=\'main\'>3</p><p id=code>4</p><a href="#main">5</a>'
    )
    assert (
        str(body)
        == '<p id="nb-a">1</p><p class="x">2</p><p id="nb-main">3</p><p id="nb-code">4</p><a href="#nb-main">5</a>'
    )
    kept = '<p id="cell-id=x"><a href="#cell-id=x" id="claim-y">1</a><a href="#records">2</a></p>'
    assert (
        str(tidy(kept)) == kept
        and str(tidy('<h2 id="records">a</h2>')) == '<h1 id="nb-records">a</h1>'
    )


def test_a_picture_that_is_not_inside_the_page_leaves_its_words(tmp_path):
    cell = new_markdown_cell(
        '# Why?\n\n![a far bird](http://example.org/b.png) <img alt="dot" src="data:image/png;base64,AAAA">'
    )
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "x.ipynb")
    found = render_page(tmp_path / "x.ipynb", {})
    assert found.defects == ["a picture is not inside the page"] and [
        figure["alt"] for figure in found.figures
    ] == ["dot"]
    assert (
        "example.org" not in found.body
        and "a far bird" in found.body
        and found.body.count("<img") == 1
    )


def test_comments_that_are_no_claims_are_left_out():
    named = []
    assert prose(
        "1<!-- code: a.py --> 2<!-- = 1 + 1 --> 3<!-- joint-x -->", {}, named
    ) == "1 2 3" and named == ["joint-x"]


def contrast(a: str, b: str) -> float:
    """Contrast of two colours `#rrggbb`, as WCAG counts it."""

    def light(colour):
        colour = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_colour_of_text_and_code_can_be_read_in_both_schemes():
    css = page_context()["css"]
    schemes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]
    dark = css.rindex("@media screen and (prefers-color-scheme: dark)")
    assert len(schemes) == 2 and css.count(".highlight .") > 80
    for scheme, code in zip(schemes, (css[:dark], css[dark:]), strict=True):
        text = [scheme[name] for name in ("ink", "soft", "link", "good", "bad", "mild")]
        assert (
            min(
                contrast(colour, ground)
                for colour in text
                for ground in (scheme["paper"], scheme["tint"])
            )
            >= 4.5
        )
        tokens = re.findall(r"\.highlight \.\w+ \{[^}]*?(?<!-)color: (#\w+)", code)
        assert (
            len(tokens) > 30
            and min((contrast(colour, scheme["tint"]), colour) for colour in tokens)[0] >= 4.5
        )


@pytest.mark.parametrize(
    ("unit", "metric", "value", "told"),
    [("s/s", "rtfx", 4.5, "4.5× real time"), ("us", "latency", 2.0, "2 µs"),
     ("B", "peak", 2.0**21, "2 MiB"), ("fraction", "wer", 0.125, "12.5 %"), ("1", "ratio", 2.0, "2 ×"), ("1", "count", 3.0, "3"),
     ("ms", "latency", 1.5, "1.5 ms"), ("FLOP/s", "rate", 2e12, "2000 GFLOP/s")],
)  # fmt: skip
def test_values_come_with_their_unit(unit, metric, value, told):
    assert record_columns(records.Measurement("x", metric, unit, value).record())["median"] == told


def test_links_to_notebooks_lead_to_their_pages_where_there_are_some(tmp_path):
    text = "# Where?\n\n[here](02_there.ipynb), [gone](03_gone.ipynb#x) and [far](https://example.org/04_far.ipynb)"
    nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), tmp_path / "x.ipynb")
    body = render_page(tmp_path / "x.ipynb", {}, {"02_there": "There?"}).body
    assert (
        '<a href="02_there.html">here</a>, gone and <a href="https://example.org/04_far.ipynb">far</a>'
        in body
    )


def test_the_command_is_told_as_it_was_typed():
    assert (
        command_line(["asrkit", "report", "02", "-p", "x", "a b"])
        == "asrkit report 02 -p x 'a b'"
        == command_line(["cli.py", "report", "02", "-p", "x", "a b"])
    )
    assert (
        command_line([]) == ""
        and command_line(["/srv/bin/asrkit", "report", "--out", "/srv/my reports"])
        == "asrkit report --out '/srv/my reports'"
    )
    assert (
        command_line(["asrkit", "report", "--out", str(Path.home() / "reports")])
        == "asrkit report --out ~/reports"
    )


def test_the_title_is_the_first_heading_and_widgets_do_not_show(tmp_path):
    view = new_output(
        "display_data",
        data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "HTML(value='live')"},
    )
    nbformat.write(
        new_notebook(cells=[new_markdown_cell("# Heard?"), new_code_cell("1", outputs=[view])]),
        tmp_path / "x.ipynb",
    )
    found = render_page(tmp_path / "x.ipynb", {})
    assert found.title == "Heard?" and "live" not in found.body


def test_the_policy_allows_this_style_and_this_script_and_no_other(plain):
    for text in plain.values():
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        for kind in ("style", "script"):
            (inside,) = re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", text)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert (
                f"{kind}-src 'sha256-{digest}'" in html.unescape(policy) and "unsafe" not in policy
            )


def test_verdicts_in_a_table_have_their_mark_and_say_what_it_means():
    rows = "".join(f"<tr><td>x</td><td>{label}</td></tr>" for label in [*LEGEND, "no verdict"])
    body = tidy(f"<table><tbody>{rows}</tbody></table>")
    assert mark_verdicts(body) == len(LEGEND)
    found = {span.get_text(): span for span in body.select("td span")}
    for label, span in found.items():
        assert span["title"] == LEGEND[label]
        assert span["class"] == f"mark {MARKS.get(label, 'soft')}"
    assert [*found] == [*LEGEND]
    assert {*MARKS} <= {*LEGEND} and {*MARKS.values()} | {"soft"} == {*SIGNS} == {*MEANINGS}


def test_each_figure_scrolls_in_a_box_of_its_own_and_the_frames_of_a_slider_in_one():
    image = '<img alt="A figure" src="data:image/svg+xml;base64,AAAA">'
    frames = f'<div class="frame">{image}</div><div class="frame" hidden>{image}</div>'
    photo = '<img alt="A photo" src="data:image/png;base64,AAAA">'
    body = tidy(f'<p>{image}</p><div class="frames" data-label="n">{frames}</div>{photo}')
    boxes = body.find_all("div", class_="scroll picture")
    assert [len(box.find_all("img")) for box in boxes] == [1, 2]
    assert not body.find("img", alt="A photo").find_parent(class_="scroll picture")


@pytest.mark.parametrize(("text", "spaced"), [
    ("26% of 9.1%", "26\u00a0% of 9.1\u00a0%"), ("26 % and 26\u00a0%", "26\u00a0% and 26\u00a0%"),
    ("a % b, 5%d", "a % b, 5%d"), ("(5%)", "(5\u00a0%)"),
])  # fmt: skip
def test_a_per_cent_has_one_form(text, spaced):
    assert space_percents(text) == spaced
