"""The simulation of `asrkit scale` beside what it simulates: two real parts of a small corpus."""

import itertools
import threading
import time

import pytest

from asrkit.transcribe.bulk import plan, run
from asrkit.transcribe.bulk.workers import in_a_process
from asrkit.workbench.cost import Fleet, simulate


@pytest.fixture
def corpus(speech, long_file, tmp_path, make_manifest, monkeypatch):
    """A manifest of 24 recordings of three lengths."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = [
        {"audio": str(path), "id": f"{number}-{path.stem}", "duration": path.stat().st_size / 32e3}
        for number in range(8)
        for path in (speech[0], speech[3], long_file)
    ]
    return make_manifest(tmp_path / "m.jsonl", lines)


def measure(made, parts):
    """(shard, seconds) of each part of a plan, of parts that run at the same time.

    Shards are numbered as in the plan, in the order in which they were done. The first one of a
    part is left out, for the start of its process is in it.
    """
    numbers = {shard.name: number for number, shard in enumerate(made.shards)}
    done = [[] for _ in range(parts)]

    def hear(part):
        def timed(*args):
            for event in in_a_process(*args):
                if event.shard:
                    done[part].append((numbers[event.shard], time.perf_counter()))
                yield event

        run(made, part=(part, parts), executor=timed)

    threads = [threading.Thread(target=hear, args=(part,)) for part in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        [(shard, at_s - before_s) for (_, before_s), (shard, at_s) in itertools.pairwise(part)]
        for part in done
    ]


def test_a_simulation_of_measured_shards_ends_as_the_parts_that_were_measured(
    corpus, task, tmp_path
):
    made = plan(corpus, task, tmp_path / "out", shard_h=1 / 3600)
    parts = measure(made, 2)
    assert len(made.shards) == 24 and made.done() == {shard.name for shard in made.shards}
    took_s = dict(itertools.chain(*parts))
    assert sorted(took_s) == [*range(2, 24)]  # 0 and 1 are the first ones
    outcome = simulate([took_s[shard] for shard in range(2, 24)], Fleet(workers=2, rtfx=1.0))
    for worker, part in enumerate(parts):
        simulated = [(2 + one.shard, one.at_s) for one in outcome.done if one.worker == worker]
        at_s = itertools.accumulate(seconds for _, seconds in part)
        assert [shard for shard, _ in simulated] == [shard for shard, _ in part]
        assert [when for _, when in simulated] == pytest.approx([*at_s])
    sooner_s, later_s = sorted(sum(seconds for _, seconds in part) for part in parts)
    assert outcome.seconds == pytest.approx(later_s)
    assert outcome.idle_s == pytest.approx(later_s - sooner_s)
    assert outcome.audio_s == pytest.approx(sooner_s + later_s)
    assert outcome.failures == 0
