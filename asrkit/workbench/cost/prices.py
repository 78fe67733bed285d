"""Machines as they are rented, and their prices."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

from asrkit.shapes import expect
from asrkit.workbench.cost.csv_tables import Row, read_table
from asrkit.workbench.cost.ranges import Range


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine as it is rented.

    `usd_per_hour` ranges over regions, from the cheapest to the dearest, with the price of the
    region listed first in the middle. `cores` are physical ones; 0 was not looked up. `prices` are
    the rows of the table.
    """

    name: str
    usd_per_hour: Range
    processor: str = ""
    vcpus: int = 0
    cores: int = 0
    gpus: int = 0
    gpu: str = ""
    prices: Sequence[Row] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        expect(self.usd_per_hour.low > 0, "price", "above 0", self.usd_per_hour)

    @property
    def per(self) -> str:
        """The unit that transcribes: "gpu" where there is one, else "core"."""
        if self.gpus:
            return "gpu"
        return "core"

    def units(self, per: str) -> int:
        """The number of cores ("core") or GPUs ("gpu"); ValueError where there are none."""
        number = {"core": self.cores, "gpu": self.gpus}[per]
        expect(number > 0, "per", f"what {self.name} has", per)
        return number


def load_prices(*, on: str = "9999-12-31") -> dict[str, Instance]:
    """Instances by name, at the newest price of each region on a day.

    Args:
        on: the day, YYYY-MM-DD; later prices are ignored. By default the newest prices.
    """
    try:
        day = datetime.date.fromisoformat(on).isoformat()
    except ValueError:
        raise ValueError(f"on: expected a day such as 2024-09-24, got {on!r}.") from None
    newest: dict[str, dict[str, Row]] = {}  # by name and region
    for row in sorted(read_table("prices.csv"), key=lambda row: row["date"]):
        if row["date"] <= day:
            newest.setdefault(row["instance"], {})[row["region"]] = row
    return {name: _instance([*by_region.values()]) for name, by_region in newest.items()}


def _instance(rows: Sequence[Row]) -> Instance:
    """The instance that all `rows` are prices of, a region each."""
    first = rows[0]
    usd = [float(row["usd_per_hour"]) for row in rows]
    return Instance(
        name=first["instance"],
        usd_per_hour=Range(min(usd), usd[0], max(usd)),
        processor=first["processor"],
        vcpus=int(first["vcpus"] or 0),
        cores=int(first["cores"] or 0),
        gpus=int(first["gpus"] or 0),
        gpu=first["gpu"],
        prices=rows,
    )
