"""Claims with their verdicts as rows of text; counts of them, and an answer for each document."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asrkit.shapes import count
from asrkit.workbench.claims.claims import Claim
from asrkit.workbench.claims.verdicts import Verdict, origin, verdict
from asrkit.workbench.records import Record, device

Row = Mapping[str, object]  # of `claims_table`, or of the report's table

SECONDARY = "secondary"  # the document of pull requests and threads, which have no title in common
SECONDARY_TITLE = "Pull requests, issues and model cards"
SECONDARY_URL = "https://github.com/NVIDIA-NeMo/Speech"

OF_LABEL = {  # verdict -> what became of the claim
    "reproduced": "reproduced by measurement",
    "arithmetic checked": "checked by arithmetic",
    "direction only": "confirmed in part",
    "not reproduced": "contradicted",
    "too noisy": "too noisy",
}
OF_NEED = {  # what an open claim needs -> for what it waits
    "cuda": "waiting for a GPU",
    "source": "waiting for weights, other code or a cluster",
    "cluster": "waiting for weights, other code or a cluster",
    "cpu": "not measured yet",
}
ILL_DEFINED = "ill-defined by the source"
OUTCOMES = tuple(dict.fromkeys([*OF_LABEL.values(), *OF_NEED.values(), ILL_DEFINED]))


@dataclass(frozen=True, kw_only=True)
class DocumentAnswer:
    """What became of a document's claims.

    `claims` is how many are in the headline, `counts` how many of them have which of OUTCOMES;
    `appendix` is how many more are listed in the appendix. `exceptions` names the claims that do
    not hold, or hold in part; `sentence` is the counts, and these.
    """

    document: str
    title: str
    url: str
    claims: int
    counts: Mapping[str, int]
    appendix: int
    exceptions: str
    sentence: str


def claims_table(
    claims: Sequence[Claim], records: Sequence[Record], machine: Record | None = None
) -> list[dict[str, str]]:
    """A row of text for each claim, with its verdict.

    Args:
        claims: The claims, in the order of the rows.
        records: Records of any claims and machines.
        machine: The machine whose records decide; by default this one.
    """
    return [claim_row(claim, verdict(claim, records, machine)) for claim in claims]


def claim_row(claim: Claim, judged: Verdict) -> dict[str, str]:
    """A claim and its verdict as text."""
    recorded = value_elsewhere(claim, judged)
    device_there = ""
    if judged.recorded:
        recorded += f" on {origin(judged.recorded)}"
        device_there = device(judged.recorded)
    measured = claim.show(judged.measured)
    if claim.formula and judged.measured is not None:
        measured += " (computed)"
    return {
        "id": claim.id,
        "claim": claim.text,
        "published": claim.show(claim.quoted),
        "tolerance": claim.rule,
        "recorded": recorded,
        "device": device_there,
        "there": judged.there,
        "measured": measured,
        "verdict": judged.label,
        "why": judged.why,
        "notebook": claim.notebook,
        **claim.source,
        "kind": claim.kind,
        "needs": claim.needs,
        "appendix": claim.appendix,
    }


def value_elsewhere(claim: Claim, judged: Verdict) -> str:
    """What another machine recorded, and what that is there: "1.17× (reproduced there)"."""
    if judged.recorded is None:
        return "–"
    value = claim.show(judged.recorded["value"])
    if judged.there:
        value += f" ({judged.there} there)"
    return value


def listed(rows: Iterable[Row]) -> list[Row]:
    """The rows that are not in the appendix."""
    return [row for row in rows if not row["appendix"]]


def count_outcomes(rows: Iterable[Row]) -> dict[str, int]:
    """How many of the rows have each of OUTCOMES, in that order; the appendix is left out."""
    counts = Counter(map(_outcome, listed(rows)))
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def _outcome(row: Row) -> str:
    if row["tolerance"] == "–":
        return ILL_DEFINED
    return OF_LABEL.get(str(row["verdict"])) or OF_NEED[str(row["needs"])]


def summary(rows: Sequence[Row]) -> str:
    """How many claims have which outcome here, and which on other machines.

    The appendix is only counted.
    """
    main = listed(rows)
    sentence = f"{count(len(main), 'claim')}: {_counted(count_outcomes(main))}"
    if len(main) < len(rows):
        sentence += f"; {len(rows) - len(main)} more in the appendix"
    return f"{sentence}. {settled_elsewhere(rows)}".rstrip()


def settled_elsewhere(rows: Sequence[Row]) -> str:
    """What other machines recorded: "Recorded on H100: 4 reproduced by measurement."."""
    of_device = dict[str, Counter[str]]()
    for row in listed(rows):
        if row["there"]:
            counts = of_device.setdefault(str(row["device"]), Counter())
            counts[OF_LABEL[str(row["there"])]] += 1
    told = (f"Recorded on {name}: {_counted(of_device[name])}." for name in sorted(of_device))
    return " ".join(told)


def document_answers(rows: Sequence[Row]) -> list[DocumentAnswer]:
    """An answer for each document, in the order of their names, those of the series first.

    Args:
        rows: Rows of claims, with document, title, url, id, published, measured, verdict and
            appendix.
    """
    of_document = dict[str, list[Row]]()
    for row in rows:
        of_document.setdefault(str(row["document"]), []).append(row)
    return [_answer(document, of_document[document]) for document in sorted(of_document)]


def _answer(document: str, rows: Sequence[Row]) -> DocumentAnswer:
    main = listed(rows)
    counts = count_outcomes(main)
    exceptions = _exceptions(rows)
    sentence = f"Of {count(len(main), 'claim')}: {_counted(counts)}. {exceptions}".rstrip()
    is_secondary = document == SECONDARY
    return DocumentAnswer(
        document=document,
        title=SECONDARY_TITLE if is_secondary else str(rows[0]["title"]),
        url=SECONDARY_URL if is_secondary else str(rows[0]["url"]),
        claims=len(main),
        counts=counts,
        appendix=len(rows) - len(main),
        exceptions=exceptions,
        sentence=sentence if main else "All of its claims are in the appendix.",
    )


def _exceptions(rows: Sequence[Row]) -> str:
    """The claims that do not hold, or hold in part, with what was found and published."""
    parts = []
    for label in ("direction only", "not reproduced"):
        named = [_named(row) for row in rows if row["verdict"] == label]
        if named:
            parts.append(f"{OF_LABEL[label].capitalize()}: {'; '.join(named)}.")
    return " ".join(parts)


def _named(row: Row) -> str:
    """A claim that does not hold: "batch-5x (7.48× where 5× is published)"."""
    place = ", in the appendix" if row["appendix"] else ""
    return f"{row['id']} ({row['measured']} where {row['published']} is published{place})"


def _counted(counts: Mapping[str, int]) -> str:
    """Counts in the order of OUTCOMES, without those of none."""
    told = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
    return "; ".join(told)
