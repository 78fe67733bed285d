"""`asrkit verify`."""

import argparse
import sys
from pathlib import Path

from asrkit.cli.command import Command, count, finish


def _verify(args: argparse.Namespace) -> int:
    from asrkit.files import shipped
    from asrkit.shapes import expect
    from asrkit.workbench import ledger, records

    for path in args.paths:
        expect(
            path.exists(),
            "paths",
            "files of records, or folders of them",
            repr(str(path)),
            "There is no such file.",
        )
    paths = args.paths or records.files(shipped("records"))
    problems = records.verify(paths)
    for problem in problems:
        print(problem, file=sys.stderr)
    claims = ledger.load_claims()
    appendix = sum(bool(claim.appendix) for claim in claims)
    result = {
        "files": len(paths),
        "claims": len(claims) - appendix,
        "appendix": appendix,
        "problems": len(problems),
    }
    verdict = "no problems"
    if problems:
        verdict = count(len(problems), "problem")
    claims_checked = f"{result['claims']} claims and {appendix} of the appendix"
    finish(args, result, f"{count(len(paths), 'path')}, {claims_checked}: {verdict}")
    if problems:
        return 1
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="files of records, or folders of them (default: those that come with asrkit)",
    )


COMMAND = Command(
    name="verify",
    summary="Check that no record was changed, and that the claims are well-formed.",
    details="Recomputes the hash of every record. Exit code 1 if one does not match.",
    run=_verify,
    add_arguments=_add_arguments,
    examples=["asrkit verify", "asrkit verify reports/bench.jsonl"],
)
