"""The suite of optimizers: its arms agree, each has its floor, and the model is MLPerf's."""

import math

import pytest

from asrkit.runtime import usable_cores
from asrkit.workbench import bench
from asrkit.workbench.bench.suites import optimizers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_parameters_are_those_of_the_round():
    # MLCommons training results 1.0: 49,006,080 parameters, with no row for blank in the embedding
    assert sum(map(math.prod, optimizers.shapes(optimizers.ROUND))) == 49_006_080


def test_all_arms_are_timed_beside_their_floors():
    records = bench.run("optimizers", quick=True)
    floors = {}
    for record in records:
        if record["metric"] == "latency" and record["what"] != optimizers.ON_TWO:
            count = record["params"]["shape"][0]
            floors[record["what"], record["impl"]] = record["params"].get("floor_B", 0) / count
    assert floors == {
        ("optimizer-step", "lamb_reference"): 44,
        ("optimizer-step", "lamb_foreach"): 44,
        ("optimizer-step", "lamb_numba_cpu"): 44,
        ("optimizer-step", "adamw_fused"): 28,
        ("optimizer-step", "adamw_foreach"): 28,
        ("optimizer-step", "adafactor"): 0,
        ("optimizer-step", "muon_of_matrices"): 0,
        ("weight-average", "formula"): 12,
        ("weight-average", "torch_averaged_model"): 12,
        ("weight-average", "average"): 12,
    }
    if usable_cores() > 1:
        _check_two_processes([record for record in records if record["what"] == optimizers.ON_TWO])


def _check_two_processes(records):
    """Two moments of four bytes a weight: whole on each process, or half of them."""
    times = {record["impl"] for record in records if record["metric"] == "latency"}
    states = {record["impl"]: record["value"] for record in records if record["metric"] == "state"}
    assert times == {"lamb", "sharded_lamb", "adamw_fused", "zero_adamw_fused"} == states.keys()
    whole_B = 8 * sum(map(math.prod, optimizers.shapes(optimizers.SMALL)))
    for name, shares in (("lamb", 1), ("sharded_lamb", 2), ("adamw_fused", 1)):
        assert states[name] == pytest.approx(whole_B / shares, rel=0.02), name
    assert states["zero_adamw_fused"] == pytest.approx(whole_B / 2, rel=0.2)


def test_an_arm_that_computes_something_else_is_found_out():
    case = optimizers.step_case(optimizers.SMALL, "cpu", True)
    right = case.compared_arms["lamb_foreach"]

    def wrong():
        first, *rest = right()
        return (first * 1.001, *rest)

    planted = {**case.compared_arms, "lamb_foreach": wrong}
    _, failures = bench.compare_arms(bench.Case(what=case.what, arms=planted))
    assert [*failures] == ["lamb_foreach"]
