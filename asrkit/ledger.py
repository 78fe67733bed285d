"""Claims of the literature against measurements: verdicts are computed here from records, never written by hand."""

import ast
import operator
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
TIMED = ("ratio", "latency", "throughput")
HOW = ("rel", "abs", "above", "below")
SOURCE = ("document", "title", "url", "section")
OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.Pow: operator.pow, ast.USub: operator.neg}  # fmt: skip


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
        return {"rel": abs(gap) <= by * abs(self.quoted or 0.0), "abs": abs(gap) <= by, "above": gap >= by, "below": -gap >= by}[
            how
        ]

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
    recorded: Mapping[str, Any] | None = None


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
    """The number that an arithmetic expression over `params` makes; numbers, names, + - * / ** and nothing else."""

    def number(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.Name(id=name) if name in params:
                return params[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](number(left), number(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -number(operand)
        raise ValueError(f"formula: expected numbers, {', '.join(params)} and + - * / **, got {ast.unparse(node)!r}.")

    return number(ast.parse(formula, mode="eval").body)


def verdict(claim: Claim, records: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None = None) -> Verdict:
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
    here = [record for record in fitting if record["machine"]["id"] == machine["id"]]
    others = [record for record in fitting if record["machine"]["id"] != machine["id"]]
    recorded = others[-1] if others else None
    if here:
        label, why = _judge(claim, here[-1])
        return Verdict(label=label, why=why, measured=here[-1]["value"], recorded=recorded)
    if claim.needs == "cuda" and not machine["gpus"] and (recorded or claim.status == "measured"):
        return Verdict(label="not measurable here", why="Needs a CUDA GPU.", recorded=recorded)
    return Verdict(label="not measured yet", why=claim.notes, recorded=recorded)


def _fits(claim: Claim, record: Mapping[str, Any]) -> bool:
    same = record["what"] == claim.id and record["metric"] == claim.metric and record["origin"] == "measured"
    return (
        same and (claim.metric == "ratio" or record["unit"] == claim.unit)
        and [*record["params"].get("arms", ())] == [*claim.arms]
        and (claim.needs == "cpu" or str(record["params"].get("device")).startswith("cuda"))
    )  # fmt: skip


def _judge(claim: Claim, record: Mapping[str, Any]) -> tuple[str, str]:
    value, stats, quoted = record["value"], record["stats"], claim.quoted or 0.0
    spread = (stats["p75"] - stats["p25"]) / abs(stats["p50"]) if stats["p50"] else 0.0
    quartiles = f"{stats['n']} repeats, quartiles {claim.show(stats['p25'])} to {claim.show(stats['p75'])}"
    why = quartiles if stats["n"] > 1 else "one observation"
    if claim.kind in TIMED and (stats["n"] < 3 or spread > claim.noise):
        return "too noisy", f"{why}; a verdict needs 3 repeats and a spread within {claim.noise:.0%} of the median"
    if claim.agrees(value):
        return "reproduced", why
    same_side = stats["p25"] > 1 if quoted > 1 else stats["p75"] < 1
    return ("direction only" if claim.kind == "ratio" and quoted != 1 and same_side else "not reproduced"), why


def table(
    claims: Sequence[Claim], records: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None = None
) -> list[dict[str, str]]:
    """A row of text a claim: id, claim, published, recorded (with its machine), measured, verdict, why, source, notebook."""
    rows = []
    for claim in claims:
        found = verdict(claim, records, machine)
        recorded = claim.show(found.recorded["value"]) + f" on {origin(found.recorded)}" if found.recorded else "–"
        rows.append({
            "id": claim.id, "claim": claim.text, "published": claim.show(claim.quoted), "recorded": recorded,
            "measured": claim.show(found.measured), "verdict": found.label, "why": found.why, "notebook": claim.notebook,
            "title": claim.source["title"], "url": claim.source["url"], "section": claim.source["section"],
        })  # fmt: skip
    return rows


def origin(record: Mapping[str, Any]) -> str:
    """Machine, commit and day of a record, in a few words."""
    device = " + ".join(gpu["name"] for gpu in record["machine"]["gpus"]) or record["machine"]["cpu_model"]
    return f"{device}, commit {str(record['code']['commit'])[:7]}, {record['captured_at'][:10]}"


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """One sentence: how many claims have which verdict."""
    counts = Counter(row["verdict"] for row in rows)
    return f"{len(rows)} claims: {', '.join(f'{counts[label]} {label}' for label in LABELS if counts[label])}."
