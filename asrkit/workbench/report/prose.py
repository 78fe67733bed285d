"""Markdown of a notebook: formulas as MathML, and tags of claims as links to the ledger."""

import re
from collections.abc import Mapping
from html import escape

from latex2mathml.converter import convert

from asrkit.workbench.report.marks import claim_link

BROKEN_FORMULA = "no-tex"  # class of the code that shows a formula as it was typed
# Code comes first, so that a dollar or a comment inside it is never seen.
PATTERN = re.compile(
    r"(?s)(?P<code>(?P<fence>```|~~~).*?(?P=fence)|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|<!--\s*(?P<claim>[\w.-]+?)\s*-->|(?P<comment><!--.*?-->)"
    r"|(?<!\\)\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<line>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
)


def prose(
    markdown: str, verdicts: Mapping[str, str] | None = None, named: list[str] | None = None
) -> str:
    """Markdown with `$…$` and `$$…$$` as MathML and tags of claims as links, both outside code.

    Browsers draw MathML without a script. Prices like $5 stay text; other comments are removed.

    Args:
        markdown: Source of a cell.
        verdicts: Claim id -> label. A tag `<!-- claim-id -->` of any other name is removed.
        named: Gets the names of all tags, known or not, in their order.
    """
    known = verdicts or {}

    def replacement(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        if match["comment"]:
            return ""
        if match["claim"]:
            if named is not None:
                named.append(match["claim"])
            if match["claim"] in known:
                return claim_link(match["claim"], known[match["claim"]])
            return ""
        return _formula(match)

    return PATTERN.sub(replacement, markdown)


def _formula(match: re.Match[str]) -> str:
    try:
        if match["block"]:
            return convert(match["block"].strip(), display="block")
        return convert(match["line"].strip(), display="inline")
    except Exception:  # latex2mathml has no common base; one bad formula must not cost the report
        return f'<code class="{BROKEN_FORMULA}">{escape(match[0])}</code>'
