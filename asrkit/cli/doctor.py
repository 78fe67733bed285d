"""`asrkit doctor`."""

import argparse
from collections import Counter
from dataclasses import asdict

from asrkit.cli.command import Command, finish


def _doctor(args: argparse.Namespace) -> int:
    from asrkit.workbench.doctor import STATUSES, diagnose, render

    findings = diagnose()
    counts = Counter(finding.status for finding in findings)
    numbers = {status: counts[status] for status in STATUSES}
    summary = f"{counts['missing']} missing, {counts['note']} worth knowing, {counts['ok']} ok"
    result = numbers | {"checks": [asdict(finding) for finding in findings]}
    finish(args, result, f"{render(findings)}\n{summary}")
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
