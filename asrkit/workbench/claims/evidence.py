"""Which records decide a claim, and which are only shown beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asrkit.workbench.claims.claims import Claim, Record
from asrkit.workbench.records import code_version

OTHER_DEVICE = "measured on a CPU, and the claim is about a GPU"
NO_BASELINE = "the source gives no number and baseline to compare with"
DECIDING = ("measured",)  # origins of records that can settle a claim
SHOWN = (*DECIDING, "estimated")  # and of those that are shown beside one, which says so


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A measurement close to what a claim says, which cannot settle it.

    `record["value"]` is in the claim's unit; `why` says what differs; `is_here` whether this
    machine measured it.
    """

    record: Record
    why: str
    is_here: bool


def deciding(claim: Claim, records: Sequence[Record]) -> list[Record]:
    """Records that measure what the claim says on a device of its kind, oldest first."""
    if not claim.is_defined:
        return []
    return [record for record in _own(claim, records) if _is_on_device(claim, record)]


def evidence(claim: Claim, records: Sequence[Record], machine: Record) -> tuple[Evidence, ...]:
    """What was measured close to a claim and cannot settle it.

    Args:
        claim: The claim.
        records: Records of any claims and machines.
        machine: The machine that counts as this one.

    Returns:
        Of the claim's own records and of each entry of `claim.evidence`, in this order: the newest
        record of this machine and the newest of any other.
    """
    own = _own(claim, records)
    why = NO_BASELINE
    if claim.is_defined:
        own = [record for record in own if not _is_on_device(claim, record)]
        why = OTHER_DEVICE
    found = _newest_of_each(own, why, machine)
    for entry in claim.evidence:
        named = _alike(claim, records, entry["what"], entry.get("arms", ()), SHOWN)
        if "impl" in entry:
            named = [record for record in named if record["impl"] == entry["impl"]]
        found += _newest_of_each(named, entry["why"], machine)
    return tuple(found)


def newest(records: Iterable[Record], machine: Record) -> tuple[Record | None, Record | None]:
    """The newest of `records` from `machine`, and the newest from any other."""
    here = None
    elsewhere = None
    for record in sorted(records, key=lambda record: record["captured_at"]):
        if record["machine"]["id"] == machine["id"]:
            here = record
        else:
            elsewhere = record
    return here, elsewhere


def origin(record: Record) -> str:
    """Device, code version and day of a record."""
    return f"{device(record)}, {code_version(record)}, {record['captured_at'][:10]}"


def device(record: Record) -> str:
    """Names of the GPUs of a record's machine, or of its CPU."""
    gpus = " + ".join(gpu["name"] for gpu in record["machine"]["gpus"])
    return gpus or record["machine"]["cpu_model"]


def _newest_of_each(records: Iterable[Record], why: str, machine: Record) -> list[Evidence]:
    here, elsewhere = newest(records, machine)
    found = []
    if here is not None:
        found.append(Evidence(record=here, why=why, is_here=True))
    if elsewhere is not None:
        found.append(Evidence(record=elsewhere, why=why, is_here=False))
    return found


def _own(claim: Claim, records: Iterable[Record]) -> list[Record]:
    return _alike(claim, records, claim.id, claim.arms, DECIDING)


def _alike(
    claim: Claim, records: Iterable[Record], what: str, arms: Sequence[str], origins: Sequence[str]
) -> list[Record]:
    """Records of one name and of these origins, with the claim's metric and unit and these arms."""
    return [
        record
        for record in records
        if record["what"] == what
        and record["metric"] == claim.metric
        and (claim.metric == "ratio" or _plain_unit(record["unit"]) == _plain_unit(claim.unit))
        and record["origin"] in origins
        and tuple(record["params"].get("arms", ())) == tuple(arms)
        and not record["params"].get("quick")  # sizes that only show that the code runs
    ]


def _plain_unit(unit: str) -> str:
    """The unit by one name: records write shares as "1" or as "fraction"."""
    if unit == "fraction":
        return "1"
    return unit


def _is_on_device(claim: Claim, record: Record) -> bool:
    return claim.needs == "cpu" or str(record["params"].get("device")).startswith("cuda")
