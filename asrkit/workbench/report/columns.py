"""What each column of the report's tables shows: of claims, of records and of machines."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asrkit.workbench.claims import (
    LABELS,
    NOT_COMPARABLE,
    Claim,
    Evidence,
    Verdict,
    claim_row,
    load_claims,
    origin,
    value_elsewhere,
    verdict,
)
from asrkit.workbench.machine import code, software, this_machine

Record = Mapping[str, Any]
Row = dict[str, Any]

UNITS = {  # unit of a record -> factor and text of what is shown
    "1": (1, ""),
    "B": (2**-20, " MiB"),
    "B/s": (2**-30, " GiB/s"),
    "fraction": (100, " %"),
    "FLOP/s": (1e-9, " GFLOP/s"),
    "s/s": (1, "× real time"),
    "us": (1, " µs"),
    "1/s": (1, " per s"),
}
SHAPE_LETTERS = ("B", "T", "U", "U1", "V", "D")
MACHINE_FACTS = {
    "id": "machine id",
    "cpu_model": "CPU",
    "cpu_usable": "cores",
    "ram_gib": "memory, GiB",
    "system": "system",
    "kernel": "kernel",
}
GPU_FACTS = {"name": "GPU", "memory.total": "GPU memory", "driver_version": "driver"}
PACKAGES = ("python", "torch", "cuda", "torchaudio", "numpy", "numba", "lhotse")


def claim_rows(shipped: Sequence[Record], fresh: Sequence[Record]) -> list[Row]:
    """A row for each claim of the ledger, with its verdict.

    Args:
        shipped: Records that the project ships.
        fresh: Records of this run.
    """
    measured_now = {record["what"] for record in fresh}
    rows = []
    for claim in load_claims():
        names = {claim.id, *(entry["what"] for entry in claim.evidence)}
        judged = verdict(claim, [*shipped, *fresh])
        rows.append(claim_columns(claim, judged, is_fresh=bool(names & measured_now)))
    return rows


def claim_columns(claim: Claim, judged: Verdict, *, is_fresh: bool) -> Row:
    """The columns of a claim; those that end in `_value` are what the page sorts by.

    Args:
        claim: The claim.
        judged: Its verdict.
        is_fresh: Whether this run measured what the row shows as measured here.
    """
    published = claim.show(claim.quoted)
    if claim.unit == "lines":
        published += " of a table"
    beside = list[str]()
    if judged.label != NOT_COMPARABLE:  # there the reason tells them
        beside = [_evidence_text(claim, one) for one in judged.evidence]
    return {
        **claim_row(claim, judged),
        "published": published,
        "published_value": _sortable(claim.quoted),
        "measured": claim.show(judged.measured),
        "measured_value": _sortable(judged.measured),
        "measured_label": "Computed here" if claim.formula else "Measured here",
        "measured_note": _measured_note(claim, judged, is_fresh),
        "verdict_value": LABELS.index(judged.label),
        "beside": beside,
        **_recorded_columns(claim, judged),
    }


def _measured_note(claim: Claim, judged: Verdict, is_fresh: bool) -> str:
    """What a reader must know about the value measured here; empty where it is just that."""
    if judged.measured is None:
        return ""
    if claim.formula:
        return "computed"
    if is_fresh:
        return ""
    return "earlier, on a machine of this kind"


def _evidence_text(claim: Claim, one: Evidence) -> str:
    """A value that was measured close to a claim, what it is of, where, and what differs."""
    value = claim.show(one.record["value"])
    return f"{value}, {_implementation(one.record)}, on {origin(one.record)}: {one.why}"


def _sortable(value: float | None) -> float | str:
    if value is None:
        return ""
    return value


def _recorded_columns(claim: Claim, judged: Verdict) -> Row:
    """What another machine recorded, and which."""
    record = judged.recorded
    if record is None:
        return {
            "recorded": "–" if claim.needs == "cpu" else "not recorded yet",
            "recorded_value": "",
            "recorded_note": "",
        }
    return {
        "recorded": value_elsewhere(claim, judged),
        "recorded_value": record["value"],
        "recorded_note": origin(record),
    }


def record_columns(record: Record, notebook: str = "", claim_ids: Collection[str] = ()) -> Row:
    """The columns of a record: bytes are shown as MiB, fractions in per cent.

    Args:
        record: The record.
        notebook: Name of the notebook that published it.
        claim_ids: Claims to whose rows a record of that name may link.
    """
    params = record["params"]
    stats = record["stats"]
    scale, unit = UNITS.get(record["unit"], (1, f" {record['unit']}"))
    if record["metric"] == "ratio":
        unit = " ×"
    quartiles = "–"
    if stats["n"] > 1:
        quartiles = f"{stats['p25'] * scale:.4g} – {stats['p75'] * scale:.4g}"
    return {
        "what": record["what"],
        "metric": record["metric"].replace("_", " ").replace("rtfx", "RTFx"),
        "value": record["value"],
        "impl": _implementation(record),
        "notebook": notebook,
        "phase": params.get("phase", ""),
        "dtype": params.get("dtype", ""),
        "device": params.get("device", ""),
        "shape": _shape(params),
        "median": f"{record['value'] * scale:.4g}{unit}",
        "n": stats["n"],
        "quartiles": quartiles,
        "claim": record["what"] if record["what"] in claim_ids else "",
    }


def _implementation(record: Record) -> str:
    """What a record is of: an implementation, or the two sides of a ratio."""
    return " / ".join(map(str, record["params"].get("arms", ()))) or str(record["impl"])


RECORD_COLUMNS = {
    "metric": "Metric",
    "impl": "Implementation",
    "phase": "Phase",
    "dtype": "Dtype",
    "shape": "Shape",
}


def filled_columns(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Key and name of the columns of records in which at least one row has something."""
    return [(key, name) for key, name in RECORD_COLUMNS.items() if any(row[key] for row in rows)]


def _shape(params: Mapping[str, Any]) -> str:
    """A shape as "2×80×41", or single sizes as "B=2 T=80"."""
    shape = params.get("shape")
    if isinstance(shape, list):
        return "×".join(map(str, shape))
    return " ".join(f"{letter}={params[letter]}" for letter in SHAPE_LETTERS if letter in params)


def machine_facts() -> dict[str, str]:
    """Name and value of each fact about this machine, its software and the code; GPUs if any."""
    here = this_machine()
    commit = str(code()["commit"] or "")[:9]
    if code()["dirty"]:
        commit += " with uncommitted changes"
    facts = {name: here[key] for key, name in MACHINE_FACTS.items()}
    facts["instructions"] = " ".join(here["isa"])
    for key, name in GPU_FACTS.items():
        facts[name] = ", ".join(gpu[key] for gpu in here["gpus"])
    for name in PACKAGES:
        facts[name] = software()[name]
    facts["commit"] = commit
    return {name: str(value) for name, value in facts.items() if value}
