"""Claims of the literature against measurements: verdicts are computed here from records, never written by hand."""

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from asrkit.records import machine as this_machine
from asrkit.records import shipped

LABELS = ("reproduced", "arithmetic checked", "direction only", "not reproduced", "too noisy", "ill-defined",
          "not measurable here", "not measured yet")  # fmt: skip
KINDS = ("arithmetic", "ratio", "latency", "throughput", "memory", "quality")
HOW = ("rel", "abs", "above", "below")
Record = Mapping[str, Any]
SOURCE = ("document", "title", "url", "section")
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published number: who says it, in our words, and what would count as measuring it again."""

    id: str
    text: str
    source: Mapping[str, str]
    kind: str
    metric: str
    unit: str
    quoted: float | None  # None where the text gives no number
    notebook: str
    needs: str = "cpu"
    status: str = "measured"
    formula: str = ""  # arithmetic: an expression over params
    params: Mapping[str, float] = field(default_factory=dict)
    arms: Sequence[str] = ()  # ratio: numerator, denominator; empty where the text names no baseline
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"rel": 0.1})
    noise: float = 0.5  # largest interquartile range over median that still carries a verdict
    notes: str = ""

    def __post_init__(self) -> None:
        rules = {
            f"kind one of {', '.join(KINDS)}": self.kind in KINDS, "needs cpu or cuda": self.needs in ("cpu", "cuda"),
            "status measured or planned": self.status in ("measured", "planned"),
            f"a source with {', '.join(SOURCE)}": isinstance(self.source, dict) and all(self.source.get(key) for key in SOURCE),
            "a number or null as quoted": isinstance(self.quoted, int | float | None),
            "a formula, for arithmetic only": bool(self.formula) == (self.kind == "arithmetic"),
            "two arms or none, for ratios only": len(self.arms) in ((0, 2) if self.kind == "ratio" else (0,)),
            f"one tolerance: {', '.join(HOW)}": len(self.tolerance) == 1 and {*self.tolerance} <= {*HOW},
        }  # fmt: skip
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"claim {self.id!r}: expected {broken[0]}.")

    def agrees(self, value: float) -> bool:
        """Whether `value` is the quoted one within the tolerance; `above` and `below` are distances from it."""
        ((how, by),) = self.tolerance.items()
        gap = value - (self.quoted or 0.0)
        if how in ("above", "below"):
            return (gap if how == "above" else -gap) >= by
        return abs(gap) <= by * (abs(self.quoted or 0.0) if how == "rel" else 1)

    def show(self, value: float | None) -> str:
        """`value` with the claim's unit, as tables show it; a dash for None."""
        unit = "×" if self.metric == "ratio" else "" if self.unit == "1" else " " + self.unit
        return "–" if value is None else f"{value:.4g}{unit}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the records say about a claim; `recorded` is the newest record from another machine."""

    label: str
    why: str
    measured: float | None = None
    recorded: Record | None = None


def load_claims(path: str | Path | None = None) -> list[Claim]:
    """The claims of a YAML file, by default those that asrkit ships; ValueError names the claim and what is wrong."""
    entries, claims = yaml.safe_load(Path(path or shipped("claims.yaml")).read_text("utf-8")), dict[str, Claim]()
    wanted = {item.name for item in fields(Claim)}
    required = {item.name for item in fields(Claim) if item.default is MISSING and item.default_factory is MISSING}
    for entry in entries or []:
        name = entry.get("id")
        problems = {"unknown field": {*entry} - wanted, "missing field": required - {*entry}, "duplicate id": {name} & {*claims}}
        for problem, keys in problems.items():
            if keys:
                raise ValueError(f"claim {name!r}: {problem} {', '.join(sorted(map(str, keys)))}.")
        claims[name] = Claim(**entry)
        if claims[name].formula:
            evaluate(claims[name].formula, claims[name].params)
    return list(claims.values())


def evaluate(formula: str, params: Mapping[str, float]) -> float:
    """The number that an arithmetic expression over `params` makes; numbers, names, operators and nothing else."""
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        known = node.id in params if isinstance(node, ast.Name) else isinstance(getattr(node, "value", 0), int | float)
        if not known or not isinstance(node, ARITHMETIC):
            raise ValueError(f"formula: expected numbers, {', '.join(params)} and operators, got {ast.unparse(node)!r}.")
    return eval(compile(tree, "formula", "eval"), {"__builtins__": {}}, dict(params))


def verdict(claim: Claim, records: Sequence[Record], machine: Record | None = None) -> Verdict:
    """The verdict on `claim` from `records`, on `machine` (by default this one); never from another machine's records."""
    machine = machine or this_machine()
    if claim.quoted is None or (claim.kind == "ratio" and not claim.arms):
        return Verdict(label="ill-defined", why=claim.notes or "The text does not say what was compared.")
    if claim.formula:
        value = evaluate(claim.formula, claim.params)
        given = ", ".join(f"{name} = {number:g}" for name, number in claim.params.items())
        label = "arithmetic checked" if claim.agrees(value) else "not reproduced"
        return Verdict(label=label, why=f"{claim.formula} with {given}. {claim.notes}".rstrip(), measured=value)
    fitting = sorted((record for record in records if _fits(claim, record)), key=lambda record: record["captured_at"])
    newest = {record["machine"]["id"] == machine["id"]: record for record in fitting}
    here, recorded = newest.get(True), newest.get(False)
    if here:
        label, why = _judge(claim, here)
        return Verdict(label=label, why=why, measured=here["value"], recorded=recorded)
    if claim.needs == "cuda" and not machine["gpus"] and (recorded or claim.status == "measured"):
        return Verdict(label="not measurable here", why="Needs a CUDA GPU.", recorded=recorded)
    return Verdict(label="not measured yet", why=claim.notes, recorded=recorded)


def _fits(claim: Claim, record: Record) -> bool:
    told = (record["what"], record["metric"], record["origin"], *record["params"].get("arms", ()))
    unit = claim.metric == "ratio" or record["unit"] == claim.unit
    device = claim.needs == "cpu" or str(record["params"].get("device")).startswith("cuda")
    return told == (claim.id, claim.metric, "measured", *claim.arms) and unit and device


def _judge(claim: Claim, record: Record) -> tuple[str, str]:
    n, low, middle, high = (record["stats"][key] for key in ("n", "p25", "p50", "p75"))
    why = f"{n} repeats, quartiles {claim.show(low)} to {claim.show(high)}" if n > 1 else "one observation"
    if claim.kind in ("ratio", "latency", "throughput") and (n < 3 or high - low > claim.noise * abs(middle)):
        return "too noisy", f"{why}; a verdict needs 3 repeats and a spread within {claim.noise:.0%} of the median"
    if claim.agrees(record["value"]):
        return "reproduced", why
    same_side = low > 1 if (claim.quoted or 0.0) > 1 else high < 1 != claim.quoted
    return ("direction only" if claim.kind == "ratio" and same_side else "not reproduced"), why


def table(claims: Sequence[Claim], records: Sequence[Record], machine: Record | None = None) -> list[dict[str, str]]:
    """A row of text a claim: id, claim, published, recorded (with its machine), measured, verdict, why, source, notebook, kind."""
    rows = []
    for claim in claims:
        found = verdict(claim, records, machine)
        recorded = claim.show(found.recorded["value"]) + f" on {origin(found.recorded)}" if found.recorded else "–"
        rows.append({
            "id": claim.id, "claim": claim.text, "published": claim.show(claim.quoted), "recorded": recorded,
            "measured": claim.show(found.measured), "verdict": found.label, "why": found.why, "notebook": claim.notebook,
            "title": claim.source["title"], "url": claim.source["url"], "section": claim.source["section"],
            "document": claim.source["document"], "kind": claim.kind, "needs": claim.needs, "status": claim.status,
        })  # fmt: skip
    return rows


def origin(record: Record) -> str:
    """Machine, commit and day of a record, in a few words."""
    device = " + ".join(gpu["name"] for gpu in record["machine"]["gpus"]) or record["machine"]["cpu_model"]
    return f"{device}, commit {str(record['code']['commit'])[:7]}, {record['captured_at'][:10]}"


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """One sentence: how many claims have which verdict."""
    counts = Counter(row["verdict"] for row in rows)
    return f"{len(rows)} claims: {', '.join(f'{counts[label]} {label}' for label in LABELS if counts[label])}."
