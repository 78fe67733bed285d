"""What the ledger says as a whole, and of each document: sentences made from verdicts alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asrkit.workbench.claims.labels import LABELS, NOT_COMPARABLE

Row = Mapping[str, object]  # of `table`, or of the report's table

AGREE = ("reproduced", "arithmetic checked")
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


def headline(rows: Iterable[Row]) -> list[Row]:
    """The rows that are not in the appendix."""
    return [row for row in rows if not row["appendix"]]


def count_verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """How many of the rows have which verdict, in the order of LABELS; verdicts of none are absent.

    Args:
        rows: Rows of the ledger, with or without those of the appendix.
    """
    counts = Counter(str(row["verdict"]) for row in rows)
    return {label: counts[label] for label in LABELS if counts[label]}


def summary(rows: Sequence[Row]) -> str:
    """How many claims have which verdict here, and which on other machines.

    The appendix is only counted.
    """
    main = headline(rows)
    sentence = f"{_claims(len(main))}: {_listed(count_verdicts(main))}"
    if len(main) < len(rows):
        sentence += f"; {len(rows) - len(main)} more in the appendix"
    sentence += "."
    judged = [row for row in main if row["there"]]
    for device in sorted({str(row["device"]) for row in judged}):
        there = Counter(str(row["there"]) for row in judged if row["device"] == device)
        counts = {label: there[label] for label in LABELS if there[label]}
        sentence += f" On {device}: {_listed(counts)}."
    return sentence


def document_answers(rows: Sequence[Row]) -> list[DocumentAnswer]:
    """An answer for each document, in the order of their names, those of the series first.

    Args:
        rows: Rows of the ledger, with document, title, url, id, published, measured, verdict and
            appendix.
    """
    of_document = dict[str, list[Row]]()
    for row in rows:
        of_document.setdefault(str(row["document"]), []).append(row)
    return [_answer(document, of_document[document]) for document in sorted(of_document)]


def _answer(document: str, rows: Sequence[Row]) -> DocumentAnswer:
    main = headline(rows)
    title = str(rows[0]["title"])
    url = str(rows[0]["url"])
    if document == SECONDARY:
        title = SECONDARY_TITLE
        url = SECONDARY_URL
    return DocumentAnswer(
        document=document,
        title=title,
        url=url,
        claims=len(main),
        counts=count_verdicts(main),
        appendix=len(rows) - len(main),
        sentence=_sentence(rows),
    )


def _sentence(rows: Sequence[Row]) -> str:
    """Counts of verdicts, the claims that do not hold, and what to think of the document."""
    main = headline(rows)
    if not main:
        return "All of its claims are in the appendix."
    counts = count_verdicts(main)
    parts = [f"Of {_claims(len(main))}: {_listed(counts)}."]
    for label in ("direction only", "not reproduced"):
        named = [_named(row) for row in rows if row["verdict"] == label]
        if named:
            parts.append(f"{label.capitalize()}: {'; '.join(named)}.")
    parts.append(f"Our view: {_view(counts)}.")
    return " ".join(parts)


def _named(row: Row) -> str:
    """A claim that does not hold: "batch-5x (7.48× where 5× is published)"."""
    place = ", in the appendix" if row["appendix"] else ""
    return f"{row['id']} ({row['measured']} where {row['published']} is published{place})"


def _view(counts: Mapping[str, int]) -> str:
    """What to think of a document, from the verdicts on its claims."""
    measured = counts.get("reproduced", 0)
    agree = sum(counts.get(label, 0) for label in AGREE)
    partly = counts.get("direction only", 0)
    wrong = counts.get("not reproduced", 0)
    vague = counts.get("ill-defined", 0) + counts.get(NOT_COMPARABLE, 0)
    waiting = sum(counts.values()) - agree - partly - wrong - vague
    if wrong > agree + partly:
        return "do not rely on its figures without measuring"
    if wrong or (measured and partly):
        return "what could be tested holds, except as noted"
    if measured:
        return "what could be tested holds"
    if partly:
        return "the direction is right as far as tested; the size is not confirmed"
    if agree:
        return "its arithmetic is right, and none of its measurements is confirmed here"
    if vague > waiting:
        return "it states too little, or conditions too far from ours, to be tested"
    return "none yet"


def _listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{number} {label}" for label, number in counts.items()) or "none"


def _claims(number: int) -> str:
    return "1 claim" if number == 1 else f"{number} claims"
