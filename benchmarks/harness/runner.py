"""Run a suite: compare the arms of each case, time them, and write their records."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.machine import gpu_state
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.measure.comparison import Observation, RemoteArm, compare_arms
from asrkit.workbench.measure.publishing import arm_measurements, time_ratio
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case
from benchmarks.peers.processes import Peers, digest
from benchmarks.suites import SUITES

Record = dict[str, Any]
MOST_S = 60.0  # time limit for the repeats of one arm
ENOUGH_S = {"cpu": 2.0, "cuda": 0.5}  # an arm is not repeated further after this time
PEER_TOLERANCE = 5e-3


def run(
    suite: str,
    *,
    device: str = "cpu",
    out: Path | None = None,
    quick: bool = False,
    peers: Peers | None = None,
    log: Callable[[str], object] = bool,
    kept: Callable[[list[Record]], object] = bool,
    only: str = "",
    **options: Any,
) -> list[Record]:
    """Measure a suite; returns its records: times and memory of each arm, ratios of pairs. A suite
    with a table of its own is resumed, and the records that `out` had are returned too.

    The arms of a case are compared before they are timed. An arm that raises, or whose result
    differs from the first arm's, is left out; if the first arm raises, all are. Each arm is
    repeated at most 20 times (5 if quick), and at least 3 times unless these take over a minute.

    Args:
        suite: a name in SUITES.
        device: "cpu" or "cuda".
        out: file that each record is appended to at once; None: no file.
        quick: small sizes and few repeats.
        peers: other packages whose arms join the cases that name them.
        log: called with a line before each case, and with each failure.
        kept: called with the records that `out` had of a case, which is not measured again.
        only: text that the title of a case must contain to be measured.
        **options: options of the suite, such as `lengths` of batching.

    Raises:
        AssertionError: some cases failed; raised after all others were measured.
        ValueError: no title contains `only`.
    """
    expect(suite in SUITES, "suite", "one of " + ", ".join(map(repr, SUITES)), repr(suite))
    if SUITES[suite].takes_peers:
        options["peers"] = peers
    before = _recorded(out) if SUITES[suite].rows else []
    measured: list[Record] = []
    failures: list[str] = []
    for case in _chosen(SUITES[suite].cases(device, quick, **options), only):
        done = [record for record in before if case.params.items() <= record["params"].items()]
        if done:
            measured += done
            kept(done)
            continue
        log(": ".join(filter(None, [case.title, ", ".join(case.arms)])))
        try:
            for measurement in measurements(case, device, quick, peers):
                measured.append(measurement.record())
                if out is not None:
                    _append(out, measured[-1])
        except torch.OutOfMemoryError:
            log(f"{case.title}: its arms do not fit into memory together to be compared")
        except OSError:  # the records cannot be written
            raise
        except Exception as error:  # a case that fails does not end the suite
            failures.append(_failure(case.title, error))
            log(failures[-1])
        del case  # free its arms before the next case is built
    assert not failures, " ".join(failures)
    return measured


def _chosen(cases: Iterator[Case], only: str) -> Iterator[Case]:
    """The cases with something to measure whose title contains `only`; ValueError without one."""
    titles: list[str] = []
    for case in cases:
        if case.arms or case.measure:
            titles.append(case.title)
            if only in titles[-1]:
                yield case
        del case  # free its arms before the next case is built
    found = not only or any(only in title for title in titles)
    expect(found, "only", "text of a title: " + "; ".join(titles), repr(only))


def _recorded(out: Path | None) -> list[Record]:
    """The records in a file, if there is one, that this machine took at this commit."""
    if out is None or not out.exists():
        return []
    here = records.measured_on(Measurement("", "", "1", 0).record())
    return [record for record in records.read(out) if records.measured_on(record) == here]


def _failure(title: str, error: Exception) -> str:
    """One line on why a case failed; the message of an AssertionError already names the case."""
    if isinstance(error, AssertionError):
        return str(error)
    return f"{title}: {type(error).__name__}: {error}"


def _append(out: Path, record: Record) -> None:
    """Append a record. The error of a full disk names no file; here it does."""
    try:
        records.append(out, record)
    except OSError as error:
        raise OSError(error.errno, error.strerror, out.name) from error


def measurements(
    case: Case, device: str, quick: bool, peers: Peers | None
) -> Iterator[Measurement]:
    """The measurements of a case.

    Raises:
        AssertionError: an arm failed; raised after all others were measured.
    """
    cuda = device == "cuda"
    run_params: dict[str, Any] = {"gpu_before": gpu_state()} if cuda else {}
    if quick:
        run_params["quick"] = True
    if case.measure:
        for measurement in case.measure():
            if cuda:
                run_params["gpu_after"] = gpu_state()
            yield replace(measurement, params=measurement.params | run_params)
        return
    load1 = os.getloadavg()[0]
    case = with_peers(case, peers)
    observations, failures = compare_arms(case, device)
    agreeing = {name: arm for name, arm in case.arms.items() if name not in failures}
    if len(agreeing) > 1 or not failures:
        case = replace(case, arms=agreeing, ratios=case.pairs())
        timings = measure(
            case.arms,
            setups=case.setups,
            repeats=5 if quick else 20,
            warmup=1 if quick else case.warmup,
            enough_s=ENOUGH_S[device],
            most_s=MOST_S,
            device=device,
        )
        params = {"threads": torch.get_num_threads(), "device": device, **run_params}
        if cuda:
            params["gpu_after"] = gpu_state()
        case = replace(case, params={"dtype": "float32", **case.params, **params})
        for measurement in timed(case, timings, observations):
            yield replace(measurement, load1=load1)
        yield from case.more()
    assert not failures, " ".join(failures.values())


def with_peers(case: Case, peers: Peers | None) -> Case:
    """The case with the arms of its peers, and their ratios to ours."""
    if peers is None or case.peers is None:
        return case
    arms = peers.arms(**case.peers.request)
    params = dict(case.arm_params)
    pairs = list(case.pairs())
    for name, peer in arms.items():
        params[name] = {"peer": peer.version, "tolerance": PEER_TOLERANCE, **case.peers.params}
        ours = case.peers.against.get(name, case.peers.ours)
        if ours in case.arms:
            pairs.append((name, ours))
    return replace(
        case,
        arms={**case.arms, **arms},
        arm_params=params,
        ratios=pairs,
        digest=partial(digest, logits=case.peers.logits),
    )


def timed(
    case: Case, timings: Mapping[str, Timing], observations: Mapping[str, Observation]
) -> Iterator[Measurement]:
    """Time, rate and memory of each arm, then the ratios of pairs.

    Args:
        case: its arms agree.
        timings: times of the arms that were measured.
        observations: peak memory and implementation of each arm.
    """
    for name, timing in timings.items():
        observation = observations[name]
        params = {**case.params, **case.arm_params.get(name, {}), **observation.params}
        is_peer = isinstance(case.arms[name], RemoteArm)
        yield from arm_measurements(
            case.what,
            timing,
            audio_s=case.params.get("audio_s"),
            peak_B=observation.peak_B,
            memory_timer="VmHWM of its process" if is_peer else "torch allocator",
            impl=name,
            params=params,
        )
    for slow, fast in case.pairs():
        if {slow, fast} <= timings.keys():
            params = {**case.params, **case.arm_params.get(fast, {}), "arms": [slow, fast]}
            yield time_ratio(case.what, timings, slow, fast, impl=fast, params=params)
