"""The suite of optimizers: its arms agree, each has its floor, and one that differs is found."""

import pytest

from asrkit.workbench import bench
from asrkit.workbench.bench.suites import optimizers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_arms_are_timed_beside_their_floors():
    records = bench.run("optimizers", quick=True)
    floors = {}
    for record in records:
        if record["metric"] == "latency":
            count = record["params"]["shape"][0]
            floors[record["what"], record["impl"]] = (
                record["params"].get("floor_B", 0) / count
            )
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


def test_an_arm_that_computes_something_else_is_found_out():
    case = optimizers.step_case("cpu", True)
    right = case.compared_arms["lamb_foreach"]

    def wrong():
        first, *rest = right()
        return (first * 1.001, *rest)

    planted = {**case.compared_arms, "lamb_foreach": wrong}
    _, failures = bench.compare_arms(bench.Case(what=case.what, arms=planted))
    assert [*failures] == ["lamb_foreach"]
