"""`asrkit report compare`: two runs side by side, and whether it is fair to compare them."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.ledger import load_claims
from asrkit.workbench.report.columns import Record, Row, machine_rows, record_columns
from asrkit.workbench.report.frame import write_page
from asrkit.workbench.schemas import REPORT_MANIFEST, validator
from asrkit.workbench.tables import aligned

OVERLAP_WORDS = {"no": "quartiles apart", "yes": "quartiles overlap"}
SHOWN_RECORDS = 20  # on the terminal


class ChangedVerdict(NamedTuple):
    """A claim whose verdict differs; `reason` says so where only one run ran its notebook."""

    claim: str
    a: str
    b: str
    reason: str


class _Run(NamedTuple):
    """What is read of one run."""

    name: str
    manifest: Mapping[str, Any]
    records: Mapping[str, Record]
    load: float | None  # median of the records
    notebooks: Mapping[str, Any]

    @property
    def ran(self) -> set[str]:
        return {name for name, run in self.notebooks.items() if run["status"] == "ran"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The page, and what is on it: pairs of records, notebooks, changed verdicts and warnings."""

    path: Path
    a: str  # name of the run
    b: str
    pairs: Sequence[Row]
    notebooks: Sequence[Row]
    verdicts: Sequence[ChangedVerdict]
    warnings: Sequence[str]

    def summary(self) -> str:
        """Warnings, a table of seconds and records, and changed verdicts.

        The records that differ most come first; the others are on the page only.
        """
        lines = [*self.warnings, *aligned(self._table())]
        if len(self.pairs) > SHOWN_RECORDS:
            lines.append(f"and {len(self.pairs) - SHOWN_RECORDS} more records on the page")
        for changed in self.verdicts:
            if not changed.reason:
                lines.append(f"{changed.claim}: {changed.a} in A, {changed.b} in B")
        reasons = Counter(changed.reason for changed in self.verdicts if changed.reason)
        for reason, number in reasons.items():
            lines.append(f"{number} more verdicts differ: {reason}")
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """The result for programs: numbers of records and verdicts, and the path of the page."""
        return {
            "a": self.a,
            "b": self.b,
            "records": len(self.pairs),
            "apart": _number_apart(self.pairs),
            "verdicts_changed": len(self.verdicts),
            "same_machine": not any("machine" in warning for warning in self.warnings),
            "path": str(self.path),
        }

    def _table(self) -> list[list[str]]:
        rows = [[row["name"], row["a"], row["b"], row["ratio"], ""] for row in self.notebooks]
        for pair in self.pairs[:SHOWN_RECORDS]:
            a = pair["a"]
            details = [a[column] for column in ("metric", "impl", "phase", "dtype", "shape")]
            name = f"{a['what']}, {' '.join(filter(None, details))}"
            note = OVERLAP_WORDS.get(pair["overlap"], pair["overlap"])
            rows.append([name, a["median"], pair["b"]["median"], pair["ratio"], note])
        if rows:
            rows.insert(0, ["", "A", "B", "B / A", ""])
        return rows


def compare(a: Path, b: Path, out: Path | None = None) -> Comparison:
    """Put two runs side by side on one offline page.

    Args:
        a: Folder of a complete run.
        b: Folder of another; ratios are B over A.
        out: The page; by default compare-A-B.html beside B.

    Raises:
        ValueError: A folder holds no complete run, or `out` is not a file of HTML.
    """
    a, b = a.resolve(), b.resolve()
    if out is not None:
        is_html = out.suffix == ".html" and (out.is_file() or not out.exists())
        expect(is_html, "out", "a file of HTML", repr(str(out)))
    first = _read_run(a)
    second = _read_run(b)
    pairs = [
        _pair(record, second.records[key])
        for key, record in first.records.items()
        if key in second.records
    ]
    pairs.sort(key=lambda pair: -pair["apart"])
    comparison = Comparison(
        path=out or b.parent / f"compare-{a.name}-{b.name}.html",
        a=a.name,
        b=b.name,
        pairs=pairs,
        notebooks=_notebook_rows(first, second),
        verdicts=_changed_verdicts(first, second),
        warnings=_warnings(first, second),
    )
    only_first = {*first.records} - {*second.records}
    only_second = {*second.records} - {*first.records}
    write_page(
        comparison.path,
        "compare.html.j2",
        a=a,
        b=b,
        sentence=_sentence(comparison),
        warnings=comparison.warnings,
        facts=_facts(first, second),
        notebooks=comparison.notebooks,
        pairs=pairs,
        alone=(len(only_first), len(only_second)),
        verdicts=comparison.verdicts,
    )
    return comparison


def _read_run(folder: Path) -> _Run:
    manifest = _manifest(folder)
    by_key = _records_by_key(folder)
    loads = [record["load1"] for record in by_key.values() if record["load1"] is not None]
    return _Run(
        name=folder.name,
        manifest=manifest,
        records=by_key,
        load=statistics.median(loads) if loads else None,
        notebooks={run["name"]: run for run in manifest["runs"]},
    )


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    expect(
        path.is_file(),
        "runs",
        "folders of whole runs, with a manifest.json",
        repr(folder.name),
        "asrkit report --resume finishes one that was cut short.",
    )
    manifest: Any = None
    try:
        manifest = json.loads(path.read_text("utf-8"))
        is_manifest = validator(REPORT_MANIFEST)(manifest) is None
    except ValueError:
        is_manifest = False
    expect(
        is_manifest,
        "runs",
        "manifests of asrkit report",
        f"another or a torn one, {path}",
        "Run the report again.",
    )
    return manifest


def _records_by_key(folder: Path) -> dict[str, Record]:
    """Records of a run by what they are of.

    That is the name, metric, implementation, unit, parameters that are no fraction, and which of
    several equal ones.
    """
    if not (folder / "records").is_dir():
        return {}
    by_key = dict[str, Record]()
    times = defaultdict[str, int](int)
    for record in records.read(folder / "records"):
        params = {
            name: value for name, value in record["params"].items() if not isinstance(value, float)
        }
        identity = [record["what"], record["metric"], record["impl"], record["unit"], params]
        key = json.dumps(identity, sort_keys=True)
        times[key] += 1
        by_key[f"{key} {times[key]}"] = record
    return by_key


def _pair(a: Record, b: Record) -> Row:
    """Columns of a record in both runs; `apart` is the larger over the smaller value."""
    ratio = b["value"] / a["value"] if a["value"] else None
    apart = 1.0
    if ratio is not None and ratio > 0:
        apart = max(ratio, 1 / ratio)
    return {
        "a": record_columns(a),
        "b": record_columns(b),
        "ratio": "–" if ratio is None else f"{ratio:.3g}",
        "overlap": _overlap(a["stats"], b["stats"]),
        "apart": apart,
    }


def _overlap(a: Mapping[str, float], b: Mapping[str, float]) -> str:
    """Whether quartiles overlap: "yes", "no" or "one observation"."""
    if a["n"] < 2 or b["n"] < 2:
        return "one observation"
    if a["p25"] <= b["p75"] and b["p25"] <= a["p75"]:
        return "yes"
    return "no"


def _number_apart(pairs: Sequence[Row]) -> int:
    return sum(pair["overlap"] == "no" for pair in pairs)


def _notebook_rows(first: _Run, second: _Run) -> list[Row]:
    rows = []
    for name in sorted({*first.notebooks, *second.notebooks}):
        a = first.notebooks.get(name)
        b = second.notebooks.get(name)
        rows.append(
            {
                "name": name,
                "a": _seconds(a),
                "b": _seconds(b),
                "ratio": _ratio_of_seconds(a, b),
                "a_status": _status(a),
                "b_status": _status(b),
            }
        )
    return rows


def _seconds(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "–"
    return f"{run['seconds']:.1f}"


def _status(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "not in this run"
    return run["status"]


def _ratio_of_seconds(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """B over A where both ran to the end with the same parameters, else a dash."""
    if not a or not b or not a["seconds"]:
        return "–"
    both_ran = a["status"] == b["status"] == "ran"
    if not both_ran or a["parameters"] != b["parameters"]:
        return "–"
    return f"{b['seconds'] / a['seconds']:.2f}"


def _changed_verdicts(first: _Run, second: _Run) -> list[ChangedVerdict]:
    notebook_of = {claim.id: claim.notebook for claim in load_claims()}
    reasons = {}  # by notebook
    for name in first.ran ^ second.ran:
        only = "A" if name in first.ran else "B"
        reasons[name] = f"only {only} ran the notebook"
    labels_a = first.manifest["claims"]
    labels_b = second.manifest["claims"]
    changed = []
    for claim in sorted({*labels_a, *labels_b}):
        a = labels_a.get(claim, "no such claim")
        b = labels_b.get(claim, "no such claim")
        if a != b:
            reason = reasons.get(notebook_of.get(claim, ""), "")
            changed.append(ChangedVerdict(claim, a, b, reason))
    return changed


def _warnings(first: _Run, second: _Run) -> list[str]:
    """What makes the comparison unfair."""
    warnings = []
    if first.manifest["machine"]["id"] != second.manifest["machine"]["id"]:
        warnings.append("The machines differ: a ratio between them is no claim about speed.")
    for setting in ("size", "device"):
        a = first.manifest["plan"][setting]
        b = second.manifest["plan"][setting]
        if a != b:
            warnings.append(f"{setting.capitalize()} differs: {a} and {b}.")
    if first.load is not None and second.load is not None:
        low, high = sorted((first.load, second.load))
        if high > max(1.0, 2 * low):
            warnings.append(
                f"The load differs: {first.load:.1f} in A, {second.load:.1f} in B; "
                "what waits for a core is slower."
            )
    return warnings


def _facts(first: _Run, second: _Run) -> list[tuple[str, list[str]]]:
    """Rows about both runs: names, machines, software, load and commands."""
    runs = (first, second)
    sources = [{**run.manifest, "captured_at": run.manifest["now"]} for run in runs]
    loads = ["–" if run.load is None else f"{run.load:.1f}" for run in runs]
    commands = [run.manifest["command"].replace("\n", "; ") for run in runs]
    return [
        ("run", [run.name for run in runs]),
        *machine_rows(sources),
        ("load, median of the records", loads),
        ("command", commands),
    ]


def _sentence(comparison: Comparison) -> str:
    sentence = (
        f"{len(comparison.pairs)} records in both, "
        f"{_number_apart(comparison.pairs)} with quartiles apart; "
        f"{len(comparison.verdicts)} verdicts differ"
    )
    explained = sum(bool(changed.reason) for changed in comparison.verdicts)
    if explained:
        sentence += f", {explained} as only one run has the notebook"
    return f"{sentence}."
