"""Claims of the literature against measurements: verdicts are computed here from records, never
written by hand.
"""

import ast
import csv
import functools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from asrkit.files import shipped
from asrkit.shapes import expect, expect_types
from asrkit.workbench.machine import this_machine
from asrkit.workbench.records import written

LABELS = (
    "reproduced",
    "arithmetic checked",
    "direction only",
    "not reproduced",
    "too noisy",
    "ill-defined",
    "not measurable here",
    "not measured yet",
)
KINDS = ("arithmetic", "ratio", "latency", "throughput", "memory", "quality")
HOW = ("rel", "abs", "above", "below")
Record = Mapping[str, Any]
SOURCE = ("document", "title", "url", "section")
NEEDS = {
    "cpu": "",
    "cuda": "Needs a CUDA GPU.",
    "cluster": "Needs many GPUs, or machines that are not at hand.",
}
ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Compare,
    ast.cmpop,
    ast.Call,
)
FUNCTIONS: dict[str, Any] = {
    "max": max,
    "min": min,
    "mean": lambda *values: statistics.fmean(values),
    "stdev": lambda *values: statistics.stdev(values),
    "pstdev": lambda *values: statistics.pstdev(values),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published number: who says it, in our words, and what would count as measuring it again."""

    id: str
    text: str
    source: Mapping[str, str]
    kind: str
    metric: str
    unit: str
    quoted: int | float | None  # None where the text gives no number
    notebook: str
    needs: str = "cpu"
    status: str = "measured"
    # arithmetic, or a ratio that is estimated: an expression over params, and over the columns of a
    # grid
    formula: str = ""
    params: Mapping[str, float] = field(default_factory=dict)
    # a table of data/published: the formula is computed for each of its lines; `quoted` counts them
    grid: str = ""
    keys: Sequence[str] = ()  # the columns that name a line
    where: Mapping[str, Any] = field(
        default_factory=dict
    )  # the lines that are meant: a value or a list of values a column
    base: Mapping[str, Any] = field(
        default_factory=dict
    )  # the line beside a line: these keys differ; `base_x` is its x
    # what a line prints, and the formula should give; without it the formula says whether a line
    # holds
    column: str = ""
    take: str = ""  # max or min: the formula's largest or smallest value is what was quoted
    arms: Sequence[
        str
    ] = ()  # ratio: numerator, denominator; empty where the text names no baseline
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"rel": 0.1})
    least: Mapping[str, float] = field(
        default_factory=dict
    )  # params of a record; with less it confirms the direction at most
    noise: float = 0.5  # largest interquartile range over median that still carries a verdict
    notes: str = ""

    def __post_init__(self) -> None:
        expect_types(self)
        rules = {
            f"kind one of {', '.join(KINDS)}": self.kind in KINDS,
            f"needs one of {', '.join(NEEDS)}": self.needs in NEEDS,
            "status measured or planned": self.status in ("measured", "planned"),
            "no status planned beside a formula, which settles it": not self.formula
            or self.status != "planned",
            f"a source with {', '.join(SOURCE)}": isinstance(self.source, dict)
            and all(self.source.get(key) for key in SOURCE),
            "a finite number or null as quoted": self.quoted is None
            or (self.quoted is not True and isfinite(self.quoted)),
            "a formula, for arithmetic only": self.kind == "ratio"
            or bool(self.formula) == (self.kind == "arithmetic"),
            "a grid with a formula and keys": bool(self.grid)
            == bool(self.keys)
            <= bool(self.formula),
            "take max or min, or neither": self.take in ("", "max", "min"),
            "two arms or none, for ratios only": len(self.arms)
            in ((0, 2) if self.kind == "ratio" else (0,)),
            f"one tolerance: {', '.join(HOW)}": len(self.tolerance) == 1
            and {*self.tolerance} <= {*HOW},
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"expected {broken[0]}.")

    def agrees(self, value: float, printed: float | None = None) -> bool:
        """Whether `value` is `printed`, or else what is quoted, within the tolerance; `above` and
        `below` are distances.
        """
        ((how, by),) = self.tolerance.items()
        printed = (self.quoted or 0.0) if printed is None else printed
        gap = value - printed
        if how in ("above", "below"):
            return (gap if how == "above" else -gap) >= by
        return abs(gap) <= by * (abs(printed) if how == "rel" else 1)

    @property
    def rule(self) -> str:
        """What a measurement has to be, in words: "within 10% of 1×", "above 0.5"."""
        ((how, by),) = self.tolerance.items()
        words = {"rel": f"within {by:.0%} of", "abs": f"within {by:g} of"}.get(
            how, f"{f'at least {by:g} ' * bool(by)}{how}"
        )
        return f"{words} {self.show(self.quoted)}"

    def show(self, value: float | None) -> str:
        """`value` with the claim's unit, as tables show it; a dash for None."""
        unit = (
            "×"
            if self.metric == "ratio"
            else {"1": "", "us": " µs", "s/s": "× real time"}.get(self.unit, " " + self.unit)
        )
        return "–" if value is None else f"{value:.4g}{unit}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the records say about a claim; `recorded` is the newest record from another machine."""

    label: str
    why: str
    measured: float | None = None
    recorded: Record | None = None


def load_claims(path: str | Path | None = None) -> list[Claim]:
    """The claims of a YAML file, by default those that asrkit ships; ValueError names the claim and
    what is wrong.
    """
    path, claims = Path(path or shipped("claims.yaml")), dict[str, Claim]()
    try:
        entries = yaml.safe_load(path.read_text("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML, got {' '.join(str(error).split())}.") from error
    expect(isinstance(entries, list), str(path), "a list of claims", type(entries).__name__)
    for entry in entries:
        name: Any = entry.get("id") if isinstance(entry, dict) else entry
        try:
            claims[name] = _claim(entry, claims)
        except Exception as error:  # a formula and what it is computed from may fail in any way
            raise ValueError(f"claim {name!r}: {error}") from error
    return list(claims.values())


def _claim(entry: Any, others: Mapping[str, Claim]) -> Claim:
    expect(isinstance(entry, dict), "claim", "fields and values", type(entry).__name__)
    wanted = {item.name for item in fields(Claim)}
    required = {
        item.name
        for item in fields(Claim)
        if item.default is MISSING and item.default_factory is MISSING
    }
    duplicate = {entry.get("id")} & {*others}
    problems = {
        "unknown field": {*entry} - wanted,
        "missing field": required - {*entry},
        "duplicate id": duplicate,
    }
    for problem, keys in problems.items():
        if keys:
            raise ValueError(f"{problem} {', '.join(sorted(map(str, keys)))}.")
    claim = Claim(**entry)
    if claim.formula:
        verdict(claim, (), {})  # a formula that cannot be computed is told here
    return claim


def evaluate(formula: str, params: Mapping[str, float]) -> float:
    """The number that an arithmetic expression over `params` makes; numbers, names, operators, max,
    mean and the like.

    In floats: a whole number of a million digits would take for ever.
    """
    tree = ast.parse(formula, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        known = isinstance(getattr(node, "value", 0), int | float)
        if isinstance(node, ast.Name) or id(node) in called:
            known = isinstance(node, ast.Name) and node.id in (
                FUNCTIONS if id(node) in called else params
            )
        if not known or not isinstance(node, ARITHMETIC):
            raise ValueError(
                f"formula: expected numbers, {', '.join(params)} and operators, got {ast.unparse(node)!r}."
            )
        if isinstance(node, ast.Constant):
            node.value = float(node.value)  # type: ignore[arg-type]
    known_as = {
        name: float(value) if isinstance(value, int | float) else value
        for name, value in params.items()
    }
    value = eval(compile(tree, "formula", "eval"), {"__builtins__": {}}, known_as | FUNCTIONS)
    expect(
        isinstance(value, int | float) and isfinite(value),
        "formula",
        "a finite number",
        repr(value),
    )
    return value


@functools.cache
def published(name: str) -> list[dict[str, Any]]:
    """The lines of a table of data/published, numbers as numbers; a cell that is empty there is no
    key here.
    """

    def value(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    with shipped(f"published/{name}").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    more = [number for number, line in enumerate(rows, 2) if None in line]
    expect(not more, name, "as many cells as columns", f"more in line {more[:1]}")
    return [{key: value(text) for key, text in line.items() if text} for line in rows]


def lines(claim: Claim) -> Iterator[tuple[str, float, float]]:
    """Of each line of a claim's grid: its name, what the formula makes of it, and what is printed
    there.
    """

    def fits(line: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        return all(
            line.get(key) in (value if isinstance(value, list) else [value])
            for key, value in wanted.items()
        )

    for line in published(claim.grid):
        if not fits(line, claim.where) or (claim.column and claim.column not in line):
            continue
        beside = {key: line[key] for key in claim.keys} | dict(claim.base)
        near = [other for other in published(claim.grid) if fits(other, beside)]
        name = ", ".join(
            f"{key} {line[key]:g}" if isinstance(line[key], float) else line[key]
            for key in claim.keys
        )
        if len(near) > 1:
            raise ValueError(
                f"expected keys that name a line, got {len(near)} lines beside {name}."
            )
        if not near:
            continue
        known = dict(claim.params) | line | {f"base_{key}": value for key, value in near[0].items()}
        yield name, evaluate(claim.formula, known), line.get(claim.column, 1.0)


def _judge_grid(claim: Claim) -> Verdict:
    found = list(lines(claim))
    expect(bool(found), "where", "lines of the grid", "none")
    if claim.take:
        name, value, _ = (max if claim.take == "max" else min)(found, key=lambda line: line[1])
        why = f"{claim.formula}: the {claim.take} of {len(found)} lines is at {name}. {claim.notes}"
        return Verdict(
            label=_label(claim, value, value, value, "arithmetic checked"),
            why=why.rstrip(),
            measured=value,
        )
    off = sorted(
        (line for line in found if not claim.agrees(*line[1:])),
        key=lambda line: -abs(line[1] - line[2]),
    )
    told = [
        f"{name}: {got:.4g} where {printed:g} is printed" if claim.column else name
        for name, got, printed in off
    ]
    good = len(found) - len(off)
    why = f"{claim.formula}: {good} of {len(found)} lines agree{'; not ' * bool(off)}{'; '.join(told[:4])}{', …' * (len(off) > 4)}."
    label = "arithmetic checked" if good == claim.quoted == len(found) else "not reproduced"
    return Verdict(label=label, why=f"{why} {claim.notes}".rstrip(), measured=good)


def verdict(claim: Claim, records: Sequence[Record], machine: Record | None = None) -> Verdict:
    """The verdict on `claim` from `records`, on `machine` (by default this one); never from another
    machine's records.

    An ill-defined claim shows what was measured all the same.
    """
    machine = this_machine() if machine is None else machine
    if claim.grid and claim.quoted is not None:
        return _judge_grid(claim)
    if claim.formula and claim.quoted is not None:
        value = evaluate(claim.formula, claim.params)
        given = ", ".join(f"{name} = {number:g}" for name, number in claim.params.items())
        label = _label(claim, value, value, value, "arithmetic checked")
        return Verdict(
            label=label, why=f"{claim.formula} with {given}. {claim.notes}".rstrip(), measured=value
        )
    fitting = sorted(
        (record for record in records if _fits(claim, record)),
        key=lambda record: record["captured_at"],
    )
    newest = {record["machine"]["id"] == machine["id"]: record for record in fitting}
    here, recorded = newest.get(True), newest.get(False)
    if claim.quoted is None or (claim.kind == "ratio" and not claim.arms):
        why = claim.notes or "The text does not say what was compared."
        return Verdict(
            label="ill-defined",
            why=why,
            measured=here["value"] if here else None,
            recorded=recorded,
        )
    if here:
        label, why = _judge(claim, here)
        why = f"{why}. Reproduced means {claim.rule}. {claim.notes}".rstrip()
        return Verdict(label=label, why=why, measured=here["value"], recorded=recorded)
    lacking = (
        claim.needs == "cuda" and not machine["gpus"] and (recorded or claim.status == "measured")
    )
    if lacking or claim.needs == "cluster":
        return Verdict(
            label="not measurable here",
            why=f"{NEEDS[claim.needs]} {claim.notes}".rstrip(),
            recorded=recorded,
        )
    return Verdict(label="not measured yet", why=claim.notes, recorded=recorded)


def _fits(claim: Claim, record: Record) -> bool:
    told = (record["what"], record["metric"], record["origin"], *record["params"].get("arms", ()))
    unit = claim.metric == "ratio" or record["unit"] == claim.unit
    device = claim.needs == "cpu" or str(record["params"].get("device")).startswith("cuda")
    toy = record["params"].get("quick")  # sizes that only show that it runs
    return told == (claim.id, claim.metric, "measured", *claim.arms) and unit and device and not toy


def _judge(claim: Claim, record: Record) -> tuple[str, str]:
    n, low, middle, high = (record["stats"][key] for key in ("n", "p25", "p50", "p75"))
    why = (
        f"{n} repeats, quartiles {claim.show(low)} to {claim.show(high)}"
        if n > 1
        else "one observation"
    )
    if claim.kind in ("ratio", "latency", "throughput") and (
        n < 3 or high - low > claim.noise * abs(middle)
    ):
        return (
            "too noisy",
            f"{why}; a verdict needs 3 repeats and a spread within {claim.noise:.0%} of the median",
        )
    had = {name: record["params"].get(name, 0) for name in claim.least}
    few = [
        f"{had[name]:g} {name}: fewer than {least:g} confirm the direction at most"
        for name, least in claim.least.items()
        if had[name] < least
    ]
    return _label(
        claim, record["value"], low, high, "direction only" if few else "reproduced"
    ), "; ".join([why, *few])


def _label(claim: Claim, value: float, low: float, high: float, good: str) -> str:
    if claim.agrees(value):
        return good
    same_side = low > 1 if (claim.quoted or 0.0) > 1 else high < 1 != claim.quoted
    return "direction only" if claim.kind == "ratio" and same_side else "not reproduced"


def table(
    claims: Sequence[Claim], records: Sequence[Record], machine: Record | None = None
) -> list[dict[str, str]]:
    """A row of text a claim: id, claim, published, recorded (with its machine), measured, verdict,
    why, source, notebook, kind.
    """
    rows = []
    for claim in claims:
        found = verdict(claim, records, machine)
        recorded = (
            claim.show(found.recorded["value"]) + f" on {origin(found.recorded)}"
            if found.recorded
            else "–"
        )
        rows.append(
            {
                "id": claim.id,
                "claim": claim.text,
                "published": claim.show(claim.quoted),
                "recorded": recorded,
                "measured": claim.show(found.measured),
                "verdict": found.label,
                "why": found.why,
                "notebook": claim.notebook,
                "title": claim.source["title"],
                "url": claim.source["url"],
                "section": claim.source["section"],
                "document": claim.source["document"],
                "kind": claim.kind,
                "needs": claim.needs,
                "status": claim.status,
            }
        )
    return rows


def origin(record: Record) -> str:
    """Machine, commit and day of a record, in a few words."""
    device = (
        " + ".join(gpu["name"] for gpu in record["machine"]["gpus"])
        or record["machine"]["cpu_model"]
    )
    return f"{device}, {written(record)}, {record['captured_at'][:10]}"


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """One sentence: how many claims have which verdict."""
    counts = Counter(row["verdict"] for row in rows)
    return f"{len(rows)} claims: {', '.join(f'{counts[label]} {label}' for label in LABELS if counts[label])}."


def by_document(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The same sentence for each document, in order of their names."""
    return {
        name: summary([row for row in rows if row["document"] == name])
        for name in sorted({row["document"] for row in rows})
    }
