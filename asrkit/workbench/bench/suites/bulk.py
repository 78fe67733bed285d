"""The suite of bulk transcription: whole commands, timed beside each other as a user types them.

A FastConformer with CTC and random weights hears beeps in noise, in FLAC files with the lengths of
LibriSpeech's utterances. Each command hears a small corpus and a large one, in rounds in which all
commands take turns. What is compared is their `slope`: the time of the large corpus less that of
the small one, over the seconds of audio between them. So what a command takes to start, and to load
the model, is not counted.

"plain" is `asrkit transcribe` of a folder, "one_part" the same files by a manifest with --shards,
"two_parts" --part 0/2 and --part 1/2 as two commands. Each command has one thread and is pinned to
a core with all that it starts, two parts to a core each. With peers, "ray_one" and "ray_two" are
one actor and two. Ray's own processes cannot be pinned, so "plain_unpinned" stands beside them.

Every command has to hear each recording once and without an error. That texts are equal is tested
with models that have learnt something: between the labels of random weights, rounding decides.
"""

import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.models import FastConformerConfig, save_checkpoint
from asrkit.shapes import expect
from asrkit.workbench.bench import bulk_runs
from asrkit.workbench.bench.bulk_reading import measure_reading
from asrkit.workbench.bench.bulk_runs import Corpus, Finished
from asrkit.workbench.bench.cases import Case, Suite, median_of
from asrkit.workbench.bench.ladder_script import RATE_HZ, beeps, lengths
from asrkit.workbench.bench.peers.processes import Peers
from asrkit.workbench.bench.suites.workers import random_ctc
from asrkit.workbench.cost import Fleet, simulate
from asrkit.workbench.records import Measurement
from asrkit.workbench.tables import aligned

RUNS = "bulk-runs"
RAY = "bulk-ray"
RESUME = "bulk-resume"
PLAN = "bulk-plan"
READING = "bulk-reading"
AT_MOST = "at most"
AT_LEAST = "at least"
PREDICTED = "two_parts, predicted"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Args:
        layers: of the encoder.
        width: of the encoder.
        files: sound files, each of which stands in a corpus under several names.
        copies: names of each file in the small corpus, and in the large one.
        rounds: in each of which all commands hear both corpora.
        ray_rounds: the same of those with Ray, which takes long to start.
        resumes: of a finished run.
        planned: recordings in the plan.
        reading_s: seconds of audio in each format.
        readings: of each format.
    """

    layers: int
    width: int
    files: int
    copies: tuple[int, int]
    rounds: int
    ray_rounds: int
    resumes: int
    planned: int
    reading_s: int
    readings: int


FULL = Sizes(
    layers=8,
    width=128,
    files=120,
    copies=(1, 7),
    rounds=3,
    ray_rounds=2,
    resumes=5,
    planned=10_000_000,
    reading_s=300,
    readings=10,
)
QUICK = Sizes(
    layers=1,
    width=32,
    files=3,
    copies=(1, 2),
    rounds=1,
    ray_rounds=1,
    resumes=1,
    planned=2_000,
    reading_s=2,
    readings=1,
)


class Bar(NamedTuple):
    """What a measured value has to be at most, or at least."""

    kind: str
    value: float

    def params(self) -> dict[str, Any]:
        """The bar as params of a record."""
        return {"bar": self.value, "bar_is": self.kind}


class Ratio(NamedTuple):
    """The slope of one arm over that of another, and its bar."""

    arms: tuple[str, str]
    bar: Bar


class Arm(NamedTuple):
    """Commands that are typed at once.

    Args:
        more: what each of them has behind the files and the model.
        shards: whether they read the manifest and write shards.
        pinned: whether each has a core of its own.
        python: that runs them; None: this one.
    """

    more: tuple[tuple[str, ...], ...] = ((),)
    shards: bool = True
    pinned: bool = True
    python: Path | None = None


PARTS = ("--part", "0/2"), ("--part", "1/2")
ON_RAY = ("--on", "ray", "--address", "local", "--actors")
ARMS = {"plain": Arm(shards=False), "one_part": Arm(), "two_parts": Arm(more=PARTS)}
RAY_ARMS = {
    "plain_unpinned": Arm(shards=False, pinned=False),
    "ray_one": Arm(more=((*ON_RAY, "1"),), pinned=False, python=bulk_runs.SCALE_PYTHON),
    "ray_two": Arm(more=((*ON_RAY, "2"),), pinned=False, python=bulk_runs.SCALE_PYTHON),
}
RATIOS = (
    Ratio(("one_part", "plain"), Bar(AT_MOST, 1.25)),
    Ratio(("one_part", "two_parts"), Bar(AT_LEAST, 1.8)),
    Ratio(("ray_one", "plain_unpinned"), Bar(AT_MOST, 1.25)),
    Ratio(("ray_one", "ray_two"), Bar(AT_LEAST, 1.4)),
)
RESUME_BAR = Bar(AT_MOST, 2000.0)  # ms
PLAN_BARS = {"latency": Bar(AT_MOST, 60_000.0), "peak_memory": Bar(AT_MOST, 8e9)}  # ms, bytes


class Bench(NamedTuple):
    """What all cases of a run share."""

    folder: Path
    model: Path
    corpora: dict[str, Corpus]  # small and large
    sizes: Sizes
    params: dict[str, Any]


def suite(device: str, quick: bool, peers: Peers | None = None) -> Iterator[Case]:
    """Yield the cases: commands beside each other, a resume, a plan, and reading of formats.

    Args:
        device: "cpu".
        quick: a tiny model and few recordings.
        peers: not None: Ray too, which has an environment of its own.

    Raises:
        ValueError: `device` is a GPU, or this system pins no process to a core.
    """
    remedy = "A GPU is one process: --shards --part K/N."
    expect(not device.startswith("cuda"), "device", "cpu for the suite bulk", device, remedy)
    pins = hasattr(os, "sched_setaffinity")
    expect(pins, "suite", "a system that pins processes to cores, for bulk", os.name)
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        bench = _bench(Path(folder), sizes, quick)
        arms = dict(ARMS)
        if len(os.sched_getaffinity(0)) < len(PARTS):
            del arms["two_parts"]
        runs = partial(measure_runs, RUNS, bench, arms, rounds=sizes.rounds)
        yield Case(what=RUNS, measure=runs)
        yield Case(what=RESUME, measure=partial(measure_resume, bench))
        yield Case(what=PLAN, measure=partial(measure_plan, bench))
        reading = partial(measure_reading, READING, sizes.reading_s, sizes.readings, bench.folder)
        yield Case(what=READING, measure=partial(reading, bench.params))
        if peers is not None:
            yield _ray_case(bench)


def _ray_case(bench: Bench) -> Case:
    """Commands on Ray beside a plain one; refused where Ray is not installed."""
    if not bulk_runs.SCALE_PYTHON.exists():
        missing = "expected the environment .venv-scale, got none. `make peers` installs it."
        return Case(what=RAY, refused=f"{RAY}: {missing}")
    runs = partial(measure_runs, RAY, bench, RAY_ARMS, rounds=bench.sizes.ray_rounds)
    return Case(what=RAY, measure=runs)


def _bench(folder: Path, sizes: Sizes, quick: bool) -> Bench:
    """The model and the corpora, written to a folder."""
    model = folder / "model.safetensors"
    encoder = FastConformerConfig(
        layers=sizes.layers, width=sizes.width, heads=4, subsampling_channels=32
    )
    save_checkpoint(model, random_ctc(encoder))
    samples = lengths(sizes.files)
    files = [
        bulk_runs.write_flac(folder / f"{number}.flac", beeps(size, number))
        for number, size in enumerate(samples)
    ]
    corpora = {
        name: bulk_runs.make_corpus(folder / name, files, samples, copies)
        for name, copies in zip(("small", "large"), sizes.copies, strict=True)
    }
    params: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cpu"}
    if quick:
        params["quick"] = True
    return Bench(folder=folder, model=model, corpora=corpora, sizes=sizes, params=params)


class Heard(NamedTuple):
    """A corpus heard by an arm: what that took, and the seconds of audio in each shard."""

    finished: Finished
    shards_s: list[float]


def hear(bench: Bench, arm: Arm, corpus: Corpus) -> Heard:
    """What the commands of an arm take to hear a corpus, into a folder that is removed.

    Args:
        bench: with the model.
        arm: the commands.
        corpus: what they hear.

    Raises:
        RuntimeError: A command failed.
        ValueError: A recording failed, or was not heard once.
    """
    with bulk_runs.removed(bench.folder / "out") as out:
        finished = bulk_runs.run(_commands(bench, arm, corpus, out), _cores(arm))
        bulk_runs.expect_all_heard(out, corpus, finished)
        return Heard(finished, bulk_runs.shards_s(out))


def _commands(bench: Bench, arm: Arm, corpus: Corpus, out: Path) -> list[list[str]]:
    """The words of each command of an arm."""
    files = corpus.manifest if arm.shards else corpus.folder
    words = [files, "--model", bench.model, "--out", out, "--threads", 1]
    if arm.shards:
        words.append("--shards")
    return [bulk_runs.transcribe(*words, *more, python=arm.python) for more in arm.more]


def _cores(arm: Arm) -> list[int] | None:
    """The core of each command of an arm; None where they are not pinned."""
    if not arm.pinned:
        return None
    return sorted(os.sched_getaffinity(0))[: len(arm.more)]


def measure_runs(
    what: str, bench: Bench, arms: Mapping[str, Arm], *, rounds: int
) -> Iterator[Measurement]:
    """Times and slopes of commands, ratios of slopes, and two parts as the simulation has them.

    Args:
        what: name of the benchmark.
        bench: what is heard.
        arms: commands by name.
        rounds: that count.
    """
    hear(bench, next(iter(arms.values())), bench.corpora["small"])  # compiles and caches kernels
    heard: dict[tuple[str, str], list[Heard]] = {}
    names = list(arms)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for size, corpus in bench.corpora.items():
                heard.setdefault((name, size), []).append(hear(bench, arms[name], corpus))
    for (name, size), runs in heard.items():
        yield from _times(what, bench, name, size, [run.finished for run in runs])
    slopes = {name: _slopes(bench, heard[name, "small"], heard[name, "large"]) for name in names}
    for name, samples in slopes.items():
        yield median_of(what, "slope", "ms/s", samples, params=bench.params, impl=name)
    yield from _ratios(what, bench, slopes)
    if {"one_part", "two_parts"} <= arms.keys():
        yield from _prediction(what, bench, heard)


def _times(
    what: str, bench: Bench, name: str, size: str, runs: Sequence[Finished]
) -> Iterator[Measurement]:
    """Time and CPU time of an arm that heard one of the corpora."""
    corpus = bench.corpora[size]
    params = bench.params | {
        "size": size,
        "audio_s": corpus.audio_s,
        "recordings": corpus.recordings,
    }
    wall_ms = [1e3 * run.wall_s for run in runs]
    cpu_ms = [1e3 * run.cpu_s for run in runs]
    yield median_of(what, "latency", "ms", wall_ms, params=params, warmup=1, impl=name)
    cpu_time = median_of(what, "cpu_time", "ms", cpu_ms, params=params, warmup=1, impl=name)
    yield replace(cpu_time, timer="getrusage(RUSAGE_CHILDREN)")


def _slopes(bench: Bench, small: Sequence[Heard], large: Sequence[Heard]) -> list[float]:
    """Milliseconds that a second of audio takes, of each round."""
    more_s = bench.corpora["large"].audio_s - bench.corpora["small"].audio_s
    return [
        1e3 * (after.finished.wall_s - before.finished.wall_s) / more_s
        for before, after in zip(small, large, strict=True)
    ]


def _ratios(
    what: str, bench: Bench, slopes: Mapping[str, Sequence[float]]
) -> Iterator[Measurement]:
    """The ratios of slopes that have a bar, of arms that ran."""
    for arms, bar in RATIOS:
        if slopes.keys() >= {*arms}:
            above, below = (slopes[name] for name in arms)
            samples = [one / other for one, other in zip(above, below, strict=True)]
            params = bench.params | {"arms": [*arms]} | _unless_quick(bench, bar)
            yield median_of(what, "ratio", "1", samples, params=params, impl=arms[1])


def _unless_quick(bench: Bench, bar: Bar) -> dict[str, Any]:
    """The params of a bar; none for sizes that it does not hold for."""
    return {} if bench.sizes is QUICK else bar.params()


def _prediction(
    what: str, bench: Bench, heard: Mapping[tuple[str, str], Sequence[Heard]]
) -> Iterator[Measurement]:
    """Two parts as the simulation of `asrkit scale` has them, beside those that were measured."""
    small, large = bench.corpora["small"].audio_s, bench.corpora["large"].audio_s
    times_s = [
        statistics.median(run.finished.wall_s for run in heard["one_part", size])
        for size in ("small", "large")
    ]
    if times_s[1] <= times_s[0]:
        return  # with --quick, what is measured is too little to be told from the start
    measured = heard["two_parts", "large"]
    predicted_s = predict(measured[0].shards_s, (small, large), times_s, workers=len(PARTS))
    params = bench.params | {"size": "large", "audio_s": large}
    yield Measurement(
        what, "latency", "ms", 1e3 * predicted_s, params=params, impl=PREDICTED, origin="simulated"
    )
    samples = [run.finished.wall_s / predicted_s for run in measured]
    params = params | {"arms": ["two_parts", PREDICTED]}
    yield median_of(what, "ratio", "1", samples, params=params, impl=PREDICTED)


def predict(
    shards_s: Sequence[float], audio_s: Sequence[float], times_s: Sequence[float], *, workers: int
) -> float:
    """Seconds that parts of a plan take at the same time, by what one part took for two corpora.

    Args:
        shards_s: seconds of audio in each shard of the plan.
        audio_s: seconds of audio in the small corpus and in the large one.
        times_s: seconds that one part took for each of them.
        workers: parts.
    """
    rtfx = (audio_s[1] - audio_s[0]) / (times_s[1] - times_s[0])
    startup_s = max(0.0, times_s[0] - audio_s[0] / rtfx)
    return simulate(shards_s, Fleet(workers=workers, rtfx=rtfx, startup_s=startup_s)).seconds


def measure_resume(bench: Bench) -> Iterator[Measurement]:
    """The whole command for a run that is finished, in a Python that cannot import torch or Ray.

    Args:
        bench: what was heard.
    """
    corpus = bench.corpora["large"]
    with bulk_runs.removed(bench.folder / "out") as out:
        (command,) = _commands(bench, ARMS["one_part"], corpus, out)
        bulk_runs.run([command])
        again = [bulk_runs.WITHOUT_TORCH if word == bulk_runs.ASRKIT else word for word in command]
        runs = [bulk_runs.run([again]) for _ in range(bench.sizes.resumes)]
        for run in runs:
            bulk_runs.expect_all_heard(out, corpus, run)
    params = bench.params | {"recordings": corpus.recordings}
    wall_ms = [1e3 * run.wall_s for run in runs]
    barred = params | _unless_quick(bench, RESUME_BAR)
    yield median_of(RESUME, "latency", "ms", wall_ms, params=barred, impl="finished")
    cpu_ms = [1e3 * run.cpu_s for run in runs]
    yield median_of(RESUME, "cpu_time", "ms", cpu_ms, params=params, impl="finished")


def measure_plan(bench: Bench) -> Iterator[Measurement]:
    """Time and memory of a process that makes the plan of a large manifest.

    Args:
        bench: with the model.
    """
    recordings = bench.sizes.planned
    manifest = bench.folder / "planned.jsonl"
    durations_s = [size / RATE_HZ for size in lengths(5000)]
    with bulk_runs.removed(bench.folder / "out") as out:
        bulk_runs.write_manifest(manifest, recordings, durations_s)
        finished = bulk_runs.run([bulk_runs.plan(manifest, bench.model, out)])
        manifest.unlink()
    (said,) = finished.results
    params = bench.params | {"recordings": recordings, "shards": said["shards"]}
    for metric, unit, value, timer in (
        ("latency", "ms", 1e3 * finished.wall_s, "time.perf_counter"),
        ("cpu_time", "ms", 1e3 * finished.cpu_s, "getrusage(RUSAGE_CHILDREN)"),
        ("peak_memory", "B", said["peak_B"], "VmHWM of its process"),
    ):
        more = _unless_quick(bench, PLAN_BARS[metric]) if metric in PLAN_BARS else {}
        yield Measurement(PLAN, metric, unit, value, params=params | more, impl="plan", timer=timer)


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Records of one case of this suite as aligned lines, one a value, with the bars.

    Args:
        records: of one `what`.
    """
    rows = [list(_row(record)) for record in records]
    if not rows:
        return []
    return aligned([["what", "arm", "of", "measured", "bar", ""], *rows], right=(3,))


def _row(record: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a record."""
    params = record["params"]
    yield record["what"]
    yield " / ".join(params.get("arms", [record["impl"]]))
    yield f"{record['metric']} {params.get('size', '')}".rstrip()
    yield _value(record["value"], record["unit"])
    if "bar" not in params:
        yield from ("", "")
        return
    bar = Bar(params["bar_is"], params["bar"])
    yield f"{bar.kind} {_value(bar.value, record['unit'])}"
    yield "met" if is_met(bar, record["value"]) else "MISSED"


def _value(value: float, unit: str) -> str:
    """A value with a unit that people read."""
    if unit == "ms":
        return f"{value / 1e3:,.2f} s"
    if unit == "B":
        return f"{value / 1e9:.2f} GB"
    if unit == "1":
        return f"{value:.2f}"
    return f"{value:,.2f} {unit}"


def is_met(bar: Bar, value: float) -> bool:
    """Whether a value is what its bar asks for."""
    if bar.kind == AT_MOST:
        return value <= bar.value
    return value >= bar.value


SUITE = Suite(
    name="bulk",
    cases=suite,
    takes_peers=True,
    tables=dict.fromkeys((RUNS, RAY, RESUME, PLAN, READING), table),
)
