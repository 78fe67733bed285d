"""Money by hand, by closed form, and at the ends of what is not known."""

import csv
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit import files
from asrkit.workbench import cost, records
from asrkit.workbench.cost import Instance, Range, Speed, transcription_cost
from asrkit.workbench.cost.table import cost_table
from asrkit.workbench.machine import GPU_FIELDS

PRICES, SPEEDS = cost.load_prices(), cost.published_speeds()
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
@given(
    usd=ranges,
    rtfx=ranges,
    used=shares,
    startup=ranges,
    instances=st.integers(1, 9),
    units=st.integers(1, 200),
    data=st.data(),
)
def test_every_combination_lies_within_the_range_and_two_of_them_are_its_ends(
    usd, rtfx, used, startup, instances, units, data
):
    kind = machine(usd, units)
    found = transcription_cost(
        kind,
        Speed(rtfx=rtfx, per="core", origin="assumed"),
        hours=500,
        utilisation=used,
        startup_s=startup,
        instances=instances,
    )
    combinations = product(usd.ends, rtfx.ends, used.ends, startup.ends)
    all_ends = [by_hand(a, b, units, 500, c, d, instances) for a, b, c, d in combinations]
    assert found.usd.low == pytest.approx(min(all_ends)) and found.usd.high == pytest.approx(
        max(all_ends)
    )
    inside = [data.draw(st.floats(one.low, one.high)) for one in (usd, rtfx, used, startup)]
    usd_inside = by_hand(inside[0], inside[1], units, 500, inside[2], inside[3], instances)
    assert found.usd.low * (1 - 1e-9) <= usd_inside <= found.usd.high * (1 + 1e-9)
    middle = by_hand(usd.middle, rtfx.middle, units, 500, used.middle, startup.middle, instances)
    assert found.usd.middle == pytest.approx(middle)


@settings(max_examples=40, deadline=None)
@given(more=st.floats(1.01, 50))
def test_faster_and_fuller_is_cheaper_and_dearer_and_more_is_dearer(more):
    base = transcription_cost(
        machine(), speed(), hours=100, utilisation=0.5, startup_s=60
    ).usd.middle
    assert (
        transcription_cost(
            machine(), speed(5 * more), hours=100, utilisation=0.5, startup_s=60
        ).usd.middle
        < base
    )
    assert (
        transcription_cost(
            machine(), speed(), hours=100, utilisation=min(1, 0.5 * more), startup_s=60
        ).usd.middle
        < base
    )
    assert transcription_cost(
        machine(2 * more), speed(), hours=100, utilisation=0.5, startup_s=60
    ).usd.middle == pytest.approx(more * base)
    assert (
        transcription_cost(
            machine(), speed(), hours=100, utilisation=0.5, startup_s=60 * more
        ).usd.middle
        > base
    )
    assert (
        transcription_cost(
            machine(), speed(), hours=100 * more, utilisation=0.5, startup_s=60
        ).usd.middle
        > base
    )


def test_parts_add_up_and_each_is_what_its_words_say():
    terms = {
        "startup_s": 1800,
        "instances": 4,
        "GB_per_hour": 0.1,
        "storage_usd_per_GB_month": 0.02,
        "months": 3,
    }
    found = transcription_cost(machine(), speed(), hours=1000, egress_usd_per_GB=0.09, **terms)
    assert {name: part.middle for name, part in found.parts.items()} == pytest.approx(
        {"compute": 40, "startup": 4, "storage": 6, "egress": 9}
    )
    assert found.usd.middle == pytest.approx(59) and found.instance_hours.middle == pytest.approx(
        22
    )
    assert found.usd_per_million_hours.middle == pytest.approx(59_000)
    assert found.kWh is None  # nobody knows the power of "mine"


def test_document_000_by_hand():
    then = cost.load_prices(on="2024-09-24")
    cores = transcription_cost(then["c7a.48xlarge"], CORE)
    gpus = transcription_cost(then["p4de.24xlarge"], BOARD)
    assert cores.usd.middle == pytest.approx(1_000_000 / (4.5 * 192) * 9.85344)  # 11,404
    assert gpus.usd.middle == pytest.approx(1_000_000 / (2053.15 * 8) * 40.96575)  # 2,494
    assert cores.usd.middle / gpus.usd.middle == pytest.approx(4.573, abs=1e-3)
    now = transcription_cost(PRICES["p4de.24xlarge"], BOARD)
    assert cores.usd.middle / now.usd.middle == pytest.approx(6.825, abs=1e-3)
    assert cores.kWh.middle == pytest.approx(
        1e6 / 4.5 * 290 / 48 / 1000
    ) and gpus.kWh.middle == pytest.approx(1e6 / 2053.15 * 0.4)


def test_at_the_break_even_rtfx_both_cost_the_same():
    a = transcription_cost(
        machine(3.0, 7), speed(2), hours=1000, utilisation=0.8, startup_s=600, instances=3
    )
    b = transcription_cost(
        machine(40.0, 0, gpus=8), speed(900, "gpu"), hours=1000, startup_s=120, egress_usd_per_GB=1
    )
    even = cost.break_even_rtfx(a, b).middle
    again = transcription_cost(
        a.instance, speed(even), hours=1000, utilisation=0.8, startup_s=600, instances=3
    )
    assert again.usd.middle == pytest.approx(b.parts["compute"].middle + b.parts["startup"].middle)
    assert cost.break_even_rtfx(b, b).middle == pytest.approx(900)


def test_the_ends_of_break_even_are_the_best_and_the_worst_case_for_it():
    wide = {"utilisation": Range(0.4, 0.6, 0.9), "startup_s": Range(10, 60, 300)}
    a = transcription_cost(
        replace(machine(), usd_per_hour=Range(1, 2, 4)), speed(), hours=1000, **wide
    )
    faster = replace(speed(), rtfx=Range(4, 5, 9))
    b = transcription_cost(replace(machine(), usd_per_hour=Range(3, 5, 6)), faster, hours=1000)
    even = cost.break_even_rtfx(a, b)
    at = [
        cost.break_even_rtfx(
            transcription_cost(
                machine(usd), speed(), hours=1000, utilisation=used, startup_s=startup
            ),
            transcription_cost(machine(other_usd), speed(rtfx), hours=1000),
        ).middle
        for usd, used, startup, other_usd, rtfx in product(
            (1, 2, 4), (0.4, 0.6, 0.9), (10, 60, 300), (3, 5, 6), (4, 5, 9)
        )
    ]
    assert (
        even.low == pytest.approx(min(at))
        and even.high == pytest.approx(max(at))
        and even.low < even.middle < even.high
    )


def test_no_rtfx_is_enough_where_startup_alone_costs_more():
    a = transcription_cost(machine(), speed(), hours=1, startup_s=36_000)
    assert cost.break_even_rtfx(a, transcription_cost(machine(), speed(), hours=1)) is None


def test_the_input_that_moves_the_outcome_most_comes_first():
    found = cost.sensitivity(
        lambda a, b, c: a + 10 * b - 100 * c, a=Range(0, 1, 2), b=Range(0, 1, 2), c=Range(1, 1, 1.5)
    )
    assert list(found.items()) == [("c", (-89, -139)), ("b", (-99, -79)), ("a", (-90, -88))]


def test_a_row_breaks_even_against_the_other_unit_and_else_against_another_machine():
    kinds = [
        ("c7a.48xlarge", CORE),
        ("p4de.24xlarge", BOARD),
        ("p4de.24xlarge", replace(BOARD, rtfx=Range.of(100.0))),
    ]
    costs = [transcription_cost(PRICES[name], one) for name, one in kinds]
    rows = cost.compare(costs)
    assert [row["usd"][1] for row in rows] == sorted(one.usd.middle for one in costs)
    gpus = [row["break_even_rtfx"][1] for row in rows if row["per"] == "gpu"]
    assert gpus == pytest.approx([cost.break_even_rtfx(costs[1], costs[0]).middle] * 2)
    (cores,) = (row for row in rows if row["per"] == "core")
    assert cores["break_even_rtfx"][1] == pytest.approx(
        4.5 * costs[0].usd.middle / costs[1].usd.middle
    )
    assert cost.compare(costs[:1])[0]["break_even_rtfx"] is None
    (first, second) = cost.compare(
        [
            costs[1],
            transcription_cost(machine(1.0, 0, gpus=1), replace(BOARD, rtfx=Range.of(100.0))),
        ]
    )
    assert first["break_even_rtfx"][1] == pytest.approx(
        first["rtfx"][1] * first["usd"][1] / second["usd"][1]
    )


def test_only_costs_of_one_model_are_set_against_each_other():
    cores, gpus = (
        transcription_cost(PRICES["c7a.48xlarge"], CORE),
        transcription_cost(PRICES["p4de.24xlarge"], BOARD),
    )
    faster = transcription_cost(
        PRICES["p4de.24xlarge"], replace(BOARD, model="small", rtfx=Range.of(9000.0))
    )
    rows = {
        (row["model"], row["per"]): row["break_even_rtfx"]
        for row in cost.compare([cores, faster, gpus])
    }
    assert (
        rows["parakeet_rnnt_1_1b", "core"] == cost.break_even_rtfx(cores, gpus).ends
        and rows["small", "gpu"] is None
    )
    assert (
        cost.cheapest_pair([cores, faster, gpus]) == (cores, gpus)
        and cost.cheapest_pair([cores, faster]) is None
    )
    small = transcription_cost(PRICES["c7a.48xlarge"], replace(CORE, model="small"))
    assert (
        cost.cheapest_pair([small, cores, faster])
        == (small, faster)
        == cost.cheapest_pair([small, cores, faster, gpus], model="small")
    )


def test_what_is_taken_for_granted_is_said():
    said = " | ".join(transcription_cost(PRICES["c7a.48xlarge"], CORE).caveats)
    assert (
        "RTFx of AMD EPYC 9454, price of AMD EPYC 9R14" in said
        and "linear over 192 cores" in said
        and "vCPUs" not in said
    )
    assert "96 cores are sold as 192 vCPUs" in " ".join(
        transcription_cost(PRICES["c7i.48xlarge"], speed()).caveats
    )
    assert transcription_cost(machine(units=1), speed()).caveats == []
    assert cost.unequal(CORE, CORE) == []
    assert "batch size: 1 against 128" in cost.unequal(CORE, BOARD)


def rows_of(name):
    with files.shipped(name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_price_speed_and_power_has_a_source_and_a_day():
    for name in ("prices.csv", "rtfx.csv", "power.csv"):
        for row in rows_of(name):
            assert None not in row and None not in row.values(), row
            assert row["source"].startswith("https://"), row
            assert (
                "github.com" not in row["source"]
                or "/issues/" in row["source"]
                or re.search(r"/blob/[0-9a-f]{40}/", row["source"])
            )
            if name != "power.csv":
                assert date(2024, 1, 1) <= date.fromisoformat(row["date"]) and row["note"]
            assert float(row.get("usd_per_hour") or row.get("rtfx") or row["watts"]) > 0


def test_the_rows_of_an_instance_agree_on_the_machine_and_no_price_stands_twice():
    rows, fixed = (
        rows_of("prices.csv"),
        ("provider", "processor", "vcpus", "cores", "gpus", "gpu", "processor_source"),
    )
    assert len({(row["instance"], row["region"], row["date"]) for row in rows}) == len(rows)
    for name in {row["instance"] for row in rows}:
        assert (
            len({tuple(row[key] for key in fixed) for row in rows if row["instance"] == name}) == 1
        ), name
    for row in rows:
        assert bool(row["gpu"]) == bool(int(row["gpus"])) and bool(row["processor"]) == bool(
            row["processor_source"]
        )
        assert int(row["cores"] or 0) in (0, int(row["vcpus"]), int(row["vcpus"]) // 2)
    assert (PRICES["c7a.48xlarge"].cores, PRICES["c7i.48xlarge"].cores) == (
        192,
        96,
    )  # of 192 vCPUs each


def test_prices_are_those_of_the_day_and_range_over_regions():
    then, now = cost.load_prices(on="2024-09-24"), PRICES
    assert then["p4de.24xlarge"].usd_per_hour == Range.of(40.96575) and now[
        "p4de.24xlarge"
    ].usd_per_hour == Range.of(27.44705)
    assert now["c7a.48xlarge"].usd_per_hour == Range(9.85344, 9.85344, 12.4032)
    assert {row["region"] for row in now["c7a.48xlarge"].prices} == {
        "us-east-1",
        "eu-central-1",
        "ap-northeast-1",
    }
    assert (
        "p5en.48xlarge" in now
        and "p5en.48xlarge" not in then
        and not cost.load_prices(on="2024-09-20")
    )


OTHER = "0123456789ab"  # a machine
HEAD = "instance,provider,processor,vcpus,cores,gpus,gpu,usd_per_hour,region,date"


@pytest.mark.parametrize("row, why", [
    ("x,A,P,2,2,0,,abc,r,2024-01-01", "could not convert"), ("x,A,P,2,2,0,,nan,r,2024-01-01", "usd_per_hour: expected"),
    ("x,A,P,2,-2,0,,1,r,2024-01-01", "cores: expected 0"), ("x,A,P,2.5,2,0,,1,r,2024-01-01", "invalid literal"),
    ("x,A,P", "row: expected 10 cells"), ("x,A,P,2,2,0,,1,r,2024-01-01,more", "row: expected 10 cells"),
    ("x,A,P,2,2,0,,1,r,tomorrow", "date: expected a day"), ("x,A,P,2,2,0,,0,r,2024-01-01", "price: expected above 0"),
])  # fmt: skip
def test_a_bad_row_of_prices_is_told_with_file_and_line(tmp_path, row, why):
    good = "x,A,P,2,2,0,,1.5,q,2024-01-01"
    table = tmp_path / "mine.csv"
    table.write_text(f"{HEAD}\n{good}\n{row}\n")
    with pytest.raises(ValueError, match=f"^mine.csv:3: {why}"):
        cost.load_prices(table)
    table.write_text(f"\ufeff{HEAD}\n{good}\n", "utf-8")  # as spreadsheets save it
    assert cost.load_prices(table)["x"].cores == 2
    table.write_text("instance,date\nx,2024-01-01\n")
    with pytest.raises(ValueError, match="^mine.csv:2: expected a column 'vcpus'"):
        cost.load_prices(table)


def test_a_speed_fits_its_gpu_and_the_cores_of_its_maker():
    assert {one.device for one in cost.speeds_for(PRICES["p4de.24xlarge"], SPEEDS)} == {
        "NVIDIA A100 80GB"
    }
    assert [one.rtfx.middle for one in cost.speeds_for(PRICES["c7a.48xlarge"], SPEEDS)] == [4.5]
    assert (
        cost.speeds_for(PRICES["c7i.48xlarge"], SPEEDS)
        == []
        == cost.speeds_for(PRICES["g6.xlarge"], SPEEDS)
    )
    other = cost.speeds_for(PRICES["p4de.24xlarge"], SPEEDS, model="parakeet_ctc_1_1b")
    assert [one.rtfx.middle for one in other] == [2728.52]
    assert {one.model for one in cost.speeds_for(PRICES["hf-h200"], SPEEDS)} == {
        "parakeet_tdt_0_6b_v3"
    }  # none of the asked model


def record(at, kind, impl="bfloat16", values=(3.0, 4.0, 5.0), **params):
    told = {"preset": "parakeet_rnnt_1_1b", "audio_s": 16} | params
    made = records.Measurement(
        "recogniser-one-core", "rtfx", "s/s", values[1], samples=values, params=told, impl=impl
    ).record()
    made |= {
        "captured_at": at,
        "machine": made["machine"] | ({"id": kind, "cpu_model": "AMD EPYC"} if kind else {}),
    }
    return made


def test_the_newest_record_of_each_machine_and_implementation_counts_with_its_quartiles(tmp_path):
    lines = [record("2026-01-02T00:00:00Z", OTHER, values=(7.0, 8.0, 9.0)), record("2026-01-01T00:00:00Z", OTHER),
             record("2026-01-01T00:00:00Z", None), record("2026-01-01T00:00:00Z", None, impl="float32", values=(1.0, 2.0, 3.0)),
             record("2026-01-03T00:00:00Z", None, preset="tiny")]  # fmt: skip
    records.append(tmp_path / "a.jsonl", *lines)
    found, kin = cost.recorded_speeds(tmp_path), "recorded, a machine of this kind"
    assert [(one.origin, one.rtfx, one.date) for one in found] == [
        ("recorded", Range(7.5, 8, 8.5), "2026-01-02"),
        (kin, Range(3.5, 4, 4.5), "2026-01-01"),
        (kin, Range(1.5, 2, 2.5), "2026-01-01"),
    ]
    assert (
        found[0].device == "AMD EPYC"
        and OTHER in found[0].source
        and found[0].label == "recorded, AMD EPYC, 2026-01-02"
    )
    assert found[2].note.startswith("float32")


def test_only_what_is_in_a_file_of_ones_own_was_measured_here(tmp_path):
    others, own = tmp_path / "a.jsonl", tmp_path / "own.jsonl"
    records.append(
        others,
        record("2026-01-05T00:00:00Z", None),
        record("2026-01-05T00:00:00Z", None, impl="float32"),
    )
    records.append(
        own,
        record("2026-01-01T00:00:00Z", None, values=(7.0, 8.0, 9.0)),
        record("2026-01-01T00:00:00Z", OTHER),
    )
    found = cost.recorded_speeds(others, own=[own])
    assert sorted((one.origin, one.rtfx.middle) for one in found) == [
        ("measured here", 8), ("recorded", 4), ("recorded, a machine of this kind", 4),
    ]  # fmt: skip


def test_on_a_gpu_the_fastest_rung_of_a_ladder_counts_and_a_ladder_on_a_processor_does_not(
    tmp_path,
):
    def rung(impl, rtfx, at="2026-01-01T00:00:00Z", device="cuda:0"):
        made = record(at, OTHER, impl, (rtfx, rtfx, rtfx), device=device, batch=64)
        made |= {
            "what": "ladder-rnnt",
            "machine": made["machine"]
            | {"gpus": [dict.fromkeys(GPU_FIELDS, "") | {"name": "NVIDIA H200"}]},
        }
        return made

    newer = rung("to_graphs", 800.0, at="2026-02-01T00:00:00Z")
    lines = [
        rung("baseline", 50.0),
        rung("to_graphs", 900.0),
        newer,
        rung("to_half", 700.0),
        rung("to_all", 5e3, device="cpu"),
    ]
    records.append(tmp_path / "a.jsonl", *lines)
    (found,) = cost.recorded_speeds(tmp_path)
    assert (found.rtfx, found.per, found.device, found.batch) == (
        Range.of(800.0),
        "gpu",
        "NVIDIA H200",
        64,
    )
    assert cost.speeds_for(PRICES["p5en.48xlarge"], [found]) == [found] and not cost.speeds_for(
        PRICES["p5.48xlarge"], [found]
    )
    assert not cost.speeds_for(
        PRICES["g6.xlarge"], [replace(found, device="NVIDIA L40S")]
    )  # whose name begins as that of an L4
    assert cost.speeds_for(PRICES["p5.48xlarge"], [replace(found, device="NVIDIA H100 80GB HBM3")])


def test_the_shipped_records_hold_a_whole_recogniser_on_one_core():
    assert {"float32", "packed_bfloat16"} <= {
        one.note.split(",")[0] for one in cost.recorded_speeds()
    }


def test_what_is_taken_for_an_input_that_is_not_stated_is_what_the_tables_hold():
    rows = {row["input"]: row for row in cost.stated_inputs()}
    assert all(row["stated"] or row["taken"] for row in rows.values())
    assert (
        not rows["prices"]["stated"]
        and not rows["utilisation"]["stated"]
        and not rows["region"]["stated"]
    )
    assert (
        rows["RTFx of the GPU"]["taken"].startswith(str(BOARD.rtfx.middle))
        and rows["RTFx of the CPU"]["taken"] == "4.5"
    )
    assert float(rows["speech, hours"]["stated"].replace(",", "")) == cost.Terms().hours
    assert PRICES["c7a.48xlarge"].processor in rows["CPU of that instance"]["taken"] and str(BOARD.batch) in rows[
        "batch size on the GPU"]["taken"]  # fmt: skip


def test_power_is_known_from_a_data_sheet_or_not_at_all():
    assert cost.power("NVIDIA L4") == 72 and cost.power("AMD EPYC 9454") == pytest.approx(290 / 48)
    assert cost.power("AMD EPYC 9R14") is None and cost.power("NVIDIA L40S") is None


@pytest.mark.parametrize("driver, instance, watts", [
    ("NVIDIA A100-SXM4-80GB", "p4de.24xlarge", 400), ("NVIDIA H100 80GB HBM3", "p5.48xlarge", 700), ("NVIDIA H200", "hf-h200", 700),
    ("NVIDIA A100-SXM4-40GB", None, None), ("NVIDIA A100 80GB PCIe", None, None), ("NVIDIA H200 NVL", None, None),
    ("NVIDIA H200 MIG 1g.18gb", None, None), ("", None, None),
])  # fmt: skip
def test_a_gpu_is_known_by_what_its_driver_calls_it(driver, instance, watts):
    found = [
        name
        for name, one in PRICES.items()
        if one.gpus and cost.speeds_for(one, [replace(BOARD, device=driver)])
    ]
    assert (instance in found) == bool(instance) == bool(found) and cost.power(driver) == watts
    assert cost.power("AMD EPYC 9454 48-Core Processor") == pytest.approx(290 / 48)


def test_ranges_add_multiply_and_divide_at_their_ends():
    a, b = Range(1, 2, 4), Range(2, 3, 5)
    assert (a + b, 1 + a) == (Range(3, 5, 9), Range(2, 3, 5))
    assert (a * b, 2 * a) == (Range(2, 6, 20), Range(2, 4, 8))
    assert (a / b, 8 / a) == (Range(0.2, 2 / 3, 2), Range(2, 4, 8))
    assert (str(a), str(Range(1000, 2000, 30_000.4)), str(Range.of(4.5))) == (
        "2 (1–4)",
        "2,000 (1,000–30,000)",
        "4.5",
    )


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("wrong, named", [
    (lambda: Range(2, 1, 3), "range: expected 0 <= lowest"), (lambda: Range(0, 1, NAN), "high: expected a finite"),
    (lambda: Range(-1, 0, 1), "range: expected"), (lambda: Range.of(NAN, "price"), "price: expected a finite number"),
    (lambda: Range.of(True, "price"), "price: expected a finite number"), (lambda: Range.of("1", "price"), "price: expected"),
    (lambda: 1 / Range(0, 1, 2), "divisor: expected above 0"), (lambda: machine(0), "price: expected above 0"),
    (lambda: speed(0), "rtfx: expected above 0"), (lambda: speed(per="vcpu"), "per: expected core or gpu"),
    (lambda: Speed(rtfx=Range.of(1), per="core", origin="guessed"), "origin: expected one of published"),
    (lambda: cost.Terms(hours=0), "hours: expected above 0"), (lambda: cost.Terms(hours=INF), "hours: expected"),
    (lambda: cost.Terms(utilisation=Range(0.5, 1, 1.1)), "utilisation: expected above 0, at most 1"),
    (lambda: cost.Terms(utilisation=0), "utilisation: expected above 0"),
    (lambda: cost.Terms(instances=1.5), "instances: expected"),
    (lambda: cost.Terms(startup_s=-1), "startup_s: expected"), (lambda: cost.load_prices(on="yesterday"), "on: expected a day"),
    (lambda: cost.load_prices(on="2024-13-99"), "on: expected a day"), (lambda: cost.load_prices(on=None), "on: expected a day"),
    (lambda: transcription_cost(machine(), speed(per="gpu")), "per: expected what mine has, got gpu"),
    (lambda: Range("a", "b", "c"), "low: expected a finite number"), (lambda: Range(True, 1, 1), "low: expected a finite number"),
    (lambda: Range(0, 1, Decimal(2)), "high: expected"), (lambda: Range(np.float32(1), 1, 1), "low: expected"),
    (lambda: Range(1, 1, 10**400), "high: expected"), (lambda: Range.of(np.int64(1), "price"), "price: expected"),
    (lambda: Speed(rtfx=5, per="core", origin="assumed"), "rtfx: expected Range, got 5"),
    (lambda: Instance(name="x", usd_per_hour=2.0), "usd_per_hour: expected Range"),
    (lambda: machine(units=-3), "cores: expected 0 to"), (lambda: machine(units=10**400), "cores: expected"),
    (lambda: cost.Terms(hours="5"), "hours: expected a finite"), (lambda: cost.Terms(hours=None), "hours: expected a finite"),
    (lambda: cost.Terms(hours=Range(1, 2, 3)), "hours: expected a finite"), (lambda: cost.Terms(hours=True), "hours: expected"),
    (lambda: cost.Terms(instances=10**400), "instances: expected"),
    (lambda: cost.Terms(utilisation=1.0001), "utilisation: expected above 0, at most 1, got 1.0001"),
    (lambda: cost.break_even_rtfx(transcription_cost(machine(), speed(), hours=10), transcription_cost(machine(), speed())),
     "hours: expected as many for both, got 10 and 1e+06"),
])  # fmt: skip
def test_nonsense_is_refused_by_name(wrong, named):
    with pytest.raises(ValueError, match=f"^{re.escape(named)}"):
        wrong()


def test_the_swings_of_the_comparison_begin_with_the_widest_and_enclose_its_middle():
    pair = cost.published_pair(cost.published_speeds())
    then = cost.load_prices(on="2024-09-24")
    now = cost.load_prices()
    found = cost.swings(pair, pair.core, then, now, idle=0.5)
    cores, gpus = cost.priced_pair(pair, then, hours=1e6)
    assert found.middle == pytest.approx(cores.usd.middle / gpus.usd.middle)
    widths = [abs(high - low) for low, high in found.by_input.values()]
    assert widths == sorted(widths, reverse=True) and len(widths) == 7
    idle = found.by_input["utilisation of cores: 0.5 to 1"]
    assert idle == pytest.approx((2 * found.middle, found.middle))
    least, most = found.ends
    assert least < found.middle < most
    with pytest.raises(ValueError, match="idle: expected above 0"):
        cost.swings(pair, pair.core, then, now, idle=0)


def test_a_table_of_costs_has_ranges_as_text_and_the_model_in_its_caption():
    prices = cost.load_prices()
    costs = cost.priced_pair(cost.published_pair(cost.published_speeds()), prices, hours=1e6)
    html = cost_table(costs).to_html()
    usd = costs[0].usd_per_million_hours
    assert f"{usd.middle:,.0f}" in html and costs[0].speed.model in html
    assert "USD for a million hours" in html and "usd_per" not in html
