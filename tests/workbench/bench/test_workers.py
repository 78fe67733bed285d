"""The suite of workers: whole transcriptions by one process and by several, and what these share."""

import os

import pytest

from asrkit.runtime import usable_cores
from asrkit.workbench import bench
from asrkit.workbench.bench.suites import workers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no process"),
]


def test_times_rates_ratios_and_memory_of_one_process_and_of_one_a_core(monkeypatch):
    monkeypatch.setattr(workers, "QUICK_UTTERANCES", 2)
    records = bench.run("workers", quick=True)
    found = {(one["metric"], one["impl"], one["params"]["dtype"]): one for one in records}
    for impl in ("one_process", "one_worker", "workers"):
        assert found["rtfx", impl, "float32"]["value"] > 0
        assert found["cpu_time", impl, "float32"]["value"] > 0
    ratios = [one["params"]["arms"] for one in records if one["metric"] == "ratio"]
    assert ["one_worker", "workers"] in ratios and ["one_process", "workers"] in ratios
    assert found["latency", "workers", "float32"]["params"]["workers"] == usable_cores()
    sizes = [found[f"{kind}_memory", "workers", "float32"] for kind in ("own", "share", "all")]
    values = [one["value"] for one in sizes]
    assert 0 < values[0] < values[1] < values[2]
    assert sizes[0]["params"]["weights_B"] > 0


def test_where_no_worker_tells_its_memory_none_is_recorded():
    def run():
        yield from range(4)  # transcripts, but of no process

    assert [*workers._memory(run, {"recordings": 4})] == []


def test_a_gpu_is_refused():
    with pytest.raises(
        ValueError, match="^device: expected cpu for the suite workers, got cuda. A"
    ):
        next(workers.suite("cuda", True))
