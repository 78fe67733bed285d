"""Runs a suite: every case is compared, then timed, and its records are written as it ends."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.bench import guards
from asrkit.workbench.bench.agreement import Observation, compare_arms
from asrkit.workbench.bench.cases import NOTHING, Case, Suite, failure
from asrkit.workbench.bench.guards import NO_BLAME, Blame
from asrkit.workbench.bench.peers.processes import Peer, Peers
from asrkit.workbench.bench.suites import SUITES
from asrkit.workbench.profiling import Timing, measure, ratio
from asrkit.workbench.records import Measurement

if TYPE_CHECKING:
    from asrkit.workbench.bench.share.journal import Journal

Record = dict[str, Any]
FEW_REPEATS = 3  # records that were cut short at fewer are measured again
MOST_S = 60.0  # that the repeats of one arm may take
PEER_TOLERANCE = 5e-3


def ignore(told: object) -> None:
    """Do nothing: the default of `say` and `note`."""


def run(  # noqa: PLR0913 what to run, and for a supervised run what to leave out and whom to tell
    suite: str,
    *,
    device: str = "cpu",
    out: Path | None = None,
    quick: bool = False,
    peers: Peers | None = None,
    say: Callable[[str], object] = ignore,
    until: float = inf,
    enough_s: float = 2.0,
    without: re.Pattern[str] = NOTHING,
    done: Sequence[Mapping[str, Any]] = (),
    lost: Sequence[Blame] = (),
    note: Callable[[Blame], object] = ignore,
    journal: "Journal | None" = None,
    **options: Any,
) -> list[Record]:
    """Measure a suite; returns its sealed records: times and memory of each arm, ratios of pairs.

    The arms of a case are compared before they are timed. An arm that raises, or returns other than
    the first, is left out; if the first raises, all are. Each is repeated at most 20 times (5 if
    quick), and at least 3 times unless those take over a minute or the time is over.

    Args:
        suite: a name in SUITES.
        device: "cpu" or "cuda".
        out: file that records are appended to as they are made; None keeps them in memory only.
        quick: small sizes and few repeats.
        peers: other packages, whose arms join the cases that they fit.
        say: called with a line of text before each case, and with each failure.
        until: time.monotonic() after which no case begins; one that runs ends after its round.
        enough_s: seconds of repeats after which an arm needs no more, see `measure`.
        without: pattern of arms and cases to leave out, by name or as `guards.way` has it.
        done: earlier records; cases that they hold are not measured again.
        lost: cases and arms that ended an earlier process; they are left out.
        note: called with the case and arm that is called first now, both empty between cases.
        journal: keeps the measurements of a case whose repeats still go on.
        **options: options of the suite, such as `lengths` of batching.

    Raises:
        AssertionError: once everything else is done, with all failures.
        TimeoutError: names the first case that would have begun after `until`.
        DeviceLost: the device did not survive an error, so the process has to end.
    """
    running = _Run(
        suite=_suite(suite),
        device=device,
        out=out,
        quick=quick,
        peers=peers,
        say=say,
        until=until,
        enough_s=enough_s,
        without=guards.without_lost(without, lost),
        done=done,
        lost=lost,
        note=note,
        journal=journal,
    )
    return running.measure_all(options)


def _suite(name: str) -> Suite:
    expect(name in SUITES, "suite", "one of " + ", ".join(map(repr, SUITES)), repr(name))
    return SUITES[name]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The arguments of `run`, and the records and failures so far."""

    suite: Suite
    device: str
    out: Path | None
    quick: bool
    peers: Peers | None
    say: Callable[[str], object]
    until: float
    enough_s: float
    without: re.Pattern[str]
    done: Sequence[Mapping[str, Any]]
    lost: Sequence[Blame]
    note: Callable[[Blame], object]
    journal: "Journal | None"
    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure_all(self, options: Mapping[str, Any]) -> list[Record]:
        """Measure all cases; returns the records, or raises AssertionError with the failures."""
        for case in self.cases(options):
            self.case(case)
            del case  # its arms are freed before those of the next are made
        if self.failures:
            raise AssertionError(" ".join(self.failures))
        return self.records

    def cases(self, options: Mapping[str, Any]) -> Iterator[Case]:
        """The cases of the suite, or what is left of them, that are to be measured in this run."""
        own = {"without": self.without, "until": self.until, "peers": self.peers}
        more = {name: own[name] for name in self.suite.takes}
        for case in self.suite.cases(self.device, self.quick, **options, **more):
            guards.prove_alive(self.device, case.title)  # making a case calls the device too
            left = self.remaining(case)
            del case
            if left is not None:
                yield left
            del left

    def remaining(self, case: Case) -> Case | None:
        """The case without the arms to leave out; None if all of it was measured or is left out."""
        if Blame(case.title, "") in self.lost:
            return None
        if not case.arms:
            measured = case.claims and known_claims(self.suite.name, self.done) >= {*case.claims}
            if measured or not (case.measure or case.refused):
                return None
            return case
        blamed = [blame.arm for blame in self.lost if blame.case == case.title]
        case = without_arms(without_arms(case, self.without), names_pattern(blamed))
        if not case.arms or is_known(case, self.done):
            return None
        return case

    def case(self, case: Case) -> None:
        """Measure one case; its failure is kept, and the run goes on."""
        if time.monotonic() >= self.until:
            raise TimeoutError(f"no time for {case.title}, and what follows it")
        words = [case.title]
        if case.arms:
            words.append(", ".join(case.arms))
        self.say(": ".join(words))
        self.note(Blame(case.title, ""))
        try:
            for measurements in self.measurements(case):
                self.keep(measurements)
        except torch.OutOfMemoryError:
            self.say(
                f"{case.title}: its arms fit into memory one by one, if at all,"
                " not side by side to be compared"
            )
        except (AssertionError, RuntimeError, ValueError) as error:
            self.fail(failure(case.title, error))
        guards.prove_alive(self.device, case.title)
        if self.journal:
            self.journal.clear()
        self.note(NO_BLAME)

    def fail(self, message: str) -> None:
        """Keep the message of a failure, and say it."""
        self.failures.append(message)
        self.say(message)

    def keep(self, measurements: Iterable[Measurement]) -> None:
        """Seal measurements and write them to `out`."""
        sealed = [measurement.sealed() for measurement in measurements]
        if self.out is not None:
            with guards.naming(self.out):
                records.append(self.out, *sealed)
        self.records.extend(sealed)

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
        observations, failures = compare_arms(self.watched(case), self.device)
        self.note(Blame(case.title, ""))
        case = without_arms(case, names_pattern(failures))
        params: dict[str, Any] = {"threads": torch.get_num_threads(), "device": self.device}
        if self.quick:
            params["quick"] = True

        def results(timings: Mapping[str, Timing], **more: Any) -> Iterator[Measurement]:
            return arm_measurements(case, timings, observations, load1, params | more)

        def keep_so_far(timings: Callable[[], Mapping[str, Timing]]) -> None:
            if self.journal:
                self.journal.keep(lambda: results(timings(), cut=True))

        if case.arms:
            yield results(self.timings(case, keep_so_far))
            yield case.more()
        assert not failures, " ".join(failures.values())

    def timings(self, case: Case, watch: Callable[..., object]) -> dict[str, Timing]:
        """Timings of the arms of a case; `watch` is called after each call that counts."""
        now = time.monotonic()
        each_s = (self.until - now) / len(case.arms)
        return measure(
            case.arms,
            setups=case.setups,
            repeats=5 if self.quick else 20,
            warmup=1 if self.quick else case.warmup,
            enough_s=self.enough_s,
            most_s=min(MOST_S, max(case.least_s, each_s)),
            device=self.device,
            until=max(self.until, now) + case.least_s,
            watch=watch,
        )

    def watched(self, case: Case) -> Case:
        """The case to compare: `note` learns which arm is called, and errors ask the device."""

        def watch(arm: str, call: Callable[..., Any]) -> Callable[..., Any]:
            if isinstance(call, Peer):
                return call

            def noted(*arguments: Any) -> Any:
                self.note(Blame(case.title, arm))
                return call(*arguments)

            return guards.guarded(noted, self.device, case.title, arm)

        arms = {name: watch(name, call) for name, call in case.arms.items()}
        compared = case.compared_arms
        if compared is not None:
            compared = {name: watch(name, call) for name, call in compared.items()}
        return replace(case, arms=arms, compared_arms=compared)


def names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches these names of arms and no other name."""
    exact = [f"^{re.escape(name)}$" for name in names]
    return re.compile("|".join(exact) or NOTHING.pattern)


def without_arms(case: Case, names: re.Pattern[str]) -> Case:
    """The case without the arms that match.

    It has no arms at all if the first matches, which the others are compared with, if only one
    would be left, or if the name of the case matches.
    """
    left = {}
    for name, arm in case.arms.items():
        dtype = case.arm_params.get(name, {}).get("dtype", case.dtype)
        if not guards.barred(names, name, case.what, dtype):
            left[name] = arm
    if names.search(case.what):
        return replace(case, arms={})
    if len(left) == len(case.arms):
        return case
    if len(left) < 2 or next(iter(case.arms)) not in left:
        return replace(case, arms={})
    compared = case.compared_arms
    if compared is not None:
        compared = {name: arm for name, arm in compared.items() if name in left}
    pairs = [pair for pair in case.pairs() if left.keys() >= {*pair}]
    return replace(case, arms=left, ratios=pairs, compared_arms=compared)


def known_claims(suite: str, done: Iterable[Mapping[str, Any]]) -> set[str]:
    """Claims that a suite has recorded, not counting what was cut short."""
    return {
        record["what"]
        for record in done
        if record["params"].get("suite") == suite and not record["params"].get("cut")
    }


def is_known(case: Case, done: Iterable[Mapping[str, Any]]) -> bool:
    """Whether records hold times of all arms of this case.

    They are matched by the name of the case and by the params that are the same for all arms.
    """
    own = {key for params in case.arm_params.values() for key in params}
    shared = {key: value for key, value in case.params.items() if key not in own}
    timed = set()
    for record in done:
        params = record["params"]
        matches = record["what"] == case.what and shared.items() <= params.items()
        complete = not params.get("cut") or record["stats"]["n"] >= FEW_REPEATS
        if matches and complete and record["metric"] == "latency":
            timed.add(record["impl"])
    return timed >= case.arms.keys()


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
            "params": common | case.arm_params.get(name, {}) | {**observation.counts},
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
