"""Costs as a table for a notebook."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.transcription import TranscriptionCost, compare

TITLES = {
    "instance": "machine",
    "rtfx": "RTFx",
    "per": "of one",
    "batch": "batch",
    "RTFx is": "RTFx is",
    "usd_per_hour": "USD/h",
    "usd_per_million_hours": "USD for a million hours",
    "break_even_rtfx": "break-even RTFx",
    "kWh": "kWh",
}
RANGES = ["usd_per_hour", "rtfx", "usd_per_million_hours", "break_even_rtfx", "kWh"]


def cost_table(costs: Sequence[TranscriptionCost]) -> Any:
    """A pandas Styler: a row for each cost, the models in its caption.

    Args:
        costs: On the same terms.
    """
    rows = pd.DataFrame(compare(costs))
    rows[RANGES] = rows[RANGES].map(_range_text)
    rows["RTFx is"] = rows["origin"] + ", " + rows["device"]
    table = rows[[*TITLES]].rename(columns=TITLES).style.hide(axis="index")
    return table.set_caption(" ".join(rows["model"].unique()))


def _range_text(ends: Any) -> str:
    if not ends:
        return "–"
    return str(Range(*ends))
