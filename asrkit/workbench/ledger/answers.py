"""What the ledger says as a whole, and of each document: sentences made from verdicts alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asrkit.workbench.ledger.labels import LABELS, NOT_COMPARABLE

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
    sentences for people, made from the verdicts: counts, what testing showed, what is open and why,
    and what to think of it.
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
    """One sentence: how many claims have which verdict; the appendix is only counted."""
    main = headline(rows)
    sentence = f"{_claims(len(main))}: {_listed(count_verdicts(main))}"
    if len(main) < len(rows):
        sentence += f"; {len(rows) - len(main)} more in the appendix"
    return f"{sentence}."


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
    counts = count_verdicts(main)
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
        counts=counts,
        appendix=len(rows) - len(main),
        sentence=_sentence(main, counts) + _appendix_sentence(rows),
    )


def _sentence(rows: Sequence[Row], counts: Mapping[str, int]) -> str:
    if not rows:
        return "All of its claims are in the appendix."
    parts = [
        f"Of {_claims(len(rows))}: {_listed(counts)}.",
        _tested(rows, counts),
        _open(counts),
        f"Our view: {_view(counts)}.",
    ]
    return " ".join(part for part in parts if part)


def _appendix_sentence(rows: Sequence[Row]) -> str:
    """What the appendix contradicts; empty where it contradicts nothing."""
    wrong = [row for row in rows if row["appendix"] and row["verdict"] == "not reproduced"]
    if not wrong:
        return ""
    count = f"{len(wrong)} {_verb(len(wrong), 'does', 'do')} not agree"
    return f" In the appendix, {count} ({_named(wrong, 'not reproduced')})."


def _tested(rows: Sequence[Row], counts: Mapping[str, int]) -> str:
    """What testing showed: how many agree, and which do not."""
    agree = sum(counts.get(label, 0) for label in AGREE)
    partly = counts.get("direction only", 0)
    wrong = counts.get("not reproduced", 0)
    tested = agree + partly + wrong
    if not tested:
        return "None of them could be tested here."
    if agree == tested:
        whole = "The one" if tested == 1 else f"The {tested}"
        return f"{whole} that could be tested {_verb(tested, 'agrees', 'agree')}."
    parts = []
    if agree:
        parts.append(f"{agree} {_verb(agree, 'agrees', 'agree')}")
    if partly:
        names = _named(rows, "direction only")
        parts.append(f"{partly} {_verb(partly, 'agrees', 'agree')} in part ({names})")
    if wrong:
        names = _named(rows, "not reproduced")
        parts.append(f"{wrong} {_verb(wrong, 'does', 'do')} not ({names})")
    return f"Of {tested} that could be tested, {', '.join(parts)}."


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


def _named(rows: Sequence[Row], label: str) -> str:
    """The claims of one verdict: "batch-5x: 7.48× where 5× is published"."""
    named = [
        f"{row['id']}: {row['measured']} where {row['published']} is published"
        for row in rows
        if row["verdict"] == label
    ]
    return "; ".join(named)


def _open(counts: Mapping[str, int]) -> str:
    """Why the others could not be tested, the most frequent reason first."""
    reasons = [
        (NOT_COMPARABLE, "could be measured under other conditions only", ""),
        ("ill-defined", "gives no number or no baseline", "give no number or no baseline"),
        (
            "not measurable here",
            "needs hardware that is not here",
            "need hardware that is not here",
        ),
        ("too noisy", "was measured too coarsely", "were measured too coarsely"),
        ("not measured yet", "was not measured in any run", "were not measured in any run"),
        (
            "planned",
            "waits for a measurement that is still to be written",
            "wait for a measurement that is still to be written",
        ),
    ]
    reasons.sort(key=lambda reason: -counts.get(reason[0], 0))
    parts = []
    for label, singular, plural in reasons:
        number = counts.get(label, 0)
        if number:
            parts.append(f"{number} {_verb(number, singular, plural or singular)}")
    if not parts:
        return ""
    return f"Open: {'; '.join(parts)}."


def _listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{number} {label}" for label, number in counts.items()) or "none"


def _claims(number: int) -> str:
    return "1 claim" if number == 1 else f"{number} claims"


def _verb(number: int, singular: str, plural: str) -> str:
    return singular if number == 1 else plural
