"""Benchmark suites: all arms of a comparison on the same inputs in one run, correctness first,
records out.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from asrkit.shapes import expect
from asrkit.workbench.bench import ceilings, guards
from asrkit.workbench.bench.cases import NONE, Case, Seen, check, compared
from asrkit.workbench.bench.guards import Blame
from asrkit.workbench.bench.journal import Journal
from asrkit.workbench.bench.rivals.peers import Peers, Rival
from asrkit.workbench.bench.suites import (
    batching,
    claims,
    decoders,
    encoder,
    ladder,
    losses,
    precision,
    training,
)
from asrkit.workbench.profiling import Timing, measure, ratio
from asrkit.workbench.records import Measurement, append

__all__ = ["LEGEND", "SUITES", "Case", "Peers", "check", "run", "table"]

SUITES: dict[str, Callable[..., Iterator[Any]]] = {
    "losses": losses.suite,
    "decoders": decoders.suite,
    "features": decoders.features,
    "precision": precision.suite,
    "encoder": encoder.suite,
    "batching": batching.suite,
    "claims": claims.suite,
    "ladder": ladder.suite,
    "training": training.suite,
}
EAGER = (
    "losses",
    "decoders",
    "claims",
    "ladder",
)  # call their arms while they make cases, and so have to know what is left out
FEW = 3  # repeats, below which records that were cut short are measured again


class _How(NamedTuple):
    """How cases are measured; see run."""

    device: str
    quick: bool
    peers: Peers | None
    until: float
    enough_s: float
    note: Callable[[Blame], object]
    journal: Journal | None


def run(
    suite: str,
    *,
    device: str = "cpu",
    out: Path | None = None,
    quick: bool = False,
    peers: Peers | None = None,
    say: Callable[[str], object] = bool,
    until: float = inf,
    enough_s: float = 2.0,
    without: re.Pattern[str] = NONE,
    done: Sequence[Mapping[str, Any]] = (),
    lost: Sequence[Blame] = (),
    note: Callable[[Blame], object] = bool,
    journal: Journal | None = None,
    **of_suite: Any,
) -> list[dict[str, Any]]:
    """Sealed records of one suite, appended to `out` as they are made: times and memory of each
    arm, ratios of pairs.

    Before a case is timed its arms must agree, a call that is the first warm-up: one that raises or
    returns other than the first is left out, with a first that raises all are, and AssertionError
    says so once everything else is done. Repeats are 20 at most (5 if quick), and at least 3 unless
    those take over a minute or the time is over: a record's stats say how many. `peers` join the
    cases they fit; `say` gets a line of text before each case. DeviceLost after an error that the
    device did not survive: the process has to end then.

    until: of time.monotonic(); TimeoutError names the first case that would begin later, and one
    that runs ends after the round it is in. enough_s: of repeats, see measure. without: arms and
    cases by name or `way`, left out. done: earlier records, whose cases are not measured again.
    lost: cases and arms that a process died of, left out. note: is told the case and the arm that
    is called first now, both empty when the case is over. journal: keeps what a case has found so
    far. of_suite: what the suite takes beside, see batching.suite.
    """
    expect(suite in SUITES, "suite", "one of " + ", ".join(map(repr, SUITES)), repr(suite))
    made, wrong, how = (
        list[dict[str, Any]](),
        list[str](),
        _How(device, quick, peers, until, enough_s, note, journal),
    )
    without = guards.without_lost(without, lost)
    of_suite |= {"without": without} if suite in EAGER else {}
    of_suite |= {"until": until} if suite == "ladder" and until < inf else {}
    for case in SUITES[suite](device, quick, **of_suite):
        name = _name(case)
        guards.prove_alive(device, name)  # a case is made with calls of its own
        case = _left(case, suite, without, done, lost)
        if case is None:
            continue
        if time.monotonic() >= until:
            raise TimeoutError(f"no time for {name}, and what follows it")
        say(f"{name}: {', '.join(case.arms)}" if isinstance(case, Case) else name)
        note(Blame(name, ""))
        try:
            for found in _found(case, name, how):
                made += _kept(found, out)
        except torch.OutOfMemoryError:
            say(
                f"{name}: its arms fit into memory one by one, if at all, not side by side to be compared"
            )
        except (AssertionError, RuntimeError, ValueError) as error:
            wrong.append(
                str(error)
                if isinstance(error, AssertionError)
                else f"{name}: {type(error).__name__}: {error}"
            )
            say(wrong[-1])
        guards.prove_alive(device, name)
        if journal:
            journal.clear()
        note(Blame("", ""))
    for measurements in _after(suite, device, quick, until, first=bool(of_suite.get("first"))):
        made += _kept(measurements, out)
    if wrong:
        raise AssertionError(" ".join(wrong))
    return made


def _name(case: Any) -> str:
    """A case in a few words: what, shape, and the dtype where it is not float32."""
    if not isinstance(case, Case):
        return str(case)
    dtype = case.params.get("dtype", "float32")
    return " ".join(
        [case.what, "×".join(map(str, case.params["shape"])), *[dtype] * (dtype != "float32")]
    )


def _left(
    case: Any,
    suite: str,
    without: re.Pattern[str],
    done: Iterable[Mapping[str, Any]],
    lost: Iterable[Blame],
) -> Any:
    """What is to be measured of a case: None where it was, or where a process died of it."""
    name, blamed = _name(case), [*lost]
    if Blame(name, "") in blamed:
        return None
    if isinstance(case, Case):
        own = "|".join(f"^{re.escape(one.arm)}$" for one in blamed if one.case == name)
        case = _without(_without(case, without), re.compile(own or NONE.pattern))
        return case if case.arms and not _known(case, done) else None
    ids = {*getattr(case, "ids", ())}
    known = {
        record["what"]
        for record in done
        if record["params"].get("suite") == suite and not record["params"].get("cut")
    }
    return None if ids and ids <= known else case


def _without(case: Case, names: re.Pattern[str]) -> Case:
    """The case without the arms of these names; without any where the first, which the others are
    compared with, is among them.
    """
    dtype = case.params.get("dtype", "float32")
    dtypes = {name: case.of_arm.get(name, {}).get("dtype", dtype) for name in case.arms}
    left = {
        name: arm
        for name, arm in case.arms.items()
        if not guards.barred(names, name, case.what, dtypes[name])
    }
    if len(left) == len(case.arms) and not names.search(case.what):
        return case
    if names.search(case.what) or len(left) < 2 or next(iter(case.arms)) not in left:
        return replace(case, arms={})
    listed = [*case.arms]
    pairs = [(listed[-2], listed[-1])] if case.ratios is None else case.ratios
    proof = case.proof and {name: arm for name, arm in case.proof.items() if name in left}
    return replace(
        case, arms=left, ratios=[pair for pair in pairs if {*pair} <= {*left}], proof=proof
    )


def _known(case: Case, records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all arms of this case are among the records, by its name and the params that no arm
    has a value of its own for.
    """
    own = {key for told in case.of_arm.values() for key in told}
    told = {key: value for key, value in case.params.items() if key not in own}
    same = [
        one for one in records if one["what"] == case.what and told.items() <= one["params"].items()
    ]
    whole = [one for one in same if not one["params"].get("cut") or one["stats"]["n"] >= FEW]
    return {*case.arms} <= {one["impl"] for one in whole if one["metric"] == "latency"}


def _found(case: Any, name: str, how: _How) -> Iterator[Iterable[Measurement]]:
    """Of a case its measurements and what it has more; of a study each as it is made."""
    if isinstance(case, Case):
        yield from _measured(
            _with_peers(case, how.peers) if how.peers and case.peers else case, name, how
        )
        return
    for one in case.measurements():
        yield [one]


def _measured(case: Case, name: str, how: _How) -> Iterator[Iterable[Measurement]]:
    load1 = os.getloadavg()[0]
    seen, wrong = compared(_watched(case, name, how), how.device)
    how.note(Blame(name, ""))
    case = _without(
        case, re.compile("|".join(f"^{re.escape(name)}$" for name in wrong) or NONE.pattern)
    )
    repeats: dict[str, Any] = (
        {"repeats": 5, "warmup": 1} if how.quick else {"repeats": 20, "warmup": case.warmup}
    )
    now = time.monotonic()
    repeats["most_s"] = min(60.0, max(case.least_s, (how.until - now) / max(1, len(case.arms))))
    where = {"threads": torch.get_num_threads(), "device": how.device} | (
        {"quick": True} if how.quick else {}
    )

    def so_far(timings: Callable[[], Mapping[str, Timing]]) -> None:
        if how.journal:
            how.journal.keep(
                lambda: _measurements(
                    case, timings(), seen, {"load1": load1}, where | {"cut": True}
                )
            )

    if case.arms:
        repeats |= {
            "setups": case.setups,
            "enough_s": how.enough_s,
            "device": how.device,
            "watch": so_far,
        }
        timings = measure(case.arms, until=max(how.until, now) + case.least_s, **repeats)
        yield _measurements(case, timings, seen, {"load1": load1}, where)
        yield case.more()
    assert not wrong, " ".join(wrong.values())


def _watched(case: Case, name: str, how: _How) -> Case:
    """The case to be compared: who calls an arm is noted, and after its errors the device has to be
    alive.
    """

    def watched(arm: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            how.note(Blame(name, arm))
            return call(*given)

        return call if isinstance(call, Rival) else guards.guarded(noted, how.device, name, arm)

    arms = {arm: watched(arm, call) for arm, call in case.arms.items()}
    return replace(
        case,
        arms=arms,
        proof=case.proof and {arm: watched(arm, call) for arm, call in case.proof.items()},
    )


def _after(
    suite: str, device: str, quick: bool, until: float, *, first: bool
) -> Iterator[Iterable[Measurement]]:
    """What a suite finds beside its cases, piece by piece."""
    if suite == "losses" and device.startswith("cuda") and not first:
        for limit in losses.limits(device, until):
            yield [limit]
    if suite == "encoder":
        yield ceilings.ceilings(device, quick).measurements


def _with_peers(case: Case, peers: Peers) -> Case:
    arms = peers.arms(**case.peers or {})
    told = {
        name: {"peer": rival.version, "tolerance": 5e-3} | {**case.of_peers}
        for name, rival in arms.items()
    }
    pairs = [(name, case.against.get(name, case.ours)) for name in arms]
    ratios = [*(case.ratios or ()), *(pair for pair in pairs if pair[1] in case.arms)]
    return replace(case, arms={**case.arms, **arms}, of_arm={**case.of_arm, **told}, ratios=ratios)


def _kept(made: Iterable[Measurement], out: Path | None) -> list[dict[str, Any]]:
    sealed = [one.sealed() for one in made]
    if out is not None:
        append(out, *sealed)
    return sealed


def _measurements(
    case: Case,
    timings: Mapping[str, Timing],
    seen: Mapping[str, Seen],
    shared: dict[str, Any],
    where: dict[str, Any],
) -> Iterator[Measurement]:
    common = {"dtype": "float32"} | case.params | where
    for name, timing in timings.items():
        told = shared | {
            "impl": name,
            "params": common | case.of_arm.get(name, {}) | {**seen[name].told},
        }
        timed = told | {"warmup": timing.warmup}
        yield Measurement(
            case.what,
            "latency",
            "ms",
            timing.median_ms,
            timing.samples_ms,
            timer=timing.timer,
            **timed,
        )
        if seconds := case.params.get("audio_s"):
            rates = tuple(1e3 * seconds / ms for ms in timing.samples_ms)
            yield Measurement(
                case.what,
                "rtfx",
                "s/s",
                1e3 * seconds / timing.median_ms,
                rates,
                timer=timing.timer,
                **timed,
            )
        if timing.cpu_ms:
            yield Measurement(
                case.what,
                "cpu_time",
                "ms",
                median(timing.cpu_ms),
                timing.cpu_ms,
                timer="time.process_time_ns",
                **timed,
            )
        if (peak := seen[name].peak_B) is not None:
            by = "VmHWM of its process" if isinstance(case.arms[name], Rival) else "torch allocator"
            yield Measurement(case.what, "peak_memory", "B", peak, timer=by, **told)
    names = [*case.arms]
    for slow, fast in [(names[-2], names[-1])] if case.ratios is None else case.ratios:
        if slow not in timings or fast not in timings:  # so far
            continue
        ratios, last = ratio(timings, slow, fast), timings[fast]
        told = shared | {
            "impl": fast,
            "params": common | case.of_arm.get(fast, {}) | {"arms": [slow, fast]},
        }
        yield Measurement(
            case.what,
            "ratio",
            "1",
            median(ratios),
            ratios,
            timer=last.timer,
            warmup=last.warmup,
            **told,
        )


UNITS = {"1": ("", 1), "B": ("MiB", 2**20), "FLOP/s": ("GFLOP/s", 1e9), "B/s": ("GB/s", 1e9)}
COUNTS = {"join": "joint", "predict": "predictor", "launches": "launches", "syncs": "waits"}
COLUMNS = (
    "what",
    "shape",
    "implementation",
    "time",
    "quartiles",
    "times as fast as",
    "RTFx",
    "CPU time",
    "MiB",
    "least work",
    "calls",
    "also",
)
CELLS = {"latency": "time", "rtfx": "RTFx", "cpu_time": "CPU time", "peak_memory": "MiB"}


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Aligned lines of text, one an arm: its time, ratios, memory, the rates of the least work
    (`floor_…`), counts of the call.

    Records of "batching" come last, with a line an arm and a legend of their own.
    """
    records = [*records]
    planned = [record for record in records if record["what"] == "batching"]
    rows = dict[tuple[str, str, str], dict[str, str]]()
    for record in records:
        if record["what"] == "batching":
            continue
        params, metric = record["params"], record["metric"]
        unit, size = UNITS.get(record["unit"], (record["unit"], 1))
        value, low, high = (
            f"{number / size:.3g}"
            for number in (record["value"], record["stats"]["p25"], record["stats"]["p75"])
        )
        impl = record["impl"] + " (random weights)" * (
            "random" in params.get("weights", "") and record["unit"] in ("nats", "fraction")
        )
        impl += " (bfloat16)" * (params.get("dtype") == "bfloat16" and "bfloat16" not in impl)
        what = " ".join(filter(None, (record["what"], params.get("preset"))))
        key = what, "×".join(map(str, params.get("shape", []))), impl
        row = rows.setdefault(key, dict(zip(COLUMNS, key, strict=False)))
        if metric == "ratio" and "arms" in params:
            row["times as fast as"] = ", ".join(
                filter(None, (row.get("times as fast as"), f"{params['arms'][0]} {value}"))
            )
        elif metric in CELLS:
            row[CELLS[metric]] = value if metric in ("rtfx", "peak_memory") else f"{value} {unit}"
        else:
            row["also"] = ", ".join(
                filter(None, (row.get("also"), f"{metric} {value} {unit}".rstrip()))
            )
        if metric == "latency":
            row["quartiles"] = f"{low}–{high}"
            floors = {
                key[6:]: least / record["value"] / 1e6
                for key, least in params.items()
                if key.startswith("floor_")
            }
            peaks = {
                key: f" ({1e9 * rate / params[f'peak_{key}']:.0%})"
                for key, rate in floors.items()
                if f"peak_{key}" in params
            }
            row["least work"] = ", ".join(
                f"{rate:.3g} G{key}/s{peaks.get(key, '')}" for key, rate in floors.items()
            )
            row["calls"] = ", ".join(
                f"{params[key]} {name}" for key, name in COUNTS.items() if key in params
            )
    columns = [name for name in COLUMNS if any(row.get(name) for row in rows.values())]
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows.values())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return (lines if rows or not planned else []) + batching.table(planned)


LEGEND = (
    "times as fast as: another arm's time over this one's. CPU time: of all threads. least work: what no implementation "
    "can do without, by the time it took, and its share of the machine's measured peak. calls: of the joint and the predictor, "
    "what they start on a GPU, waits for a GPU. shape: of losses B×T×U1×V, of decoders B×T×D×V or B×T×V, of encoders B×T×D×blocks, "
    "of features and precision B×T×F. noise: error over what tells frames apart; flips: share of frames with another best token; "
    "kl: nats a frame; token_errors: edits of the tokens over their number; all against float64. With random weights these four "
    "say nothing of a trained model."
)
