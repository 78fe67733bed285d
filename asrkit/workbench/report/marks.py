"""Marks of verdicts on a notebook's page, and the line that says what they mean."""

from bs4 import BeautifulSoup

from asrkit.workbench.claims import LEGEND

MARKS = {  # verdict -> mark; any other is "soft"
    "reproduced": "good",
    "arithmetic checked": "good",
    "direction only": "mild",
    "not reproduced": "bad",
}
SIGNS = {"good": "✓", "mild": "≈", "bad": "✗", "soft": "○"}
MEANINGS = {  # mark -> what it says of a published number
    "good": "agrees",
    "mild": "agrees in part",
    "bad": "disagrees",
    "soft": "not settled here",
}
PLURALS = {**MEANINGS, "good": "agree", "mild": "agree in part", "bad": "disagree"}


def mark_of(label: str) -> str:
    """The mark of a verdict: "good", "mild", "bad" or "soft"."""
    return MARKS.get(label, "soft")


def claim_link(name: str, label: str) -> str:
    """A small mark that leads to the claim's row, with the verdict as its accessible name.

    Args:
        name: Id of the claim.
        label: Its verdict.
    """
    mark = mark_of(label)
    title = f"Claim {name}: {label}"
    # Of several links to a claim, `tidy` keeps the first id.
    return (
        f'<a class="claim {mark}" href="ledger.html#{name}" id="claim-{name}" '
        f'title="{title}" aria-label="{title}">{SIGNS[mark]}</a>'
    )


def mark_verdicts(body: BeautifulSoup) -> int:
    """Give the verdicts in a page's tables their marks, and what they mean as a title.

    Args:
        body: The page.

    Returns:
        How many verdicts there are.
    """
    marked = 0
    for cell in body.find_all("td"):
        label = cell.get_text(strip=True)
        if label not in LEGEND:
            continue
        attributes = {"class": f"mark {mark_of(label)}", "title": LEGEND[label]}
        cell.clear()
        cell.append(body.new_tag("span", attrs=attributes, string=label))
        marked += 1
    return marked
