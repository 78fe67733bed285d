"""Costs computed by hand, by closed forms, and at the ends of ranges."""

import re
from dataclasses import replace
from datetime import date
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.workbench import records
from asrkit.workbench.cost import money, rtfx
from asrkit.workbench.cost.money import Instance, transcription_cost
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.rtfx import Speed
from asrkit.workbench.machine import GPU_FIELDS
from asrkit.workbench.tables import read_table

PRICES = money.load_prices()
SPEEDS = rtfx.published_speeds()
BOARD = next(
    speed
    for speed in SPEEDS
    if speed.per == "gpu" and speed.model == "parakeet_rnnt_1_1b" and speed.batch == 128
)
CORE = next(speed for speed in SPEEDS if speed.per == "core")


def machine(usd=2.0, units=10, **other):
    return Instance(name="mine", usd_per_hour=Range.of(usd), **{"cores": units} | other)


def speed(rtfx=5.0, per="core"):
    return Speed(rtfx=Range.of(rtfx), per=per, origin="assumed")


positive = st.floats(0.01, 1000)
ranges = st.tuples(positive, positive, positive).map(lambda ends: Range(*sorted(ends)))
shares = st.tuples(*[st.floats(0.01, 1)] * 3).map(lambda ends: Range(*sorted(ends)))


@given(usd=ranges, rtfx=ranges, used=shares, startup=ranges)
def test_the_ends_are_those_of_the_cheapest_and_the_dearest_combination(
    usd, rtfx, used, startup
):
    given_speed = Speed(rtfx=rtfx, per="core", origin="assumed")
    terms = {"hours": 500, "utilisation": used, "startup_s": startup, "instances": 3}
    found = transcription_cost(machine(usd, 7), given_speed, **terms).usd

    def by_hand(usd, rtfx, used, startup_s):
        return usd * (500 / (rtfx * 7 * used) + 3 * startup_s / 3600)

    ranges = (usd, rtfx, used, startup)
    costs = [by_hand(*ends) for ends in product(*(one.ends for one in ranges))]
    middle = by_hand(*(one.middle for one in ranges))
    assert found.ends == pytest.approx([min(costs), middle, max(costs)])


def test_document_000_by_hand():
    then = money.load_prices(on="2024-09-24")
    cores = transcription_cost(then["c7a.48xlarge"], CORE)
    gpus = transcription_cost(then["p4de.24xlarge"], BOARD)
    assert cores.usd.middle == pytest.approx(1e6 / (4.5 * 192) * 9.85344)  # 11,404
    assert gpus.usd.middle == pytest.approx(1e6 / (2053.15 * 8) * 40.96575)  # 2,494
    assert cores.kWh.middle == pytest.approx(1e6 / 4.5 * 290 / 48 / 1000)
    assert gpus.kWh.middle == pytest.approx(1e6 / 2053.15 * 0.4)


def test_at_the_break_even_rtfx_both_cost_the_same():
    a = transcription_cost(machine(3.0, 7), speed(2), utilisation=0.8)
    b = transcription_cost(machine(40.0, 0, gpus=8), speed(900, "gpu"))
    even = money.break_even_rtfx(a, b).middle
    again = transcription_cost(a.instance, speed(even), utilisation=0.8)
    assert again.usd.middle == pytest.approx(b.usd.middle)


def test_only_costs_of_one_model_are_compared():
    cores = transcription_cost(PRICES["c7a.48xlarge"], CORE)
    gpus = transcription_cost(PRICES["p4de.24xlarge"], BOARD)
    small = transcription_cost(PRICES["p4de.24xlarge"], replace(BOARD, model="small"))
    rows = money.compare([cores, small, gpus])
    even = {(row["model"], row["per"]): row["break_even_rtfx"] for row in rows}
    assert even["parakeet_rnnt_1_1b", "core"] == money.break_even_rtfx(cores, gpus).ends
    assert even["small", "gpu"] is None


def test_caveats_list_what_is_assumed():
    caveats = transcription_cost(PRICES["c7a.48xlarge"], CORE).caveats
    other = "RTFx of AMD EPYC 9454, price of AMD EPYC 9R14"
    assert caveats[:2] == [other, "linear over 192 cores"]
    (threads, *_) = transcription_cost(PRICES["c7i.48xlarge"], speed()).caveats
    assert "96 cores are sold as 192 vCPUs" in threads
    assert "batch size: 1 against 128" in rtfx.unequal(CORE, BOARD)


@pytest.mark.parametrize("name, value", [
    ("prices.csv", "usd_per_hour"),
    ("rtfx.csv", "rtfx"),
    ("power.csv", "watts"),
])  # fmt: skip
def test_every_price_speed_and_power_has_a_source_and_a_day(name, value):
    for row in read_table(name):
        assert None not in row
        assert None not in row.values()
        source = row["source"]
        assert source.startswith("https://")
        pinned = re.search(r"/issues/|/blob/[0-9a-f]{40}/", source)
        assert pinned or "github.com" not in source, source
        assert float(row[value]) > 0
        if name != "power.csv":
            assert date.fromisoformat(row["date"]) >= date(2024, 1, 1)
            assert row["note"]


def test_no_price_is_listed_twice_and_the_rows_of_an_instance_agree_on_its_cores():
    rows = read_table("prices.csv")
    priced = {(row["instance"], row["region"], row["date"]) for row in rows}
    assert len(priced) == len(rows)
    sized = {(row["instance"], row["cores"], row["gpus"]) for row in rows}
    assert len(sized) == len(PRICES)


def test_prices_are_those_of_the_day_and_range_over_regions():
    then = money.load_prices(on="2024-09-24")
    assert then["p4de.24xlarge"].usd_per_hour == Range.of(40.96575)
    assert PRICES["p4de.24xlarge"].usd_per_hour == Range.of(27.44705)
    assert PRICES["c7a.48xlarge"].usd_per_hour == Range(9.85344, 9.85344, 12.4032)
    assert len(PRICES["c7a.48xlarge"].prices) == 3
    assert not money.load_prices(on="2024-09-20")


@pytest.mark.parametrize("name, model, rtfx", [
    ("p4de.24xlarge", money.DEFAULT_MODEL, [2053.15, 638.7]),
    ("c7a.48xlarge", money.DEFAULT_MODEL, [4.5]),
    ("c7i.48xlarge", money.DEFAULT_MODEL, []),
    ("p4de.24xlarge", "parakeet_ctc_1_1b", [2728.52]),
    ("hf-h200", money.DEFAULT_MODEL, [6098.2]),  # of another model, for want of this one
])  # fmt: skip
def test_a_speed_fits_its_gpu_and_the_cores_of_its_maker(name, model, rtfx):
    found = money.speeds_for(PRICES[name], SPEEDS, model=model)
    assert [one.rtfx.middle for one in found] == rtfx


def record(at, impl="bfloat16", rtfx=4.0, what="recogniser-one-core", **params):
    params = {"preset": "parakeet_rnnt_1_1b", "audio_s": 16} | params
    samples = (rtfx - 1, rtfx, rtfx + 1)
    made = records.Measurement(
        what, "rtfx", "s/s", rtfx, samples=samples, params=params, impl=impl
    ).record()
    gpu = dict.fromkeys(GPU_FIELDS, "") | {"name": "NVIDIA H200"}
    other = {"id": "0123456789ab", "cpu_model": "AMD EPYC", "gpus": [gpu]}
    return made | {"captured_at": at, "machine": made["machine"] | other}


def test_the_newest_records_count_and_of_a_ladder_on_a_gpu_the_fastest_rung(tmp_path):
    old = "2026-01-01T00:00:00Z"
    new = "2026-02-01T00:00:00Z"
    rung = {"what": "ladder-rnnt", "device": "cuda:0", "batch": 64}
    records.append(
        tmp_path / "a.jsonl",
        record(new, rtfx=8.0),
        record(old),
        record(old, "float32", 2.0),
        record(new, preset="tiny"),
        record(old, "to_graphs", 900.0, **rung),
        record(new, "to_graphs", 800.0, **rung),
        record(old, "to_half", 700.0, **rung),
        record(old, "to_all", 5e3, what="ladder-rnnt", device="cpu"),
    )
    found = rtfx.recorded_speeds(tmp_path)
    on_gpu = [one for one in found if one.per == "gpu"]
    assert [one.rtfx.middle for one in on_gpu] == [800.0]
    on_core = sorted(one.rtfx.ends for one in found if one.per == "core")
    assert on_core == [[1.5, 2, 2.5], [7.5, 8, 8.5]]
    assert money.speeds_for(PRICES["p5en.48xlarge"], found) == on_gpu
    assert not money.speeds_for(PRICES["p5.48xlarge"], found)


@pytest.mark.parametrize("driver, instances, watts", [
    ("NVIDIA A100-SXM4-80GB", {"p4de.24xlarge"}, 400),
    ("NVIDIA H100 80GB HBM3", {"p5.48xlarge"}, 700),
    ("NVIDIA A100 80GB PCIe", set(), None),
    ("NVIDIA H200 NVL", set(), None),
    ("NVIDIA H200 MIG 1g.18gb", set(), None),
    ("", set(), None),
    ("AMD EPYC 9454 48-Core Processor", set(), 290 / 48),
    ("AMD EPYC 9R14", set(), None),
])  # fmt: skip
def test_a_device_is_known_by_what_its_driver_calls_it(driver, instances, watts):
    speeds = [replace(BOARD, device=driver)]
    of_gpus = {name: one for name, one in PRICES.items() if one.gpus}
    found = {name for name, one in of_gpus.items() if money.speeds_for(one, speeds)}
    assert instances <= found
    assert bool(instances) == bool(found)
    assert money.power(driver) == watts


def test_a_range_is_its_middle_and_its_ends_or_one_number():
    ranges = Range(1, 2, 4), Range(1000, 2000, 30_000.4), Range.of(4.5)
    assert [*map(str, ranges)] == ["2 (1–4)", "2,000 (1,000–30,000)", "4.5"]


def test_nonsense_is_refused_by_name():
    for ends in [(2, 1, 3), (0, 1, float("nan"))]:
        with pytest.raises(ValueError, match="^range: expected 0 <= lowest"):
            Range(*ends)
