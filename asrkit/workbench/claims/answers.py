"""Claims with their verdicts as rows of text, counts of outcomes, and an answer per document."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asrkit.shapes import count
from asrkit.workbench.claims.claims import Claim
from asrkit.workbench.claims.verdicts import Verdict, origin, verdict
from asrkit.workbench.records import Record, device

Row = Mapping[str, object]  # of `claims_table`, or of the report's table

SECONDARY = "secondary"  # pull requests and threads, which share no title
SECONDARY_TITLE = "Pull requests, issues and model cards"
SECONDARY_URL = "https://github.com/NVIDIA-NeMo/Speech"

OUTCOME_OF_VERDICT = {
    "reproduced": "reproduced by measurement",
    "arithmetic checked": "checked by arithmetic",
    "direction only": "confirmed in part",
    "not reproduced": "contradicted",
    "too noisy": "too noisy",
}
OUTCOME_OF_NEED = {  # for an open claim: what it needs -> what it is waiting for
    "cuda": "waiting for a GPU",
    "source": "waiting for weights, other code or a cluster",
    "cluster": "waiting for weights, other code or a cluster",
    "cpu": "not measured yet",
}
ILL_DEFINED = "ill-defined by the source"
OUTCOMES = tuple(
    dict.fromkeys([*OUTCOME_OF_VERDICT.values(), *OUTCOME_OF_NEED.values(), ILL_DEFINED])
)


@dataclass(frozen=True, kw_only=True)
class DocumentAnswer:
    """The outcome of a document's claims.

    Attributes:
        document: Name of the document, as in data/claims.yaml.
        title: Its title.
        url: Its address.
        claims: Number of claims, without those in the appendix.
        counts: Number of these claims with each of OUTCOMES.
        appendix: Number of claims in the appendix.
        exceptions: The claims that do not hold, or only in part; empty if there are none.
        sentence: The counts and the exceptions in words.
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
    other_device = ""
    if judged.recorded:
        recorded += f" on {origin(judged.recorded)}"
        other_device = device(judged.recorded)
    measured = claim.show(judged.measured)
    if claim.formula and judged.measured is not None:
        measured += " (computed)"
    return {
        "id": claim.id,
        "claim": claim.text,
        "published": claim.show(claim.quoted),
        "tolerance": claim.rule,
        "recorded": recorded,
        "device": other_device,
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
    """The value that another machine recorded, with its verdict: "1.17× (reproduced there)"."""
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
    """The number of rows with each of OUTCOMES, in that order, without the appendix."""
    counts = Counter(map(_outcome, listed(rows)))
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def _outcome(row: Row) -> str:
    if row["tolerance"] == "–":
        return ILL_DEFINED
    return OUTCOME_OF_VERDICT.get(str(row["verdict"])) or OUTCOME_OF_NEED[str(row["needs"])]


def summary(rows: Sequence[Row]) -> str:
    """The number of claims with each outcome, on this machine and on others, in a sentence.

    Of the appendix, only the number of claims is given.
    """
    main = listed(rows)
    sentence = f"{count(len(main), 'claim')}: {_in_words(count_outcomes(main))}"
    if len(main) < len(rows):
        sentence += f"; {len(rows) - len(main)} more in the appendix"
    return f"{sentence}. {settled_elsewhere(rows)}".rstrip()


def settled_elsewhere(rows: Sequence[Row]) -> str:
    """What other machines recorded: "Recorded on H100: 4 reproduced by measurement."."""
    by_device = dict[str, Counter[str]]()
    for row in listed(rows):
        if row["there"]:
            counts = by_device.setdefault(str(row["device"]), Counter())
            counts[OUTCOME_OF_VERDICT[str(row["there"])]] += 1
    sentences = [f"Recorded on {name}: {_in_words(by_device[name])}." for name in sorted(by_device)]
    return " ".join(sentences)


def document_answers(rows: Sequence[Row]) -> list[DocumentAnswer]:
    """An answer for each document, sorted by name: the numbered documents come first.

    Args:
        rows: Rows of `claims_table`.
    """
    by_document = dict[str, list[Row]]()
    for row in rows:
        by_document.setdefault(str(row["document"]), []).append(row)
    return [_answer(document, by_document[document]) for document in sorted(by_document)]


def _answer(document: str, rows: Sequence[Row]) -> DocumentAnswer:
    main = listed(rows)
    counts = count_outcomes(main)
    exceptions = _exceptions(rows)
    sentence = f"Of {count(len(main), 'claim')}: {_in_words(counts)}. {exceptions}".rstrip()
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
    """The claims that do not hold, or only in part, with the measured and the published value."""
    parts = []
    for label in ("direction only", "not reproduced"):
        claims = [_both_values(row) for row in rows if row["verdict"] == label]
        if claims:
            parts.append(f"{OUTCOME_OF_VERDICT[label].capitalize()}: {'; '.join(claims)}.")
    return " ".join(parts)


def _both_values(row: Row) -> str:
    """A claim that does not hold: "batch-5x (7.48× where 5× is published)"."""
    place = ", in the appendix" if row["appendix"] else ""
    return f"{row['id']} ({row['measured']} where {row['published']} is published{place})"


def _in_words(counts: Mapping[str, int]) -> str:
    """The counts above zero, in the order of OUTCOMES."""
    return "; ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
