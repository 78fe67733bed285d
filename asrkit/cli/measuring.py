"""`asrkit bench`, `doctor` and `verify`."""

import argparse
import contextlib
import functools
import json
import sys
from pathlib import Path

from asrkit.cli.options import DEVICE, THREADS, Commands, prepare


def _bench(args: argparse.Namespace) -> int:
    prepare(args)
    from asrkit import bench
    from asrkit.shapes import expect

    expect(not args.out.is_dir(), "out", "a file", repr(str(args.out)))
    expect(not args.peers or args.device == "cpu", "peers", "--device cpu: the rivals run on a CPU", args.device)
    own = {name: value for name in ("lengths", "ranks") if (value := getattr(args, name))}
    expect(not own or args.suite == "batching", ", ".join(own), "the suite batching", args.suite)
    records, say = [], functools.partial(print, file=sys.stderr)
    with bench.Peers() if args.peers else contextlib.nullcontext() as peers:
        for suite in bench.SUITES if args.suite == "all" else [args.suite]:
            records += bench.run(suite, device=args.device, out=args.out, quick=args.quick, peers=peers, say=say, **own)
    print("\n".join([*bench.table(records), *[bench.LEGEND] * (args.suite != "batching")]))
    print(json.dumps({"records": len(records), "out": str(args.out)}))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from asrkit.doctor import diagnose, render

    checks = diagnose()
    print(render(checks))
    return 1 if any(check.status == "missing" for check in checks) else 0


def _verify(args: argparse.Namespace) -> int:
    from asrkit.ledger import load_claims
    from asrkit.records import shipped, verify

    paths = args.paths or sorted(shipped("records").rglob("*.jsonl"))
    problems = verify(paths)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(json.dumps({"files": len(paths), "claims": len(load_claims()), "problems": len(problems)}))
    return 1 if problems else 0


# fmt: off
COMMANDS: Commands = {
    "bench": (_bench, "Measure fast paths against their references and peers, both arms in one run.", [
        ("suite", {"choices": ["losses", "decoders", "features", "precision", "encoder", "batching", "all"],
                   "help": "what to measure"}),
        DEVICE, THREADS,
        ("--quick", {"action": "store_true", "help": "small sizes and few repeats"}),
        ("--peers", {"action": "store_true", "help": "also time the rivals that `make peers` installed, on CPU"}),
        ("--lengths", {"type": Path, "metavar": "FILE", "help": "batching: a table of your own, CSV with seconds and tokens"}),
        ("--ranks", {"type": int, "nargs": "+", "metavar": "N", "help": "batching: numbers of ranks (none: 1 8 64 1024)"}),
        ("--out", {"type": Path, "default": Path("reports/bench.jsonl"), "help": "records are appended to this file"})]),
    "doctor": (_doctor, "Say what this machine has, what is missing for which notebook, and the remedy.", []),
    "verify": (_verify, "Recompute the hashes of records and check the claims' schema.", [
        ("paths", {"nargs": "*", "type": Path, "help": "record files (none: those the project ships)"})]),
}
# fmt: on
