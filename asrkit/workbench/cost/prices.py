"""Machines as they are rented, and their prices."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asrkit.shapes import expect, expect_types, whole
from asrkit.workbench.cost.csv_tables import Row, parse_day, read_table
from asrkit.workbench.cost.ranges import Range

MOST_UNITS = 10**9  # cores, GPUs, instances


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine as it is rented.

    `usd_per_hour` ranges over regions, from the cheapest to the dearest, with the price of the
    region listed first in the middle. `cores` are physical ones; 0 was not looked up. `prices` are
    the rows of the table.
    """

    name: str
    usd_per_hour: Range
    provider: str = ""
    processor: str = ""
    vcpus: int = 0
    cores: int = 0
    gpus: int = 0
    gpu: str = ""
    prices: Sequence[Row] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        expect_types(self)
        expect(self.usd_per_hour.low > 0, "price", "above 0", self.usd_per_hour)
        for name in ("vcpus", "cores", "gpus"):
            number = getattr(self, name)
            expect(whole(number, 0, MOST_UNITS), name, f"0 to {MOST_UNITS:,}", number)

    @property
    def per(self) -> str:
        """The unit that transcribes: "gpu" where there is one, else "core"."""
        if self.gpus:
            return "gpu"
        return "core"

    def units(self, per: str) -> int:
        """The number of cores ("core") or GPUs ("gpu"); ValueError where there are none."""
        number = self.cores
        if per == "gpu":
            number = self.gpus
        expect(
            number > 0,
            "per",
            f"what {self.name} has",
            f"{per}, of which it has {number or 'no known number'}",
        )
        return number


def load_prices(path: str | Path | None = None, *, on: str = "9999-12-31") -> dict[str, Instance]:
    """Instances by name, at the newest price of each region on a day.

    Args:
        path: a table like prices.csv; by default the one that comes with asrkit.
        on: the day, YYYY-MM-DD; later prices are ignored. By default the newest prices.
    """
    day = parse_day(on, "on")
    offers = sorted(read_table(path or "prices.csv", _parse_offer), key=lambda offer: offer.day)
    by_name: dict[str, dict[str, _Offer]] = {}
    for offer in offers:
        if offer.day <= day:  # a newer price of a region takes the place of the older one
            by_name.setdefault(offer.instance.name, {})[offer.region] = offer
    instances = {}
    for name, by_region in by_name.items():
        regions = [offer.instance for offer in by_region.values()]
        usd = [instance.usd_per_hour.middle for instance in regions]
        instances[name] = replace(
            regions[0],
            usd_per_hour=Range(min(usd), usd[0], max(usd)),
            prices=tuple(row for instance in regions for row in instance.prices),
        )
    return instances


@dataclass(frozen=True)
class _Offer:
    """A row of prices.csv: an instance at the price of one region since one day."""

    day: str
    region: str
    instance: Instance


def _parse_offer(row: Row) -> _Offer:
    instance = Instance(
        vcpus=int(row["vcpus"] or 0),
        cores=int(row["cores"] or 0),
        gpus=int(row["gpus"] or 0),
        provider=row["provider"],
        processor=row["processor"],
        gpu=row["gpu"],
        name=row["instance"],
        usd_per_hour=Range.of(float(row["usd_per_hour"]), "usd_per_hour"),
        prices=(row,),
    )
    return _Offer(parse_day(row["date"], "date"), row["region"], instance)
