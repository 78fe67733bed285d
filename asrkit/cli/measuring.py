"""`asrkit bench`, `doctor`, `verify` and `records add`."""

import argparse
import contextlib
import functools
import json
import sys
from collections import Counter
from pathlib import Path

from asrkit import files
from asrkit.cli.options import DEVICE, THREADS, Commands, prepare, writable

MINUTES = 9.0  # of a share, where only the plan is asked for


def _bench(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect

    expect(args.suite == "all" or not args.plan, "plan", "the suite all", args.suite)
    if args.plan:
        from asrkit.workbench.bench import plan

        print("\n".join(plan.lines(args.minutes or MINUTES)))
        print(json.dumps({"parts": [part.name for part in plan.PARTS]}))
        return 0
    prepare(args)
    from asrkit.workbench import bench

    expect(
        args.minutes is not None or not args.resume,
        "resume",
        "--minutes beside it",
        "none",
        "Only a share is gone on with.",
    )
    own = {name: value for name in ("lengths", "ranks") if (value := getattr(args, name))}
    if args.minutes is not None:
        expect(
            args.suite == "all",
            "minutes",
            "the suite all",
            args.suite,
            "Other suites take the time they take.",
        )
        also = [*own, *["peers"] * args.peers]
        expect(
            not also,
            ", ".join(also),
            "nothing with --minutes",
            "both",
            "What these measure needs no GPU.",
        )
        return _share(args)
    args.out = args.out or Path("reports/bench.jsonl")
    expect(
        not args.out.is_dir(),
        "out",
        "a file",
        repr(str(args.out)),
        "A folder takes what `bench all --minutes` finds.",
    )
    expect(not own or args.suite == "batching", ", ".join(own), "the suite batching", args.suite)
    writable(args.out)
    records, say = [], functools.partial(print, file=sys.stderr)
    with bench.Peers() if args.peers else contextlib.nullcontext() as peers:
        for suite in bench.SUITES if args.suite == "all" else [args.suite]:
            records += bench.run(
                suite,
                device=args.device,
                out=args.out,
                quick=args.quick,
                peers=peers,
                say=say,
                **own,
            )
    print("\n".join([*bench.table(records), *[bench.LEGEND] * (args.suite != "batching")]))
    print(json.dumps({"records": len(records), "out": str(args.out)}))
    return 0


def _share(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import bench
    from asrkit.workbench.bench.share import report, share
    from asrkit.workbench.records import read

    out = args.out or Path("reports/share")
    expect(
        not out.is_file(),
        "out",
        "a folder",
        repr(str(out)),
        "A file takes what `bench all` without --minutes finds.",
    )
    say = functools.partial(print, file=sys.stderr, flush=True)
    manifest = share(
        out, device=args.device, minutes=args.minutes, quick=args.quick, resume=args.resume, say=say
    )
    records, checks = read(out / "bench.jsonl"), manifest["checks"]
    print("\n".join([*bench.table(records), *report(manifest)]))
    parts = {name: part["status"] for name, part in manifest["parts"].items()}
    summary = {
        "records": len(records),
        "passed": checks["passed"],
        "not_passed": [*checks["not_passed"]],
    }
    summary |= {"not_checked": [*checks["not_checked"]], "parts": parts}
    print(json.dumps({**summary, "seconds": manifest["seconds"], "out": str(out)}))
    return int(
        bool(checks["not_passed"]) or not {"done", "stopped", "no time"} >= {*parts.values()}
    )


def _add(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import ledger, records

    checkout = files.HERE.parent / "data" / "records"
    known = args.into is not None or (files.HERE.parent / ".git").exists()
    expect(known, "into", "a folder, for this is no checkout of asrkit", None)
    into = args.into or checkout
    new = records.add(args.paths, into, dirty=args.dirty)
    for (machine, what), number in sorted(
        Counter((one["machine"]["id"], one["what"]) for one in new).items()
    ):
        print(f"{machine}  {what}: {number}")
    kept, judged = records.read(into) if into.exists() else [], dict[str, str]()
    machines = {one["machine"]["id"]: one["machine"] for one in new}
    for claim in ledger.load_claims():
        for machine in machines.values() if claim.id in {one["what"] for one in new} else ():
            found = ledger.verdict(claim, kept, machine)
            if found.measured is not None:
                judged[claim.id] = found.label
                print(
                    f"{claim.id}: {found.label}, {claim.show(found.measured)} where {claim.show(claim.quoted)} is published"
                )
    print(
        json.dumps(
            {"added": len(new), "machines": sorted(machines), "claims": judged, "into": str(into)}
        )
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from asrkit.workbench.doctor import diagnose, render

    checks = diagnose()
    print(render(checks))
    print(
        json.dumps(
            {
                state: sum(check.status == state for check in checks)
                for state in ("missing", "note", "ok")
            }
        )
    )
    return 1 if any(check.status == "missing" for check in checks) else 0


def _verify(args: argparse.Namespace) -> int:
    from asrkit.files import shipped
    from asrkit.shapes import expect
    from asrkit.workbench.ledger import load_claims
    from asrkit.workbench.records import files, verify

    for path in args.paths:
        expect(
            path.exists(),
            "paths",
            "files of records, or folders of them",
            repr(str(path)),
            "There is no such file.",
        )
    paths = args.paths or files(shipped("records"))
    problems = verify(paths)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(
        json.dumps({"files": len(paths), "claims": len(load_claims()), "problems": len(problems)})
    )
    return 1 if problems else 0


# fmt: off
COMMANDS: Commands = {
    "bench": (_bench, "Measure fast paths against their references and peers, both arms in one run.", [
        ("suite", {"choices": ["losses", "decoders", "features", "precision", "encoder", "batching", "training", "claims", "ladder", "all"],
                   "help": "what to measure"}),
        DEVICE, THREADS,
        ("--quick", {"action": "store_true", "help": "small sizes and few repeats"}),
        ("--minutes", {"type": float, "metavar": "N", "help": "with all: a machine's whole share in N minutes: checks of every "
                       "path, then suites in processes of their own, most important first; run again, it goes on; on a CPU "
                       "a rehearsal, with --quick"}),
        ("--plan", {"action": "store_true", "help": "with all: print what --minutes would measure (none: 9), in which order, "
                    "how long and why, and end"}),
        ("--resume", {"type": Path, "metavar": "DIR", "help": "with --minutes: go on from an earlier run's folder, which is copied "
                      "into --out, empty until then; of the same code and kind of machine, and as its manifest says. On a second "
                      "lease: carry it along in the checkout"}),
        ("--peers", {"action": "store_true", "help": "also time the rivals that `make peers` installed; on a GPU NeMo's decoders"}),
        ("--lengths", {"type": Path, "metavar": "FILE", "help": "batching: a table of your own, CSV with seconds and tokens"}),
        ("--ranks", {"type": int, "nargs": "+", "metavar": "N", "help": "batching: numbers of ranks (none: 1 8 64 1024)"}),
        ("--out", {"type": Path, "help": "records are appended to this file (none: reports/bench.jsonl); with --minutes a folder "
                   "of records, checks, log and manifest (none: reports/share)"})]),
    "doctor": (_doctor, "Say what this machine has, what is missing for which notebook, and the remedy.", []),
    "verify": (_verify, "Recompute the hashes of records and check the claims' schema.", [
        ("paths", {"nargs": "*", "type": Path, "help": "record files (none: those the project ships)"})]),
    "records add": (_add, "Take records in that another machine wrote, all of them or none, and say what they settle.", [
        ("paths", {"nargs": "+", "type": Path, "help": "folders of `bench all --minutes`, or files of records"}),
        ("--into", {"type": Path, "metavar": "DIR", "help": "where the records are (none: data/records of this checkout)"}),
        ("--dirty", {"action": "store_true", "help": "also take records of code that no commit here holds"})]),
}
# fmt: on
