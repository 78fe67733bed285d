"""What the page of claims shows: an answer a document, then each claim, then the appendix."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asrkit.workbench.claims import (
    DocumentAnswer,
    Row,
    count_verdicts,
    document_answers,
    headline,
    summary,
)
from asrkit.workbench.report.marks import MEANINGS, PLURALS, mark_of


def claims_context(rows: Sequence[Row]) -> dict[str, Any]:
    """Variables of the page's template.

    Args:
        rows: A row for each claim, as `columns.claim_rows` makes them.
    """
    answers = document_answers(rows)
    listed = headline(rows)
    appendix = [row for row in rows if row["appendix"]]
    groups = _by_document(listed, answers)
    return {
        "sentence": claims_sentence(rows),
        "summary": summary(rows),
        "answers": [(answer, _tally(answer.counts)) for answer in answers],
        "rows": listed,
        "groups": groups,
        "groups_of": {
            group["document"]: f"ledger-{number}" for number, group in enumerate(groups, 1)
        },
        "appendix": appendix,
        "appendix_groups": _by_document(appendix, answers),
        "counts": [*count_verdicts(listed).items()],
    }


def claims_sentence(rows: Sequence[Row]) -> str:
    """How many published claims agree, agree in part, disagree and are open, in one sentence.

    Args:
        rows: A row for each claim; those of the appendix are not counted.
    """
    main = headline(rows)
    parts = [text for _, text in _tally(count_verdicts(main))]
    return f"Of {len(main)} published claims, {', '.join(parts)}."


def _by_document(rows: Iterable[Row], answers: Iterable[DocumentAnswer]) -> list[dict[str, Any]]:
    """Rows in groups, one for each document that has some, in the order of the answers."""
    of_document = dict[str, list[Row]]()
    for row in rows:
        of_document.setdefault(str(row["document"]), []).append(row)
    return [
        {
            "document": answer.document,
            "title": answer.title,
            "url": answer.url,
            "rows": of_document[answer.document],
        }
        for answer in answers
        if answer.document in of_document
    ]


def _tally(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """(mark, text) of each mark that some verdicts have, as ("good", "3 agree")."""
    numbers = Counter[str]()
    for label, number in counts.items():
        numbers[mark_of(label)] += number
    tally = []
    for mark in MEANINGS:
        words = MEANINGS if numbers[mark] == 1 else PLURALS
        if numbers[mark]:
            tally.append((mark, f"{numbers[mark]} {words[mark]}"))
    return tally
