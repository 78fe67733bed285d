"""An executed notebook to one HTML page under a strict policy: formulas drawn, styles and scripts
gone, claims linked.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter

from asrkit.workbench.records import MIME, problem

WIDGET = "application/vnd.jupyter.widget-view+json"
NO_TEX = '<code class="no-tex">'
MARKS = {
    "reproduced": "good",
    "arithmetic checked": "good",
    "direction only": "mild",
    "too noisy": "mild",
    "not reproduced": "bad",
}
SIGNS = {"good": "✓", "mild": "≈", "bad": "✗", "soft": "○"}
LEGEND = {
    "reproduced": "Measured on this machine, and as published within the tolerance that the claim names.",
    "arithmetic checked": "Recomputed from published numbers, and right. Nothing was measured.",
    "direction only": "Measured: faster or slower as published, but by another factor.",
    "not reproduced": "Measured or recomputed, and it disagrees.",
    "too noisy": "Measured, but with fewer than three repeats, or they lie too far apart for a verdict.",
    "ill-defined": "The text does not say what was compared with what, so there is nothing to measure.",
    "not measurable here": "It needs a GPU, or many machines, that are not here.",
    "not measured yet": "No run has measured it: its notebook did not run or needs a larger size, or what measures it is to come.",
}
PROSE = (  # code first, so that a dollar or a comment inside it is never seen
    r"(?s)(?P<code>(?P<fence>```|~~~).*?(?P=fence)|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|<!--\s*(?P<claim>[\w.-]+?)\s*-->|(?P<comment><!--.*?-->)"
    r"|(?<!\\)\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<line>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
)
TAG = r"""<[a-zA-Z](?:"[^"]*"|'[^']*'|[^'">])*>"""
NOTEBOOK = r'(?s)<a href="([\w.-]+)\.ipynb(?:#[^"]*)?"[^>]*>(.*?)</a>'
# the policy does not stop all of them
AWAY = "meta|base|link|iframe|frame|object|embed|form|style|script|portal"
NO_WORDS = "No description has been provided for this image"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Title, body, pictures (alt, src, cell), records by cell, ids of claims that the prose names,
    and what is wrong.
    """

    title: str
    body: str
    figures: Sequence[Mapping[str, str]]
    records: Mapping[str, Sequence[Mapping[str, Any]]]
    claims: Sequence[str]
    defects: Sequence[str]


def page(executed: Path, verdicts: Mapping[str, str], beside: Collection[str] = ()) -> Page:
    """An executed notebook made safe for a page whose policy allows no style and no script of its
    own.

    verdicts: claim id -> label. A comment `<!-- claim-id -->` in the prose becomes a link to that
    row of the ledger.
    beside: names of the pages beside this one, to which links to their notebooks lead; to others
    there are none.
    """
    notebook, named, records = (
        nbformat.read(executed, 4),
        list[str](),
        dict[str, list[dict[str, Any]]](),
    )
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = next(
        (text.splitlines()[0][2:] for text in texts if text.startswith("# ")), executed.stem
    )
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = prose(cell.source, verdicts, named)
        elif cell.cell_type == "code":
            published = [
                out.data[MIME] for out in cell.outputs if not problem(out.get("data", {}).get(MIME))
            ]
            cell.outputs = [
                out for out in cell.outputs if not {WIDGET, MIME} & {*out.get("data", {})}
            ]
            if published:
                records[cell.id] = published
                said = f'<p class="kept"><a href="#records">{_count(len(published), "record")}</a> published</p>'
                cell.outputs.append(
                    nbformat.v4.new_output("display_data", data={"text/html": said})
                )
    exporter = HTMLExporter(
        template_name="basic",
        embed_images=False,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    body = re.sub(
        NOTEBOOK, partial(_beside, beside), clean(exporter.from_notebook_node(notebook)[0])
    )
    wrong = [
        f"no LaTeX: {unescape(text)}"
        for text in re.findall(f"{NO_TEX}(.*?)</code>", body, re.DOTALL)
    ]
    wrong += [f"no claim: {name}" for name in dict.fromkeys(named) if name not in verdicts]
    figures, cell = [], ""
    for found in re.findall(TAG, body):
        told = {
            key: unescape(a or b)
            for key, a, b in re.findall(r"""\b(id|alt|src)=(?:"(.*?)"|'(.*?)')""", found, re.DOTALL)
        }
        cell = (
            told["id"].removeprefix("cell-id=")
            if told.get("id", "").startswith("cell-id=")
            else cell
        )
        if re.match(r"<img\b", found):
            words = told.get("alt", "").replace(NO_WORDS, "").strip()
            wrong += ["a picture has no alt text"] * (not words)
            inside = told.get("src", "").startswith("data:")
            wrong += ["a picture is not inside the page"] * (not inside)
            body = body if inside else body.replace(found, f'<em class="soft">{escape(words)}</em>')
            figures += [{"alt": words, "src": told["src"], "cell": cell}] * bool(words and inside)
    return Page(
        title=title,
        body=body,
        figures=figures,
        records=records,
        claims=[n for n in named if n in verdicts],
        defects=wrong,
    )


def prose(
    markdown: str, verdicts: Mapping[str, str] | None = None, named: list[str] | None = None
) -> str:
    """Markdown with `$…$` and `$$…$$` as MathML and tags of claims as links, both outside code;
    other comments go.

    Browsers draw MathML without a script; prices like $5 stay text. `named` gets the ids of the
    tags, known or not.
    """

    def draw(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        if found["comment"]:
            return ""
        if name := found["claim"]:
            if named is not None:
                named.append(name)
            return link(name, (verdicts or {})[name]) if name in (verdicts or {}) else ""
        try:
            return convert(
                (found["block"] or found["line"]).strip(),
                display="block" if found["block"] else "inline",
            )
        except (
            Exception
        ):  # latex2mathml has no common base; one bad formula must not cost the report
            return f"{NO_TEX}{escape(found[0])}</code>"

    return re.sub(PROSE, draw, markdown)


def link(name: str, label: str) -> str:
    """A small mark that leads to the claim's row, with its verdict as accessible name."""
    kind = MARKS.get(label, "soft")
    said, place = (
        f"Claim {name}: {label}",
        f'href="index.html#{name}" id="claim-{name}"',
    )  # of several, clean() keeps the first id
    return f'<a class="claim {kind}" {place} title="{said}" aria-label="{said}">{SIGNS[kind]}</a>'


def clean(body: str) -> str:
    """HTML of a notebook without what runs, styles or leads elsewhere by itself, under one h1, with
    ids that are no page's own.

    Headings come in order; tables have scopes and stand in boxes that scroll; pictures are inside
    the page or are not there.
    """
    body = re.sub(r"(?is)<(style|script)\b.*?</\1\s*>", "", body)
    body = re.sub(rf"(?i)</?(?:{AWAY})\b(?:\"[^\"]*\"|'[^']*'|[^'\">])*>", "", body)
    body = re.sub(rf"(?i)<(?=/?(?:{AWAY})\b)", "&lt;", body)  # with quotes that do not match
    body = re.sub(r'<a class="anchor-link"[^>]*>[^<]*</a>', "", body)
    body = re.sub(TAG, _bare, body)
    body = re.sub(r"(?s)<table\b.*?</table>", _table, body)
    level, seen = 0, set[str]()

    def order(found: re.Match[str]) -> str:
        nonlocal level
        level = min(max(int(found[1]), 1 + bool(level)), level + 1)
        return f"<h{level}{found[2]}>{found[3]}</h{level}>"

    body = re.sub(r"(?s)<h([1-6])\b([^>]*)>(.*?)</h\1>", order, body)

    def once(found: re.Match[str]) -> str:
        new = found[2] not in seen
        seen.add(found[2])
        return found[0] if new else found[1].rstrip()

    body = re.sub(r'(<[a-zA-Z][^<>]*?)\sid="([^"]*)"', once, body)
    return re.sub(TAG, _own, body)


def _beside(pages: Collection[str], found: re.Match[str]) -> str:
    return f'<a href="{found[1]}.html">{found[2]}</a>' if found[1] in pages else found[2]


def _bare(tag: re.Match[str]) -> str:
    """A tag without style and event handlers; text that was aligned stays so by an attribute of
    ours.
    """
    text = re.sub(r"""(?i)\sstyle\s*=\s*("[^"]*"|'[^']*')""", _aligned, tag[0])
    return re.sub(r"""(?i)\son[a-z]+\s*=\s*("[^"]*"|'[^']*')""", "", text).replace(
        ' border="1"', ""
    )


def _own(tag: re.Match[str]) -> str:
    """A tag whose id, and whose link to an id of its own page, is none that the page around it has."""
    text = re.sub(r"""(?i)(\sid\s*=\s*["']?)(?!["']|claim-|cell-id=)""", r"\1nb-", tag[0])
    return re.sub(
        r"""(?i)(\s(?:xlink:)?href\s*=\s*["']?#|url\(#)(?!claim-|cell-id=|records\b)""",
        r"\1nb-",
        text,
    )


def _aligned(style: re.Match[str]) -> str:
    found = re.search(r"text-align:\s*(right|center)", style[1])
    return f' data-align="{found[1]}"' if found else ""


def _table(table: re.Match[str]) -> str:
    head, gap, rest = table[0].partition("</thead>")
    parts = [
        re.sub(r"<th((?:\s[^>]*)?)>", rf'<th scope="{scope}"\1>', part)
        for scope, part in (("col" if gap else "row", head), ("row", rest))
    ]
    text = re.sub(r"<th\b[^>]*>(?:\s|&nbsp;)*</th>", "<td></td>", gap.join(parts))
    return f'<div class="scroll">{text}</div>'


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def measured(
    record: Mapping[str, Any], notebook: str = "", known: Sequence[str] = ()
) -> dict[str, Any]:
    """A record as a row of text: what, how, phase, dtype, shape, median, quartiles; bytes as MiB,
    fractions in per cent.
    """
    params, stats = record["params"], record["stats"]
    shown = {
        "B": (2**-20, " MiB"),
        "B/s": (2**-30, " GiB/s"),
        "fraction": (100, " %"),
        "FLOP/s": (1e-9, " GFLOP/s"),
        "s/s": (1, "× real time"),
        "us": (1, " µs"),
    }
    scale, unit = shown.get(
        record["unit"], (1, "" if record["unit"] == "1" else f" {record['unit']}")
    )
    unit = " ×" if record["metric"] == "ratio" else unit
    letters = [
        f"{name}={params[name]}" for name in ("B", "T", "U", "U1", "V", "D") if name in params
    ]
    shape = params.get("shape")
    return {
        "what": record["what"],
        "metric": record["metric"].replace("_", " ").replace("rtfx", "RTFx"),
        "value": record["value"],
        "impl": " / ".join(map(str, params.get("arms", ()))) or record["impl"],
        "notebook": notebook,
        "phase": params.get("phase", ""),
        "dtype": params.get("dtype", ""),
        "device": params.get("device", ""),
        "shape": "×".join(map(str, shape)) if isinstance(shape, list) else " ".join(letters),
        "median": f"{record['value'] * scale:.4g}{unit}",
        "n": stats["n"],
        "quartiles": f"{stats['p25'] * scale:.4g} – {stats['p75'] * scale:.4g}"
        if stats["n"] > 1
        else "–",
        "claim": record["what"] if record["what"] in known else "",
    }
