"""The suite of bulk transcription: whole commands on real cores, what is made of their times, and what they refuse."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from asrkit import cli
from asrkit.transcribe.bulk import inputs
from asrkit.workbench import bench
from asrkit.workbench.bench import bulk_reading, bulk_runs
from asrkit.workbench.bench.bulk_runs import Finished
from asrkit.workbench.bench.suites import bulk
from asrkit.workbench.bench.suites.bulk import AT_LEAST, AT_MOST, Bar, Heard

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not hasattr(os, "sched_setaffinity"), reason="this system pins no process to a core"
    ),
]
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture
def small_bench(tmp_path):
    """A tiny model and corpora of 3 and 6 recordings."""
    return bulk._bench(tmp_path, bulk.QUICK, True)


def program(text):
    """A command that runs some Python."""
    return [sys.executable, "-c", text]


def test_commands_a_resume_a_plan_and_readings_are_measured(tmp_path):
    records = bench.run("bulk", quick=True, out=tmp_path / "bulk.jsonl")
    found = {
        (one["what"], one["metric"], one["impl"], one["params"].get("size")): one for one in records
    }
    arms = ["plain", "one_part", *(["two_parts"] if len(CORES) > 1 else [])]
    for arm in arms:
        small, large = (
            found[bulk.RUNS, "latency", arm, size]["params"] for size in ("small", "large")
        )
        assert (small["recordings"], large["recordings"]) == (3, 6)
        assert large["audio_s"] == pytest.approx(2 * small["audio_s"]) and small["audio_s"] > 5
        assert found[bulk.RUNS, "cpu_time", arm, "large"]["value"] > 0
    compared = [one["params"]["arms"] for one in records if one["metric"] == "ratio"]
    wanted = [["one_part", "plain"], ["one_part", "two_parts"]]
    assert compared[:2] == wanted[: len(arms) - 1]
    assert found[bulk.RESUME, "latency", "finished", None]["value"] > 0
    assert found[bulk.PLAN, "latency", "plan", None]["params"]["recordings"] == 2_000
    assert found[bulk.PLAN, "peak_memory", "plan", None]["value"] > 10e6
    assert {impl for what, _, impl, _ in found if what == bulk.READING} == {*bulk_reading.FORMATS}
    lines = bench.table(records)
    assert any(line.startswith(bulk.PLAN) and " GB" in line for line in lines)
    assert not any("MISSED" in line for line in lines)  # no bar holds for sizes that are so small


@two_cores
def test_commands_run_at_the_same_time_each_on_its_core(tmp_path):
    text = (
        "import json, os, sys, time; from pathlib import Path; own, other = map(Path, sys.argv[1:])\n"
        "own.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print(json.dumps({'cores': sorted(os.sched_getaffinity(0))}))"
    )
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    commands = [[*program(text), one, two], [*program(text), two, one]]
    finished = bulk_runs.run(commands, CORES[:2])
    assert finished.results == [{"cores": CORES[:1]}, {"cores": CORES[1:2]}]
    assert finished.wall_s > 0 and finished.cpu_s > 0
    assert sorted(os.sched_getaffinity(0)) == CORES
    free = bulk_runs.run([[*program(text), one, two]])
    assert free.results == [{"cores": CORES}]


def test_a_command_that_fails_says_why_and_ends_the_others(tmp_path):
    end = tmp_path / "end"
    waits = program(f"import time; time.sleep(60); open({str(end)!r}, 'w')")
    fails = program("import sys; sys.exit('asrkit transcribe: no room')")
    with pytest.raises(RuntimeError, match="^a command ended with exit code 1: .*no room"):
        bulk_runs.run([fails, waits])
    assert not end.exists()  # `run` returns when all have ended, this one long before its end


def test_a_corpus_is_the_same_in_its_folder_and_its_manifest(small_bench):
    large = small_bench.corpora["large"]
    listed = [*inputs.read([large.manifest])]
    assert len(listed) == large.recordings == 6
    assert {one.path for one in listed} == {str(path) for path in large.folder.iterdir()}
    assert sum(one.duration_s for one in listed) == pytest.approx(large.audio_s)
    by_header = {one.path: one.duration_s for one in inputs.read([large.folder])}
    assert by_header == {one.path: one.duration_s for one in listed}


def test_recordings_that_failed_are_missing_or_there_twice_are_refused(small_bench, tmp_path):
    corpus = small_bench.corpora["small"]
    names = [one.id for one in inputs.read([corpus.manifest])]
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").touch()

    def heard(names, failed=0):
        lines = [json.dumps({"id": name, "error": ""}) + "\n" for name in names]
        (out / "part-0.jsonl").write_text("".join(lines))
        said = Finished(wall_s=1.0, cpu_s=1.0, results=[{"failed": failed}])
        bulk_runs.expect_all_heard(out, corpus, said)

    heard(names)
    with pytest.raises(ValueError, match="^run: expected no recording that failed, got 1"):
        heard(names, failed=1)
    with pytest.raises(ValueError, match="got 2 results of 2 recordings"):
        heard(names[:2])
    with pytest.raises(ValueError, match="got 3 results of 2 recordings"):
        heard([*names[:2], names[0]])
    with pytest.raises(ValueError, match="got 4 results of 3 recordings"):
        heard([*names, names[0]])


def test_a_resume_that_needs_torch_is_an_error(small_bench, tmp_path):
    corpus = small_bench.corpora["small"]
    words = [corpus.manifest, "--model", small_bench.model, "--out", tmp_path / "out", "--shards"]
    command = bulk_runs.transcribe(*words, program=bulk_runs.WITHOUT_TORCH)
    with pytest.raises(RuntimeError, match="import of torch halted"):
        bulk_runs.run([command])  # nothing is finished, so the model has to be loaded


def test_commands_on_ray_start_one_of_their_own(small_bench, tmp_path):
    corpus = small_bench.corpora["small"]
    for arm, actors in (("ray_one", "1"), ("ray_two", "2")):
        ray = bulk.RAY_ARMS[arm]
        (words,) = bulk._commands(small_bench, ray, corpus, tmp_path / "out")
        assert words[0] == str(bulk_runs.SCALE_PYTHON) and bulk._cores(ray) is None
        args = cli.parser().parse_args(words[3:])
        assert (args.on, args.address, args.actors) == ("ray", "local", actors)
        assert args.shards and args.threads == 1 and args.json
    plain = bulk.RAY_ARMS["plain_unpinned"]
    (words,) = bulk._commands(small_bench, plain, corpus, tmp_path / "out")
    assert words[0] == sys.executable and cli.parser().parse_args(words[3:]).on is None


def test_without_ray_its_case_is_refused_and_the_others_are_not(small_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bulk_runs, "SCALE_PYTHON", tmp_path / "none")
    assert bulk._ray_case(small_bench).refused == (
        "bulk-ray: expected the environment .venv-scale, got none. `make peers` installs it."
    )


def runs(*seconds):
    """Runs that took so long, with a plan of four shards."""
    return [
        Heard(Finished(wall_s=one, cpu_s=one, results=[]), [30.0, 30.0, 20.0, 20.0])
        for one in seconds
    ]


def test_a_slope_counts_what_the_larger_corpus_adds():
    corpora = {"small": SimpleNamespace(audio_s=100.0), "large": SimpleNamespace(audio_s=300.0)}
    shared = SimpleNamespace(corpora=corpora, params={}, sizes=bulk.FULL)
    slopes = {
        "plain": bulk._slopes(shared, runs(3.0, 4.0), runs(5.0, 6.0)),
        "one_part": bulk._slopes(shared, runs(9.0, 9.0), runs(13.0, 11.0)),
    }
    assert slopes == {"plain": [10.0, 10.0], "one_part": [20.0, 10.0]}
    (ratio,) = bulk._ratios("x", shared, slopes)
    assert ratio.value == 1.5 and ratio.samples == (2.0, 1.0)
    assert ratio.params == {"arms": ["one_part", "plain"], "bar": 1.25, "bar_is": AT_MOST}
    quick = SimpleNamespace(corpora=corpora, params={}, sizes=bulk.QUICK)
    (ratio,) = bulk._ratios("x", quick, slopes)
    assert "bar" not in ratio.params


def test_two_parts_are_predicted_from_one(tmp_path):
    # 100 s of audio in 4 s and 300 s in 8 s: 50 times as fast as it is spoken, after 2 s
    assert bulk.predict([30.0] * 10, (100.0, 300.0), (4.0, 8.0), workers=2) == pytest.approx(5.0)
    assert bulk.predict([30.0] * 9, (100.0, 300.0), (4.0, 8.0), workers=2) == pytest.approx(5.0)
    assert bulk.predict([300.0], (100.0, 300.0), (4.0, 8.0), workers=1) == pytest.approx(8.0)
    corpora = {"small": SimpleNamespace(audio_s=100.0), "large": SimpleNamespace(audio_s=300.0)}
    shared = SimpleNamespace(corpora=corpora, params={}, sizes=bulk.FULL)
    heard = {
        ("one_part", "small"): runs(4.0),
        ("one_part", "large"): runs(8.0),
        ("two_parts", "large"): runs(6.0),
    }
    predicted, ratio = bulk._prediction("x", shared, heard)
    assert predicted.value == pytest.approx(3000.0) and predicted.origin == "simulated"
    assert ratio.value == pytest.approx(2.0) and ratio.params["arms"][0] == "two_parts"
    heard["one_part", "large"] = runs(4.0)  # no longer than the small one: nothing to predict from
    assert [*bulk._prediction("x", shared, heard)] == []


def test_the_table_says_which_bars_are_met():
    def record(value, unit, **params):
        return {"what": "w", "metric": "m", "impl": "i", "value": value, "unit": unit, "params": params}  # fmt: skip

    lines = bulk.table(
        [
            record(1900.0, "ms", bar=2000.0, bar_is=AT_MOST),
            record(1.79, "1", bar=1.8, bar_is=AT_LEAST, arms=["one", "two"]),
            record(7.5e9, "B", bar=8e9, bar_is=AT_MOST),
            record(2.5, "ms/s", size="large"),
        ]
    )
    cells = [line.split("  ") for line in lines]
    cells = [[cell.strip() for cell in row if cell] for row in cells]
    assert cells[1:] == [
        ["w", "i", "m", "1.90 s", "at most 2.00 s", "met"],
        ["w", "one / two", "m", "1.79", "at least 1.80", "MISSED"],
        ["w", "i", "m", "7.50 GB", "at most 8.00 GB", "met"],
        ["w", "i", "m large", "2.50 ms/s"],
    ]
    assert bulk.table([]) == []
    for kind, low, high in ((AT_MOST, True, False), (AT_LEAST, False, True)):
        assert bulk.is_met(Bar(kind, 1.0), 0.9) == low and bulk.is_met(Bar(kind, 1.0), 1.1) == high
        assert bulk.is_met(Bar(kind, 1.0), 1.0)


def test_a_manifest_to_plan_has_as_many_recordings_as_asked_for_of_many_lengths(tmp_path):
    path = tmp_path / "m.jsonl"
    bulk_runs.write_manifest(path, 250, [2.0, 30.5, 7.25] * 33)
    found = [*inputs.read([path])]
    assert len({one.id for one in found}) == len({one.path for one in found}) == 250
    assert {one.duration_s for one in found} == {
        length + longer for length in (2.0, 30.5, 7.25) for longer in (0.0, 0.001, 0.002)
    }


def test_every_format_is_written_and_read_whole(tmp_path):
    for name, form in bulk_reading.FORMATS.items():
        path = bulk_reading.write(tmp_path / f"x{form.suffix}", form, 3)
        samples = bulk_reading.read_audio(path, 16_000)
        assert abs(len(samples) - 48_000) < 2000 and samples.abs().max() > 0.05, name
    found = [*bulk_reading.measure_reading("reading", 2, 2, tmp_path, {"threads": 1})]
    assert [one.impl for one in found] == [*bulk_reading.FORMATS]
    assert all(len(one.samples) == 2 and one.value > 0 for one in found)
    sizes = {one.impl: one.params["MB_per_hour"] for one in found}
    assert sizes["wav"] == pytest.approx(115.2, abs=0.2)  # 16 bits at 16 kHz, and a header
    assert sizes["flac"] < sizes["wav"]


def test_a_gpu_and_a_system_that_pins_nothing_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="^device: expected cpu for the suite bulk, got cuda. A"):
        next(bulk.suite("cuda", True))
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ValueError, match="^suite: expected a system that pins processes to cores"):
        next(bulk.suite("cpu", True))
