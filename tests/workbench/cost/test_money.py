"""Money by hand, by closed form, and at the ends of what is not known."""

import csv
import re
from dataclasses import replace
from datetime import date
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit import files
from asrkit.workbench import records
from asrkit.workbench.cost import money
from asrkit.workbench.cost.money import Instance, Range, Speed, transcription_cost
from asrkit.workbench.machine import GPU_FIELDS

PRICES, SPEEDS = money.load_prices(), money.published_speeds()
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


def by_hand(usd, rtfx, units, hours, used, startup_s, instances):
    return usd * (hours / (rtfx * units * used) + instances * startup_s / 3600)


positive = st.floats(0.01, 1000)
ranges = st.tuples(positive, positive, positive).map(lambda ends: Range(*sorted(ends)))
shares = st.tuples(*[st.floats(0.01, 1)] * 3).map(lambda ends: Range(*sorted(ends)))


@settings(max_examples=60, deadline=None)
@given(usd=ranges, rtfx=ranges, used=shares, startup=ranges, data=st.data())
def test_every_combination_lies_within_the_range_and_two_of_them_are_its_ends(
    usd, rtfx, used, startup, data
):
    given_speed = Speed(rtfx=rtfx, per="core", origin="assumed")
    terms = {"hours": 500, "utilisation": used, "startup_s": startup, "instances": 3}
    found = transcription_cost(machine(usd, 7), given_speed, **terms).usd
    combinations = product(usd.ends, rtfx.ends, used.ends, startup.ends)
    all_ends = [by_hand(a, b, 7, 500, c, d, 3) for a, b, c, d in combinations]
    assert found.low == pytest.approx(min(all_ends))
    assert found.high == pytest.approx(max(all_ends))
    inside = [
        data.draw(st.floats(one.low, one.high)) for one in (usd, rtfx, used, startup)
    ]
    usd_inside = by_hand(inside[0], inside[1], 7, 500, inside[2], inside[3], 3)
    assert found.low * (1 - 1e-9) <= usd_inside <= found.high * (1 + 1e-9)
    middle = by_hand(usd.middle, rtfx.middle, 7, 500, used.middle, startup.middle, 3)
    assert found.middle == pytest.approx(middle)


def test_startup_adds_to_the_hours_of_work():
    terms = {"startup_s": 1800, "instances": 4}
    found = transcription_cost(machine(), speed(), hours=1000, **terms)
    assert found.compute.middle == pytest.approx(40)
    assert found.startup.middle == pytest.approx(4)
    assert found.usd_per_million_hours.middle == pytest.approx(44_000)


def test_document_000_by_hand():
    then = money.load_prices(on="2024-09-24")
    cores = transcription_cost(then["c7a.48xlarge"], CORE)
    gpus = transcription_cost(then["p4de.24xlarge"], BOARD)
    assert cores.usd.middle == pytest.approx(
        1_000_000 / (4.5 * 192) * 9.85344
    )  # 11,404
    assert gpus.usd.middle == pytest.approx(
        1_000_000 / (2053.15 * 8) * 40.96575
    )  # 2,494
    assert cores.kWh.middle == pytest.approx(1e6 / 4.5 * 290 / 48 / 1000)
    assert gpus.kWh.middle == pytest.approx(1e6 / 2053.15 * 0.4)


def test_at_the_break_even_rtfx_both_cost_the_same():
    a = transcription_cost(machine(3.0, 7), speed(2), utilisation=0.8)
    b = transcription_cost(machine(40.0, 0, gpus=8), speed(900, "gpu"))
    even = money.break_even_rtfx(a, b).middle
    again = transcription_cost(a.instance, speed(even), utilisation=0.8)
    assert again.usd.middle == pytest.approx(b.usd.middle)


def test_only_costs_of_one_model_are_set_against_each_other():
    cores = transcription_cost(PRICES["c7a.48xlarge"], CORE)
    gpus, small = (
        transcription_cost(PRICES["p4de.24xlarge"], replace(BOARD, **changed))
        for changed in ({}, {"model": "small"})
    )
    rows = money.compare([cores, small, gpus])
    even = {(row["model"], row["per"]): row["break_even_rtfx"] for row in rows}
    assert even["parakeet_rnnt_1_1b", "core"] == money.break_even_rtfx(cores, gpus).ends
    assert even["small", "gpu"] is None


def test_what_is_taken_for_granted_is_said():
    said = transcription_cost(PRICES["c7a.48xlarge"], CORE).caveats
    assert said[:2] == [
        "RTFx of AMD EPYC 9454, price of AMD EPYC 9R14",
        "linear over 192 cores",
    ]
    threads = transcription_cost(PRICES["c7i.48xlarge"], speed()).caveats
    assert "96 cores are sold as 192 vCPUs" in threads[0]
    assert transcription_cost(machine(units=1), speed()).caveats == []
    assert money.unequal(CORE, CORE) == []
    assert "batch size: 1 against 128" in money.unequal(CORE, BOARD)


def rows_of(name):
    with files.shipped(name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_price_speed_and_power_has_a_source_and_a_day():
    for name in ("prices.csv", "rtfx.csv", "power.csv"):
        for row in rows_of(name):
            assert None not in row and None not in row.values(), row
            assert row["source"].startswith("https://"), row
            pinned = "/issues/" in row["source"] or re.search(
                r"/blob/[0-9a-f]{40}/", row["source"]
            )
            assert "github.com" not in row["source"] or pinned, row
            if name != "power.csv":
                assert (
                    date(2024, 1, 1) <= date.fromisoformat(row["date"]) and row["note"]
                )
            assert float(row.get("usd_per_hour") or row.get("rtfx") or row["watts"]) > 0


def test_no_price_stands_twice_and_the_rows_of_an_instance_agree_on_its_cores():
    rows = rows_of("prices.csv")
    assert len({(row["instance"], row["region"], row["date"]) for row in rows}) == len(
        rows
    )
    assert len({(row["instance"], row["cores"], row["gpus"]) for row in rows}) == len(
        PRICES
    )


def test_prices_are_those_of_the_day_and_range_over_regions():
    then = money.load_prices(on="2024-09-24")
    assert then["p4de.24xlarge"].usd_per_hour == Range.of(40.96575)
    assert PRICES["p4de.24xlarge"].usd_per_hour == Range.of(27.44705)
    assert PRICES["c7a.48xlarge"].usd_per_hour == Range(9.85344, 9.85344, 12.4032)
    assert len(PRICES["c7a.48xlarge"].prices) == 3
    assert not money.load_prices(on="2024-09-20")


def test_a_speed_fits_its_gpu_and_the_cores_of_its_maker():
    def rtfx(name, **model):
        return [
            one.rtfx.middle for one in money.speeds_for(PRICES[name], SPEEDS, **model)
        ]

    assert rtfx("p4de.24xlarge") == [2053.15, 638.7]
    assert rtfx("c7a.48xlarge") == [4.5]
    assert rtfx("c7i.48xlarge") == rtfx("g6.xlarge") == []
    assert rtfx("p4de.24xlarge", model="parakeet_ctc_1_1b") == [2728.52]
    assert rtfx("hf-h200") == [6098.2]  # of another model, for want of the asked one


def record(
    at, impl="bfloat16", values=(3.0, 4.0, 5.0), what="recogniser-one-core", **params
):
    params = {"preset": "parakeet_rnnt_1_1b", "audio_s": 16} | params
    value = (what, "rtfx", "s/s", values[1])
    made = records.Measurement(
        *value, samples=values, params=params, impl=impl
    ).record()
    gpu = dict.fromkeys(GPU_FIELDS, "") | {"name": "NVIDIA H200"}
    other = {"id": "0123456789ab", "cpu_model": "AMD EPYC", "gpus": [gpu]}
    return made | {"captured_at": at, "machine": made["machine"] | other}


def test_the_newest_records_count_and_of_a_ladder_on_a_gpu_the_fastest_rung(tmp_path):
    old, new = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
    rung = {"what": "ladder-rnnt", "device": "cuda:0", "batch": 64}
    lines = [
        record(new, values=(7.0, 8.0, 9.0)),
        record(old),
        record(old, impl="float32", values=(1.0, 2.0, 3.0)),
        record(new, preset="tiny"),
        record(old, "to_graphs", [900.0] * 3, **rung),
        record(new, "to_graphs", [800.0] * 3, **rung),
        record(old, "to_half", [700.0] * 3, **rung),
        record(old, "to_all", [5e3] * 3, what="ladder-rnnt", device="cpu"),
    ]
    records.append(tmp_path / "a.jsonl", *lines)
    found = money.recorded_speeds(tmp_path)
    assert [
        (one.per, one.rtfx) for one in sorted(found, key=lambda one: one.rtfx.middle)
    ] == [
        ("core", Range(1.5, 2, 2.5)),
        ("core", Range(7.5, 8, 8.5)),
        ("gpu", Range.of(800.0)),
    ]
    on_gpu = [one for one in found if one.per == "gpu"]
    assert money.speeds_for(PRICES["p5en.48xlarge"], found) == on_gpu
    assert not money.speeds_for(PRICES["p5.48xlarge"], found)


def test_what_is_taken_for_an_input_that_is_not_stated_is_what_the_tables_hold():
    taken = {row["input"]: row["taken"] for row in money.read_table("cost_inputs.csv")}
    assert taken["RTFx of the GPU"].startswith(str(BOARD.rtfx.middle))
    assert PRICES["c7a.48xlarge"].processor in taken["CPU of that instance"]


@pytest.mark.parametrize("driver, instance, watts", [
    ("NVIDIA A100-SXM4-80GB", "p4de.24xlarge", 400), ("NVIDIA H100 80GB HBM3", "p5.48xlarge", 700), ("NVIDIA H200", "hf-h200", 700),
    ("NVIDIA A100-SXM4-40GB", None, None), ("NVIDIA A100 80GB PCIe", None, None), ("NVIDIA H200 NVL", None, None),
    ("NVIDIA H200 MIG 1g.18gb", None, None), ("NVIDIA L40S", None, None), ("", None, None),
    ("AMD EPYC 9454 48-Core Processor", None, 290 / 48), ("AMD EPYC 9R14", None, None),
])  # fmt: skip
def test_a_device_is_known_by_what_its_driver_calls_it(driver, instance, watts):
    found = [
        name
        for name, one in PRICES.items()
        if one.gpus and money.speeds_for(one, [replace(BOARD, device=driver)])
    ]
    assert (instance in found) == bool(instance) == bool(found) and money.power(
        driver
    ) == watts


def test_a_range_is_its_middle_and_its_ends_or_one_number():
    shown = [
        str(one) for one in (Range(1, 2, 4), Range(1000, 2000, 30_000.4), Range.of(4.5))
    ]
    assert shown == ["2 (1–4)", "2,000 (1,000–30,000)", "4.5"]


@pytest.mark.parametrize("wrong, named", [
    (lambda: Range(2, 1, 3), "range: expected 0 <= lowest"), (lambda: Range(0, 1, float("nan")), "range: expected 0 <= lowest"),
    (lambda: transcription_cost(machine(), speed(), instances=1.5), "instances: expected"),
])  # fmt: skip
def test_nonsense_is_refused_by_name(wrong, named):
    with pytest.raises(ValueError, match=f"^{re.escape(named)}"):
        wrong()
