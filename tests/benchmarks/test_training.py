"""The suite of training: its arms agree, and one that differs is found."""

from typing import get_args, get_type_hints

import pytest

from asrkit.workbench.measure.comparison import check
from benchmarks.__main__ import BenchOptions, main
from benchmarks.harness.cases import Suite
from benchmarks.suites import SUITES


@pytest.fixture(scope="module")
def cases():
    """The quick cases by name; of the training steps the last."""
    return {case.what: case for case in SUITES["training"].cases("cpu", True)}


def test_all_training_steps_agree_and_lean_takes_no_more_memory(cases):
    for what, case in cases.items():
        found = check(case)
        if what == "training-step":
            assert {*found} == {"full", "packed", "split", "lean"}
            assert found["lean"].peak_B <= found["full"].peak_B


def test_every_arm_of_an_lstm_encoder_has_the_share_that_it_computes(cases):
    case = cases["lstm-phases-librispeech"]
    assert {*case.arms} == {"whole", "phases_2", "phases_4", "phases_8"}
    cells = {name: params["cells"] for name, params in case.arm_params.items()}
    assert cells["whole"] == 1 > cells["phases_2"] > cells["phases_8"]
    assert cells["phases_8"] >= case.params["useful_cells"]
    assert cases["lstm-phases-equal"].arm_params["phases_8"]["cells"] == 1


def test_a_suite_that_lacks_a_package_is_left_out_with_a_line(
    monkeypatch, tmp_path, capsys
):
    def lacking(device, quick):
        raise ModuleNotFoundError("No module named 'tqdm'")

    suite = Suite(name="training", cases=lacking)
    monkeypatch.setitem(SUITES, "training", suite)
    out = tmp_path / "bench.jsonl"
    assert main(["training", "--quick", "--out", str(out)]) == 0
    output = capsys.readouterr()
    assert "training is left out: No module named 'tqdm'" in output.err
    assert "0 records appended" in output.out


def test_the_command_line_has_every_suite():
    suites = get_args(get_type_hints(BenchOptions)["suite"])
    assert {*suites} == {*SUITES, "all"}
