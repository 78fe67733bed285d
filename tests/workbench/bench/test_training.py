"""The suite of training steps: its arms agree, and its records name them."""

from asrkit.cli import main
from asrkit.workbench import bench


def test_all_ways_to_train_agree_and_lean_takes_no_more_memory():
    records = bench.run("training", quick=True)
    peaks = {}
    for record in records:
        assert record["what"] == "training-step"
        if record["metric"] == "peak_memory":
            peaks[record["params"]["dtype"], record["impl"]] = record["value"]
    assert {impl for _, impl in peaks} >= {"full", "lean"}
    for dtype in {dtype for dtype, _ in peaks}:
        assert peaks[dtype, "lean"] <= peaks[dtype, "full"]


def test_without_a_package_that_it_needs_the_command_leaves_the_suite_out_and_says_so(
    monkeypatch, tmp_path, capsys
):
    def lacking(device, quick):
        raise ModuleNotFoundError("No module named 'tqdm'")

    monkeypatch.setitem(bench.SUITES, "training", bench.Suite(name="training", cases=lacking))
    out = tmp_path / "bench.jsonl"
    assert main(["bench", "training", "--quick", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "training is left out: No module named 'tqdm'" in said.err
    assert "0 records appended" in said.out


def test_every_suite_can_be_asked_for_at_the_command_line():
    from asrkit.cli.bench import SUITES

    assert {*SUITES} == {*bench.SUITES, "all"}
