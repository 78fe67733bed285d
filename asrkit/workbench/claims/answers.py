"""Claims with their verdicts as rows of text; counts of them, and an answer for each document."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asrkit.shapes import count
from asrkit.workbench.claims.claims import Claim, Record
from asrkit.workbench.claims.verdicts import LABELS, Verdict, origin, verdict
from asrkit.workbench.records import device

Row = Mapping[str, object]  # of `claims_table`, or of the report's table

SECONDARY = "secondary"  # the document of pull requests and threads, which have no title in common
SECONDARY_TITLE = "Pull requests, issues and model cards"
SECONDARY_URL = "https://github.com/NVIDIA-NeMo/Speech"


@dataclass(frozen=True, kw_only=True)
class DocumentAnswer:
    """What became of a document's claims.

    `claims` is how many are in the headline, `counts` how many of them have which verdict, in the
    order of LABELS; `appendix` is how many more are listed in the appendix. `sentence` is a few
    sentences for people, made from the verdicts: counts, which claims do not hold, and what to
    think of the document.
    """

    document: str
    title: str
    url: str
    claims: int
    counts: Mapping[str, int]
    appendix: int
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


def count_verdicts(rows: Iterable[Row], column: str = "verdict") -> dict[str, int]:
    """How many of the rows have which verdict, in the order of LABELS; verdicts of none are absent.

    Args:
        rows: Rows of claims, with or without those of the appendix.
        column: Which verdict: "verdict", or "there", that on another machine.
    """
    counts = Counter(str(row[column]) for row in rows)
    return {label: counts[label] for label in LABELS if counts[label]}


def summary(rows: Sequence[Row]) -> str:
    """How many claims have which verdict here, and which on other machines.

    The appendix is only counted.
    """
    main = listed(rows)
    sentence = f"{count(len(main), 'claim')}: {_listed(count_verdicts(main))}"
    if len(main) < len(rows):
        sentence += f"; {len(rows) - len(main)} more in the appendix"
    sentence += "."
    for name in sorted({str(row["device"]) for row in main if row["there"]}):
        counts = count_verdicts([row for row in main if row["device"] == name], "there")
        sentence += f" On {name}: {_listed(counts)}."
    return sentence


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
    counts = count_verdicts(main)
    is_secondary = document == SECONDARY
    return DocumentAnswer(
        document=document,
        title=SECONDARY_TITLE if is_secondary else str(rows[0]["title"]),
        url=SECONDARY_URL if is_secondary else str(rows[0]["url"]),
        claims=len(main),
        counts=counts,
        appendix=len(rows) - len(main),
        sentence=_sentence(rows, counts) if main else "All of its claims are in the appendix.",
    )


def _sentence(rows: Sequence[Row], counts: Mapping[str, int]) -> str:
    """Counts of verdicts, the claims that do not hold, and what to think of the document."""
    parts = [f"Of {count(sum(counts.values()), 'claim')}: {_listed(counts)}."]
    for label in ("direction only", "not reproduced"):
        named = [_named(row) for row in rows if row["verdict"] == label]
        if named:
            parts.append(f"{label.capitalize()}: {'; '.join(named)}.")
    return f"{' '.join(parts)} Our view: {_view(counts)}."


def _named(row: Row) -> str:
    """A claim that does not hold: "batch-5x (7.48× where 5× is published)"."""
    place = ", in the appendix" if row["appendix"] else ""
    return f"{row['id']} ({row['measured']} where {row['published']} is published{place})"


def _view(counts: Mapping[str, int]) -> str:
    """What to think of a document, from the verdicts on its claims."""
    of = Counter(counts)
    holds = of["reproduced"] + of["arithmetic checked"]
    if of["not reproduced"] > holds + of["direction only"]:
        return "do not rely on its figures without measuring"
    if of["not reproduced"] or (of["reproduced"] and of["direction only"]):
        return "what could be tested holds, except as noted"
    if of["reproduced"]:
        return "what could be tested holds"
    if of["direction only"]:
        return "the direction is right as far as tested; the size is not confirmed"
    if holds:
        return "its arithmetic is right, and none of its measurements is confirmed here"
    return "nothing of it could be tested here"


def _listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{number} {label}" for label, number in counts.items()) or "none"
