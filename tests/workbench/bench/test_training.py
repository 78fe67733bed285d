"""The suite of training: its arms agree and have their floors, and one that differs is found."""

from typing import get_args, get_type_hints

from asrkit.cli import main
from asrkit.workbench import bench


def test_all_ways_to_train_agree_and_lean_takes_no_more_memory():
    records = bench.run("training", quick=True)
    peaks = {}
    steps = [record for record in records if record["what"] == "training-step"]
    for record in steps:
        if record["metric"] == "peak_memory":
            peaks[record["params"]["dtype"], record["impl"]] = record["value"]
    assert {impl for _, impl in peaks} >= {"full", "lean"}
    for dtype in {dtype for dtype, _ in peaks}:
        assert peaks[dtype, "lean"] <= peaks[dtype, "full"]
    _check_lstm([record for record in records if record["what"].startswith("lstm-")])
    _check_optimizers(records)


def _check_lstm(records):
    """Every way to run a batch of an LSTM encoder is timed, with the share that it computes."""
    arms = {}
    for record in records:
        if record["metric"] == "latency":
            arms.setdefault(record["what"], {})[record["impl"]] = record["params"]
    ways = {"whole", "phases_2", "phases_4", "phases_8"}
    assert arms.keys() == {"lstm-phases-librispeech", "lstm-phases-equal"}
    phased = arms["lstm-phases-librispeech"]
    assert phased.keys() == ways
    cells = {name: params["cells"] for name, params in phased.items()}
    assert phased["whole"]["useful_cells"] <= cells["phases_8"] < cells["phases_2"] < 1
    assert arms["lstm-phases-equal"]["phases_8"]["cells"] == 1


def _check_optimizers(records):
    """Each optimizer is timed beside the bytes that it moves at least for a weight."""
    floors = {}
    for record in records:
        if (record["what"], record["metric"]) == ("optimizer-step", "latency"):
            params = record["params"]
            floors[record["impl"]] = params["floor_B"] / params["shape"][0]
    assert floors == {"lamb": 44, "adamw_fused": 28}


def test_without_a_package_that_it_needs_the_command_leaves_the_suite_out_and_says_so(
    monkeypatch, tmp_path, capsys
):
    def lacking(device, quick):
        raise ModuleNotFoundError("No module named 'tqdm'")

    monkeypatch.setitem(
        bench.SUITES, "training", bench.Suite(name="training", cases=lacking)
    )
    out = tmp_path / "bench.jsonl"
    assert main(["bench", "training", "--quick", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "training is left out: No module named 'tqdm'" in said.err
    assert "0 records appended" in said.out


def test_run_all_can_be_asked_for_at_the_command_line():
    from asrkit.cli.bench import BenchOptions

    suites = get_args(get_type_hints(BenchOptions)["suite"])
    assert {*suites} == {*bench.SUITES, "all"}
