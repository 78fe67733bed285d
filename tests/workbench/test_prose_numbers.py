"""Every number in a notebook's prose has its source, in an HTML comment that the page does not show.

`1.6 GB<!-- joint-memory-20s -->`: number, at most one word or sign as its unit, comment, with nothing between. A comment is

* `claim-id`: the number is what the claim is quoted with, or one of its params;
* `code: place`: a constant in the notebook's own code (`place` is a cell's id) or in a file (`code: asrkit/features.py`);
* `= 1 - 1 / 1.1`: arithmetic, computed here;
* `fact: source`: a constant of the world, and where it stands.

The number has to be its source's, rounded to the digits that are printed. Seconds and bytes may change their prefix, a ratio
may be given in per cent (1.1 is 110 %, or 10 % more). What needs no comment is in EXEMPT, with the reason.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from asrkit.workbench.claims import evaluate, load_claims

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CLAIMS = {claim.id: claim for claim in load_claims()}
EXEMPT = {
    r"```.*?```|`[^`]*`": "code: it runs, or is a name",
    r"\$\$.*?\$\$|\$[^$]*\$": "formulas",
    r"\]\([^)]*\)|https?://\S+|<img[^>]*>": "targets of links",
    r"^\s*\d+\. ": "numbers of lists",
    r"\b[^\W\d]+\d[\w.]*\b": "names that end in digits: float32, A100, v1.0",
    r"\b[123]D\b": "dimensions",
    r"\b(?:Parakeet|Canary)[ -](?:[A-Z-]+[ -])?\d[\d.]*B\b": "names of models",
    r"\bJasper 10x5 DR\b|\b1x1\b|\bp(?:90|95|99)\b": "a model, a convolution, percentiles: names",
    r"\b[Nn]otebooks? \d\d\b(?:(?:,| and| to) \d\d\b)*|\b[Pp]age, \d\d\b": "names of notebooks",
    r", (?:19|20)\d\d(?=\))": "years of papers: (Graves, 2012)",
    r"^\* \[[^\n]*?¤[^\n]*?:": "references: title, author and year",
    r"^\* \*\*Time\*\*:[^\n]*|^\*\*Question \d+": "minutes of a notebook, numbers of questions",
    r"\barXiv \d{4}\.\d{5}\b|\b(?:[Ii]ssue|[Pp]ull request|[Ss]ection|[Ff]igure|[Tt]able) \d+": "where to look something up",
    r"\b(?:NeMo|CUDA|Python|Numba|torch|lhotse|\w+_\w+) \d+(?:\.\d+)+": "versions",
    r"(?<![\w.,-])-?[01](?![\w%×]|[.,]\d|\s[%×]|\s(?:s|ms|µs|[kMGT]?i?B)\b)": "0 and 1: bounds, identities, first and last",
}  # fmt: skip
MARK = "\ue000"  # replaces each comment, so that its text is not read as prose
NUMBER = re.compile(
    r"(?<![\w.])(?P<number>-?\d[\d,]*(?:\.\d+)?)(?:\s?(?P<unit>[^\W\d][^\W\d]*(?:/\w+)?|%|×)(?=[\ue000-\uf8ff]))?(?P<mark>[\ue000-\uf8ff])?"
)
SCALE = {
    "s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6,
    "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
}  # fmt: skip


def stated_numbers(text: str) -> Iterator[tuple[str, str, str]]:
    """Number, unit and comment of every number in markdown that is not exempt."""
    comments: list[str] = []

    def mark(found: re.Match) -> str:
        comments.append(found[1].strip())
        return chr(ord(MARK) + len(comments) - 1)

    text = re.sub(r"<!--(.*?)-->", mark, text, flags=re.DOTALL)
    for pattern in EXEMPT:
        text = re.sub(pattern, "¤", text, flags=re.DOTALL | re.MULTILINE)
    for found in NUMBER.finditer(text):
        comment = comments[ord(found["mark"]) - ord(MARK)] if found["mark"] else ""
        yield found["number"].rstrip(","), found["unit"] or "", comment


def sources(comment: str, notebook: dict) -> list[tuple[float, str]]:
    """The numbers, with their units, that a comment refers to; ValueError if there are none."""
    kind, _, place = (part.strip() for part in comment.partition(":"))
    if comment.startswith("="):
        return [(evaluate(comment[1:].strip(), {}), "")]
    if kind == "code":
        return [(number, "") for number in constants(place, notebook)]
    claim = CLAIMS.get(comment)
    if claim is None:
        raise ValueError(f"no claim {comment!r}")
    quoted = [] if claim.quoted is None else [(claim.quoted, claim.unit)]
    return quoted + [(value, "") for value in claim.params.values()]


def constants(place: str, notebook: dict) -> list[float]:
    """Every number that is written in a cell or in a file."""
    cells = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}
    if place not in cells and not (ROOT / place).is_file():
        raise ValueError(f"no cell and no file {place!r}")
    code = cells.get(place) or (ROOT / place).read_text("utf-8")
    found = [node.value for node in ast.walk(ast.parse(code)) if hasattr(node, "value")]
    return [value for value in found if isinstance(value, int | float)]


def same(number: str, unit: str, value: float, of: str) -> bool:
    """Whether `number` is `value`, converted to its unit and rounded to as many digits."""
    shown = float(number.replace(",", ""))
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) * (1 + 1e-9)
    values = [value]
    if of in SCALE and unit in SCALE:
        values = [value * SCALE[of] / SCALE[unit]]
    elif of in SCALE and unit:
        values = []
    elif unit == "%":
        values += [100 * value, 100 * (value - 1)]
    return any(abs(other - shown) <= half for other in values)


def problem(number: str, unit: str, comment: str, notebook: dict) -> str:
    """The problem of a number in a notebook's prose; empty if there is none."""
    if not comment:
        return "no comment says where it is from"
    if re.fullmatch(r"fact: .{4,}", comment):
        return ""
    try:
        known = sources(comment, notebook)
    except ValueError as error:
        return str(error)
    fits = any(same(number, unit, *one) for one in known)
    return "" if fits else f"{comment!r} has {known[:6]}"


def problems(notebook: dict) -> list[str]:
    """The problems of the numbers in a notebook's prose, a line each."""
    prose = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    wrong = []
    for cell in prose:
        for number, unit, comment in stated_numbers("".join(cell["source"])):
            if why := problem(number, unit, comment, notebook):
                wrong.append(f"{cell['id']}: {number} {unit}: {why}")
    return wrong


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_number_in_the_prose_has_its_source(path):
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(("text", "why"), [
    ("It takes 1.6 GB.", "no comment"),
    ("* [A title](https://a.b), Author, 2020: why 5 ms.", "prose: 5 : no comment"),
    ("1.6 MB<!-- joint-memory-20s -->", "has"),
    ("11 %<!-- ctc-greedy-batched -->", "has"),
    ("81 bins<!-- code: asrkit/features.py -->", "has"),
    ("1.6 GB<!-- joint-memory-21s -->", "no claim"),
])  # fmt: skip
def test_a_number_without_its_source_is_found(text, why):
    cell = {"cell_type": "markdown", "id": "prose", "source": [text]}
    (message,) = problems({"cells": [cell]})
    assert why in message
