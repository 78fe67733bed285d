"""No number in a notebook's prose stands alone: each carries, in an HTML comment that no reader sees, where it is from.

`1.6 GB<!-- joint-memory-20s -->`: number, at most one word or sign as its unit, comment, with nothing between. A comment is

* `claim-id`: the number is what the claim is quoted with, or one of its params;
* `code: place`: a constant in the notebook's own code (`place` is a cell's id) or in a file (`code: asrkit/features.py`);
* `= 1 - 1 / 1.1`: arithmetic, computed here;
* `record: what/metric 3fa21b`: a shipped record's value; first digits of `short_id` where there are several such records;
* `fact: source`: a constant of the world, and where it stands.

The number has to be its source's, rounded to the digits that are printed. Seconds and bytes may change their prefix, a ratio
may be told in per cent (1.1 is 110 %, or 10 % more). What needs no comment is in EXEMPT, with the reason.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from asrkit import files
from asrkit.workbench import records
from asrkit.workbench.claims import Claim, evaluate, load_claims

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
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
    r"\barXiv \d{4}\.\d{5}\b|\b(?:[Ii]ssue|[Pp]ull request|[Ss]ection|[Ff]igure|[Tt]able) \d+": "where to look something up",
    r"\b(?:NeMo|CUDA|Python|Numba|torch|lhotse|\w+_\w+) \d+(?:\.\d+)+": "versions",
    r"(?<![\w.,-])-?[01](?![\w%×]|[.,]\d|\s[%×]|\s(?:s|ms|µs|[kMGT]?i?B)\b)": "0 and 1: bounds, identities, first and last",
}  # fmt: skip
MARK = "\ue000"  # stands for a comment, one character each, so that nothing within it is taken for prose
NUMBER = re.compile(
    r"(?<![\w.])(?P<number>-?\d[\d,]*(?:\.\d+)?)(?:\s?(?P<unit>[^\W\d][^\W\d]*(?:/\w+)?|%|×)(?=[\ue000-\uf8ff]))?(?P<mark>[\ue000-\uf8ff])?"
)
SCALE = {
    "s": 1,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "B": 1,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}


@cache
def claims() -> dict[str, Claim]:
    """The shipped claims by id."""
    return {claim.id: claim for claim in load_claims()}


@cache
def shipped() -> list[dict]:
    """The shipped records."""
    return records.read(files.shipped("records"))


def short_id(record: dict) -> str:
    """Eight hex digits that name a record, from its content, but for the seal of older ones."""
    content = {key: value for key, value in record.items() if key != "content_sha256"}
    return files.content_hash(content).removeprefix("sha256:")[:8]


def told(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Number, unit, comment and surroundings of every number in markdown that is not exempt."""
    comments: list[str] = []

    def mark(found: re.Match) -> str:
        comments.append(found[1].strip())
        return chr(ord(MARK) + len(comments) - 1)

    text = re.sub(r"<!--(.*?)-->", mark, text, flags=re.DOTALL)
    for pattern in EXEMPT:
        text = re.sub(
            pattern,
            lambda found: "¤" * (len(found[0]) > 0),
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
    for found in NUMBER.finditer(text):
        comment = comments[ord(found["mark"]) - ord(MARK)] if found["mark"] else ""
        near = re.sub(
            r"[\s\ue000-\uf8ff]+",
            " ",
            text[max(found.start() - 40, 0) : found.end() + 20],
        )
        yield found["number"].rstrip(","), found["unit"] or "", comment, near


def constants(tree: ast.AST) -> list[float]:
    """Every number that is written in a piece of code."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    ]


def sources(comment: str, notebook: dict) -> list[tuple[float, str]]:
    """The numbers, with their units, that a comment stands for; ValueError says why there are none."""
    kind, _, place = (part.strip() for part in comment.partition(":"))
    if comment.startswith("="):
        return [(evaluate(comment[1:].strip(), {}), "")]
    if kind == "code":
        code = {
            cell["id"]: "".join(cell["source"])
            for cell in notebook["cells"]
            if cell["cell_type"] == "code"
        }
        if place not in code and not (ROOT / place).is_file():
            raise ValueError(f"no cell and no file {place!r}")
        return [
            (value, "")
            for value in constants(
                ast.parse(code.get(place) or (ROOT / place).read_text("utf-8"))
            )
        ]
    if kind == "record":
        name, _, digits = place.partition(" ")
        found = [
            r
            for r in shipped()
            if f"{r['what']}/{r['metric']}" == name and short_id(r).startswith(digits)
        ]
        if len(found) != 1:
            raise ValueError(f"{len(found)} shipped records are {place!r}")
        return [(found[0]["value"], found[0]["unit"])]
    if kind not in claims():
        raise ValueError(f"no claim {comment!r}")
    claim = claims()[kind]
    quoted = [] if claim.quoted is None else [(claim.quoted, claim.unit)]
    return quoted + [(value, "") for value in claim.params.values()]


def same(number: str, unit: str, value: float, of: str) -> bool:
    """Whether `number` is `value`, rounded to as many digits, with what units allow."""
    shown, half = (
        float(number.replace(",", "")),
        0.5 * 10.0 ** -len(number.partition(".")[2]) * (1 + 1e-9),
    )
    if of in SCALE and unit in SCALE:
        return abs(value * SCALE[of] / SCALE[unit] - shown) <= half
    if of in SCALE and unit:
        return False
    return any(
        abs(other - shown) <= half
        for other in [value, *([100 * value, 100 * (value - 1)] if unit == "%" else [])]
    )


def problems(notebook: dict) -> list[str]:
    """What is wrong with the numbers in a notebook's prose, one line each."""
    wrong = []
    for cell in notebook["cells"]:
        for number, unit, comment, near in (
            told("".join(cell["source"])) if cell["cell_type"] == "markdown" else ()
        ):
            try:
                if not comment:
                    why = "no comment says where it is from"
                elif re.fullmatch(r"fact: .{4,}", comment):
                    why = ""
                else:
                    known = sources(comment, notebook)
                    why = (
                        ""
                        if any(same(number, unit, *one) for one in known)
                        else f"{comment!r} has {known[:6]}"
                    )
            except ValueError as error:
                why = str(error)
            if why:
                wrong.append(f"{cell['id']}: {number} {unit} in {near!r}: {why}")
    return wrong


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_number_in_the_prose_says_where_it_is_from(path):
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []


def page(text: str) -> dict:
    """A notebook of one cell of prose and one of code."""
    return {
        "cells": [
            {"cell_type": "markdown", "id": "prose", "source": [text]},
            {
                "cell_type": "code",
                "id": "sizes",
                "source": ["frames: int = 250  # T\n", "limit = -3.5"],
            },
        ]
    }


@pytest.mark.parametrize("text", [
    "It takes 1.6 GB<!-- joint-memory-20s -->, or 1,600 MB<!-- joint-memory-20s -->, of 1024<!-- joint-memory-20s --> tokens.",
    "A cast of 200 µs<!-- cast-200us -->, that is 0.2 ms<!-- cast-200us -->.", "A gain of 10 %<!-- ctc-greedy-batched -->.",
    "A share of 9.1 %<!-- = 1 - 1 / 1.1 -->, about 9 %<!-- = 1 - 1 / 1.1 -->.", "250 frames<!-- code: sizes -->",
    "80<!-- code: asrkit/features.py --> mel bins", "8 bits<!-- fact: IEEE 754 -->",
    "Notebook 06 (Graves, 2012), `T=200`, $T = 200$, float32, A100, v1.0, 2D, NeMo 3.0.0, issue 16095, 0 or 1, to [it](a/12.html).",
    "1. first\n2. second",
])  # fmt: skip
def test_a_number_with_its_source_passes(text):
    assert problems(page(text)) == []


@pytest.mark.parametrize(("text", "why"), [
    ("It takes 1.6 GB.", "no comment"), ("1.6 GB <!-- joint-memory-20s -->", "no comment"),
    ("1.6 or 1.6 GB<!-- joint-memory-20s -->", "no comment"), ("1.7 GB<!-- joint-memory-20s -->", "has"),
    ("1.6 MB<!-- joint-memory-20s -->", "has"), ("1.6 %<!-- joint-memory-20s -->", "has"),
    ("1.6 GB<!-- joint-memory-21s -->", "no claim"), ("A gain of 11 %<!-- ctc-greedy-batched -->.", "has"),
    ("9.2 %<!-- = 1 - 1 / 1.1 -->", "has"), ("251 frames<!-- code: sizes -->", "has"),
    ("250 frames<!-- code: size -->", "no cell and no file"), ("81<!-- code: asrkit/features.py --> bins", "has"),
    ("8 bits<!-- fact: -->", "no claim"), ("3 %<!-- record: rnnt-greedy/ratio -->", "shipped records"),
    ("3 %<!-- record: no-such/ratio -->", "0 shipped records"),
    ("1 s", "no comment"), ("1 %", "no comment"), ("12 times", "no comment"),
])  # fmt: skip
def test_a_number_without_its_source_is_found(text, why):
    (said,) = problems(page(text))
    assert why in said
