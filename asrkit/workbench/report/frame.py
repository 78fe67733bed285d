"""What every page of a report shares: templates, one style, one script and a strict policy."""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
from pygments.formatters import HtmlFormatter

from asrkit import files
from asrkit.workbench.claims import LEGEND
from asrkit.workbench.report.columns import filled_columns
from asrkit.workbench.report.marks import MEANINGS, SIGNS, mark_of

SITE_PAGES = {  # of every report, beside a page for each notebook
    "index": "Findings",
    "ledger": "Claims",
    "figures": "Figures",
    "records": "Measurements",
    "machine": "Machine and run",
}
TEMPLATES = Path(__file__).parent / "templates"
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; media-src data:"
# Styles of Pygments for light and dark; a test measures their contrast.
CODE_STYLES = ("default", "github-dark")


def write_page(path: Path, template: str, **context: Any) -> None:
    """Render a page.

    Args:
        path: The HTML file to write.
        template: Name of a file in templates/.
        **context: Variables of the template, beside those of `page_context`.
    """
    text = _environment().get_template(template).render(**page_context(), **context)
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a text file with Unix line ends, completely or not at all."""
    with files.atomic(path) as part:
        part.write_text(text, "utf-8", newline="\n")


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True
    )


@functools.cache
def page_context() -> dict[str, Any]:
    """Variables of every template: style, script, the policy for just these, legend, pages."""
    css = (TEMPLATES / "style.css").read_text("utf-8")
    light, dark = (_code_style(name) for name in CODE_STYLES)
    css += f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}"
    js = (TEMPLATES / "report.js").read_text("utf-8")
    policy = f"{POLICY}; style-src {_source_hash(css)}; script-src {_source_hash(js)}"
    return {
        "css": css,
        "js": js,
        "csp": policy,
        "mark_of": mark_of,
        "marks": [(mark, SIGNS[mark], meaning) for mark, meaning in MEANINGS.items()],
        "legend": LEGEND,
        "site_pages": [*SITE_PAGES.items()],
        "filled_columns": filled_columns,
    }


def _source_hash(text: str) -> str:
    """The hash by which a Content-Security-Policy names an inline style or script."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _code_style(name: str) -> str:
    """Colours of code, without backgrounds, from a style of Pygments."""
    lines = HtmlFormatter(style=name).get_style_defs(".highlight").splitlines()
    unused = (".highlight .hll", ".highlight .w ")
    kept = [
        line for line in lines if line.startswith(".highlight .") and not line.startswith(unused)
    ]
    return re.sub(r"background-color: [^;}]*;?", "", "\n".join(kept))
