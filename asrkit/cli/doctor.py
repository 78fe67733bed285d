"""`asrkit doctor`."""

from collections import Counter
from dataclasses import asdict

from asrkit.cli.command import Command, Options, finish


def _doctor(options: Options) -> int:
    from asrkit.workbench.doctor import STATUSES, diagnose, render

    findings = diagnose()
    counts = Counter(finding.status for finding in findings)
    result: dict[str, int] = {status: counts[status] for status in STATUSES}
    summary = "{missing} missing, {note} worth knowing, {ok} ok".format(**result)
    checks = {"checks": [asdict(finding) for finding in findings]}
    finish(options, result | checks, f"{render(findings)}\n{summary}")
    return int(counts["missing"] > 0)


COMMAND = Command(
    name="doctor",
    summary="Check this machine: what it has, what is missing, and how to fix it.",
    details="The exit code is 1 if something that asrkit requires is missing.",
    options=Options,
    run=_doctor,
    examples=["asrkit doctor", "asrkit doctor --json"],
)
