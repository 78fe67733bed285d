"""Runs a suite: every case is compared, then timed, and its records are written as it ends."""

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
from benchmarks.harness.cases import Case, failure
from benchmarks.peers.processes import Peers, digest
from benchmarks.suites import SUITES

Record = dict[str, Any]
MOST_S = 60.0  # that the repeats of one arm may take
ENOUGH_S = {"cpu": 2.0, "cuda": 0.5}  # of repeats, after which an arm needs no more
PEER_TOLERANCE = 5e-3


def run(
    suite: str,
    *,
    device: str = "cpu",
    out: Path | None = None,
    quick: bool = False,
    peers: Peers | None = None,
    say: Callable[[str], object] = bool,
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
    if SUITES[suite].takes_peers:
        options["peers"] = peers
    found: list[Record] = []
    failures: list[str] = []
    for case in SUITES[suite].cases(device, quick, **options):
        if not (case.arms or case.measure or case.refused):
            continue
        say(": ".join(filter(None, [case.title, ", ".join(case.arms)])))
        try:
            for measurement in measurements(case, device, quick, peers):
                found.append(measurement.record())
                if out is not None:
                    _append(out, found[-1])
        except torch.OutOfMemoryError:
            say(
                f"{case.title}: its arms fit into memory one by one, if at all,"
                " not side by side to be compared"
            )
        except OSError:  # the records cannot be written
            raise
        except Exception as error:  # whatever a case raises, the others go on
            failures.append(failure(case.title, error))
            say(failures[-1])
        del case  # its arms are freed before those of the next are made
    assert not failures, " ".join(failures)
    return found


def _append(out: Path, record: Record) -> None:
    """Write a record; an error names the file, which the system's "No space left" does not."""
    try:
        records.append(out, record)
    except OSError as error:
        raise OSError(error.errno, error.strerror, out.name) from error


def measurements(
    case: Case, device: str, quick: bool, peers: Peers | None
) -> Iterator[Measurement]:
    """The measurements of a case, each as soon as it is there.

    Raises:
        AssertionError: at the end, if any arm failed.
    """
    assert not case.refused, case.refused
    cuda = device == "cuda"
    of_run: dict[str, Any] = {"gpu_before": gpu_state()} if cuda else {}
    if quick:
        of_run["quick"] = True
    if case.measure:
        for measurement in case.measure():
            if cuda:
                of_run["gpu_after"] = gpu_state()
            yield replace(measurement, params=measurement.params | of_run)
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
        params = {"threads": torch.get_num_threads(), "device": device, **of_run}
        if cuda:
            params["gpu_after"] = gpu_state()
        case = replace(case, params={"dtype": "float32", **case.params, **params})
        for measurement in timed(case, timings, observations):
            yield replace(measurement, load1=load1)
        yield from case.more()
    assert not failures, " ".join(failures.values())


def with_peers(case: Case, peers: Peers | None) -> Case:
    """The case with the arms of the peers that fit it, and their ratios to ours."""
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
        case: the case, with the arms that agree.
        timings: times by arm; an arm without any has no measurements.
        observations: what comparing the arms found out beside their results.
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
