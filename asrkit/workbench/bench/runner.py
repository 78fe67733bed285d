"""Runs a suite: every case is compared, then timed, and its records are written as it ends."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.bench.agreement import Observation, compare_arms
from asrkit.workbench.bench.cases import Case, Suite, failure
from asrkit.workbench.bench.peers.processes import Peer, Peers
from asrkit.workbench.bench.suites import SUITES
from asrkit.workbench.machine import gpu_state
from asrkit.workbench.measure import Timing, measure, ratio
from asrkit.workbench.records import Measurement

Record = dict[str, Any]
MOST_S = 60.0  # that the repeats of one arm may take
ENOUGH_S = {"cpu": 2.0, "cuda": 0.5}  # of repeats, after which an arm needs no more
PEER_TOLERANCE = 5e-3


def ignore(line: str) -> None:
    """Do nothing: the default of `say`."""


def run(
    suite: str,
    *,
    device: str = "cpu",
    out: Path | None = None,
    quick: bool = False,
    peers: Peers | None = None,
    say: Callable[[str], object] = ignore,
    **options: Any,
) -> list[Record]:
    """Measure a suite; returns its records: times and memory of each arm, ratios of pairs.

    The arms of a case are compared before they are timed. An arm that raises, or returns other than
    the first, is left out; if the first raises, all are. Each is repeated at most 20 times (5 if
    quick), and at least 3 times unless those take over a minute.

    Args:
        suite: a name in SUITES.
        device: "cpu" or "cuda".
        out: file that records are appended to as they are made; None keeps them in memory only.
        quick: small sizes and few repeats.
        peers: other packages, whose arms join the cases that they fit.
        say: called with a line of text before each case, and with each failure.
        **options: options of the suite, such as `lengths` of batching.

    Raises:
        AssertionError: once everything else is done, with all failures.
    """
    expect(suite in SUITES, "suite", "one of " + ", ".join(map(repr, SUITES)), repr(suite))
    running = _Run(SUITES[suite], device, out, quick, peers, say)
    return running.measure_all(options)


@dataclass(frozen=True)
class _Run:
    """The arguments of `run`, and the records and failures so far."""

    suite: Suite
    device: str
    out: Path | None
    quick: bool
    peers: Peers | None
    say: Callable[[str], object]
    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure_all(self, options: Mapping[str, Any]) -> list[Record]:
        """Measure all cases; returns the records, or raises AssertionError with the failures."""
        more: dict[str, Any] = {}
        if self.suite.takes_peers:
            more["peers"] = self.peers
        for case in self.suite.cases(self.device, self.quick, **options, **more):
            if case.arms or case.measure or case.refused:
                self.case(case)
            del case  # its arms are freed before those of the next are made
        if self.failures:
            raise AssertionError(" ".join(self.failures))
        return self.records

    def case(self, case: Case) -> None:
        """Measure one case; its failure is kept, and the run goes on."""
        words = [case.title]
        if case.arms:
            words.append(", ".join(case.arms))
        self.say(": ".join(words))
        cuda = self.device.startswith("cuda")
        before = gpu_state() if cuda else None
        try:
            for measurements in self.measurements(case):
                if cuda:
                    measurements = _with_state(measurements, before)
                self.keep(measurements)
        except torch.OutOfMemoryError:
            self.say(
                f"{case.title}: its arms fit into memory one by one, if at all,"
                " not side by side to be compared"
            )
        except (AssertionError, RuntimeError, ValueError) as error:
            self.fail(failure(case.title, error))

    def fail(self, message: str) -> None:
        """Keep the message of a failure, and say it."""
        self.failures.append(message)
        self.say(message)

    def keep(self, measurements: Iterable[Measurement]) -> None:
        """Write the records of these measurements to `out`."""
        made = [measurement.record() for measurement in measurements]
        if self.out is not None:
            with _naming(self.out):
                records.append(self.out, *made)
        self.records.extend(made)

    def measurements(self, case: Case) -> Iterator[Iterable[Measurement]]:
        """The measurements of a case, in pieces that are written as soon as they are there."""
        if case.refused:
            self.fail(case.refused)
        elif case.measure:
            for measurement in case.measure():
                yield [measurement]
        else:
            yield from self.timed(with_peers(case, self.peers))

    def timed(self, case: Case) -> Iterator[Iterable[Measurement]]:
        """Compare the arms, then time those that agree; AssertionError at the end if any failed."""
        load1 = os.getloadavg()[0]
        observations, failures = compare_arms(case, self.device)
        case = without_arms(case, failures)
        params: dict[str, Any] = {"threads": torch.get_num_threads(), "device": self.device}
        if self.quick:
            params["quick"] = True
        if case.arms:
            timings = measure(
                case.arms,
                setups=case.setups,
                repeats=5 if self.quick else 20,
                warmup=1 if self.quick else case.warmup,
                enough_s=ENOUGH_S[torch.device(self.device).type],
                most_s=MOST_S,
                device=self.device,
            )
            yield arm_measurements(case, timings, observations, load1, params)
            yield case.more()
        assert not failures, " ".join(failures.values())


def _with_state(measurements: Iterable[Measurement], before: Any) -> Iterator[Measurement]:
    """The measurements of a case with the state of the GPUs before it (`before`) and after."""
    made = [*measurements]
    state = {"gpu_before": before, "gpu_after": gpu_state()}
    for measurement in made:
        yield replace(measurement, params=measurement.params | state)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing in this block name the file: the system's "No space left" names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path.name) from error
        raise


def without_arms(case: Case, names: Iterable[str]) -> Case:
    """The case without the arms of these names; without any arms if only one would be left."""
    left = {name: arm for name, arm in case.arms.items() if name not in {*names}}
    if len(left) == len(case.arms):
        return case
    if len(left) < 2:
        return replace(case, arms={})
    pairs = [pair for pair in case.pairs() if left.keys() >= {*pair}]
    return replace(case, arms=left, ratios=pairs)


def with_peers(case: Case, peers: Peers | None) -> Case:
    """The case with the arms of the peers that fit it, and their ratios to ours."""
    if peers is None or case.peers is None:
        return case
    arms = peers.arms(**case.peers.request)
    params = dict(case.arm_params)
    pairs = list(case.ratios or ())
    for name, peer in arms.items():
        params[name] = {"peer": peer.version, "tolerance": PEER_TOLERANCE, **case.peers.params}
        ours = case.peers.against.get(name, case.peers.ours)
        if ours in case.arms:
            pairs.append((name, ours))
    return replace(case, arms={**case.arms, **arms}, arm_params=params, ratios=pairs)


def arm_measurements(
    case: Case,
    timings: Mapping[str, Timing],
    observations: Mapping[str, Observation],
    load1: float,
    params: Mapping[str, Any],
) -> Iterator[Measurement]:
    """Measurements of a case: time, rate and memory of each arm, then the ratios of pairs.

    Args:
        case: the case, with the arms that agree.
        timings: times by arm; an arm without any has no measurements yet.
        observations: what comparing the arms found out beside their results.
        load1: load of the machine over the minute before the case began.
        params: params of the run, added to those of the case.
    """
    common = {"dtype": "float32", **case.params, **params}
    for name, timing in timings.items():
        observation = observations[name]
        shared: dict[str, Any] = {
            "impl": name,
            "load1": load1,
            "params": common | case.arm_params.get(name, {}) | {**observation.params},
        }
        yield from _times(case, timing, shared)
        if observation.peak_B is not None:
            is_peer = isinstance(case.arms[name], Peer)
            timer = "VmHWM of its process" if is_peer else "torch allocator"
            peak_B = observation.peak_B
            yield Measurement(case.what, "peak_memory", "B", peak_B, timer=timer, **shared)
    for slow, fast in case.pairs():
        if slow in timings and fast in timings:
            arm_params = case.arm_params.get(fast, {})
            shared = {
                "impl": fast,
                "load1": load1,
                "params": common | arm_params | {"arms": [slow, fast]},
            }
            yield _ratio(case, timings, slow, fast, shared)


def _times(case: Case, timing: Timing, shared: Mapping[str, Any]) -> Iterator[Measurement]:
    what = case.what
    timed = {"warmup": timing.warmup, **shared}
    median_ms = timing.median_ms
    clock = {"timer": timing.timer, **timed}
    yield Measurement(what, "latency", "ms", median_ms, timing.samples_ms, **clock)
    seconds = case.params.get("audio_s")
    if seconds:
        rates = tuple(1e3 * seconds / ms for ms in timing.samples_ms)
        yield Measurement(what, "rtfx", "s/s", 1e3 * seconds / median_ms, rates, **clock)
    cpu_ms = timing.cpu_ms
    if cpu_ms:
        timer = "time.process_time_ns"
        yield Measurement(what, "cpu_time", "ms", median(cpu_ms), cpu_ms, timer=timer, **timed)


def _ratio(
    case: Case, timings: Mapping[str, Timing], slow: str, fast: str, shared: Mapping[str, Any]
) -> Measurement:
    ratios = ratio(timings, slow, fast)
    timing = timings[fast]
    clock: dict[str, Any] = {"timer": timing.timer, "warmup": timing.warmup, **shared}
    return Measurement(case.what, "ratio", "1", median(ratios), ratios, **clock)
