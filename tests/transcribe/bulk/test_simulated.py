"""The simulation of `asrkit scale` beside what it simulates: two real parts of a small corpus."""

import itertools
import sys
import threading
import time

import pytest

from asrkit.transcribe.bulk import plan, run, workers
from asrkit.transcribe.bulk.workers import in_a_process
from asrkit.workbench.cost import Fleet, simulate

# A recording takes as long to open as its file is large, so that shards differ and a busy machine
# hardly matters.
SLOW = """
import os, time
import soundfile
plain = soundfile.SoundFile

def open_slowly(file, *args, **how):
    if not isinstance(file, int):
        time.sleep(os.stat(file).st_size * float(os.environ["SECONDS_A_BYTE"]))
    return plain(file, *args, **how)

soundfile.SoundFile = open_slowly
from asrkit.transcribe.bulk.worker import main
main()
"""


class Timed:
    """Hears shards in a process, and keeps when each was done: seconds since the first event.

    The first event is that of the first recording, so the start of the process is not in it.
    """

    def __init__(self):
        self.done = []

    def __call__(self, made, shards, machine):
        start = None
        for event in in_a_process(made, shards, machine):
            start = start or time.perf_counter()
            if event.shard:
                self.done.append((event.shard, time.perf_counter() - start))
            yield event

    def seconds(self):
        """Shard -> seconds between the one before and it."""
        times = [0.0] + [at_s for _, at_s in self.done]
        lasted = [after - before for before, after in itertools.pairwise(times)]
        return dict(zip([name for name, _ in self.done], lasted, strict=True))


@pytest.fixture
def corpus(speech, long_file, tmp_path, make_manifest, monkeypatch):
    """A manifest of 24 recordings of three lengths; opening them takes 6 s in all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", SLOW])
    files = [speech[0], speech[3], long_file]
    sizes = [path.stat().st_size for path in files]
    monkeypatch.setenv("SECONDS_A_BYTE", str(6.0 / 8 / sum(sizes)))
    lines = [
        {"audio": str(path), "id": f"{number}-{path.stem}", "duration": path.stat().st_size / 32e3}
        for number in range(8)
        for path in files
    ]
    return make_manifest(tmp_path / "m.jsonl", lines)


def test_two_parts_finish_their_shards_in_the_order_that_is_simulated(corpus, task, tmp_path):
    alone = Timed()
    first = plan(corpus, task, tmp_path / "alone", shard_h=1 / 3600)
    run(first, executor=alone)
    lasted = alone.seconds()
    names = [shard.name for shard in first.shards]
    assert [name for name, _ in alone.done] == names and len(names) >= 20
    lasted[names[0]] = lasted[names[1]]  # the same file; the first one was opened before the start
    simulated = simulate([max(lasted[name], 1e-3) for name in names], Fleet(workers=2, rtfx=1.0))

    made = plan(corpus, task, tmp_path / "parts", shard_h=1 / 3600)
    parts = [Timed(), Timed()]
    threads = [
        threading.Thread(target=run, args=(made,), kwargs={"part": (k, 2), "executor": parts[k]})
        for k in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.done() == {*names}
    for worker, timed in enumerate(parts):
        told = [names[one.shard] for one in simulated.done if one.worker == worker]
        assert [name for name, _ in timed.done] == told
    # Of two shards of different parts that are well apart in the simulation, the same one is first.
    at_s = {name: at_s for timed in parts for name, at_s in timed.done}
    apart_s = simulated.seconds / 4
    pairs = [
        (names[a.shard], names[b.shard])
        for a, b in itertools.combinations(simulated.done, 2)
        if a.worker != b.worker and b.at_s - a.at_s > apart_s
    ]
    agreed = sum(at_s[a] < at_s[b] for a, b in pairs)
    assert len(pairs) > 20 and agreed >= 0.75 * len(pairs)  # of chance: half
