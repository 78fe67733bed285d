"""`asrkit doctor`."""

import argparse
import json
from dataclasses import asdict

from asrkit.cli.command import Command


def _doctor(args: argparse.Namespace) -> int:
    from asrkit.workbench.doctor import STATUSES, diagnose, render

    checks = diagnose()
    counts = {status: sum(check.status == status for check in checks) for status in STATUSES}
    if args.json:
        print(json.dumps(counts | {"checks": [asdict(check) for check in checks]}))
    else:
        print(render(checks))
        print(f"{counts['missing']} missing, {counts['note']} worth knowing, {counts['ok']} ok")
    if counts["missing"]:
        return 1
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


COMMAND = Command(
    name="doctor",
    summary="Check this machine: what it has, what is missing, and how to fix it.",
    details="Exit code 1 if something is missing that asrkit cannot do without.",
    run=_doctor,
    add_arguments=_add_arguments,
    examples=["asrkit doctor", "asrkit doctor --json"],
)
