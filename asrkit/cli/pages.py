"""`asrkit report` and `asrkit report compare`."""

import argparse
from pathlib import Path
from typing import Any

from asrkit.cli.options import QUIET, Commands


def _report(args: argparse.Namespace) -> int:
    from asrkit.workbench.report import report

    parameters = {
        name: _value(name, value) for name, value in args.parameter
    }  # `-p quick false` is False, never "false"
    rest: dict[str, Any] = {
        "timeout_s": args.timeout_s,
        "progress": not args.no_progress,
        "resume": args.resume,
    }
    named = [*args.notebooks, *(args.chosen or "").split(",")]
    paths = choose([name.strip() for name in named if name.strip()])
    result = report(
        paths,
        args.out,
        parameters=parameters,
        size=args.size,
        device=args.device,
        jobs=args.jobs,
        **rest,
    )
    print(result.summary())
    return result.exit_code


def _value(name: str, text: str) -> Any:
    """What `text` says in YAML; days stay text, and 1e-3 is a number."""
    import re

    import yaml

    rules = yaml.SafeLoader.yaml_implicit_resolvers.items()
    plain = {
        start: [rule for rule in some if not rule[0].endswith(":timestamp")]
        for start, some in rules
    }
    Plain: Any = type("Plain", (yaml.SafeLoader,), {"yaml_implicit_resolvers": plain})
    Plain.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        [*"-+0123456789"],
    )
    try:
        return yaml.load(text, Plain)
    except yaml.YAMLError:
        raise ValueError(
            f"parameter {name}: expected a value in YAML, got {text!r}. Quote it."
        ) from None


def choose(named: list[str], folder: Path = Path("notebooks")) -> list[Path] | None:
    """Paths of the notebooks that are named by file, number, name or how the name begins; None for
    no name: all of them.
    """
    from asrkit.shapes import expect

    known, found = sorted(folder.glob("*.ipynb")), dict[Path, None]()
    for name in named:
        stem = Path(name).stem if name.endswith(".ipynb") else name
        start = f"{int(stem):02d}_" if stem.isdecimal() else stem
        fitting = (
            [Path(name)]
            if Path(name).is_file()
            else [path for path in known if path.stem.startswith(start)]
        )
        exact = [path for path in fitting if path.stem == stem]
        listed = (
            ", ".join(path.stem for path in known) or f"a file: there is no folder {folder}/ here"
        )
        expect(bool(fitting), "notebooks", f"one of {listed}", repr(name))
        found |= dict.fromkeys(exact or fitting)
    return list(found) or None


def _compare(args: argparse.Namespace) -> int:
    from asrkit.workbench.report import compare

    a, b = (Path(name) if Path(name).is_dir() else args.reports / name for name in (args.a, args.b))
    print(compare(a, b, args.out).summary())
    return 0


# fmt: off
COMMANDS: Commands = {
    "report": (_report, "Run the notebooks and build one HTML report with the ledger of claims.", [
        ("notebooks", {"nargs": "*", "help": "notebooks: paths, numbers or beginnings of names (none: the whole series)"}),
        ("--notebooks", {"dest": "chosen", "metavar": "02,06", "help": "the same as a list with commas"}),
        ("--size", {"choices": ["quick", "full"], "help": "full: the larger parameters that the notebooks name (none: quick)"}),
        ("--device", {"choices": ["auto", "cpu", "cuda"], "help": "cpu hides GPUs, cuda insists on one (none: auto)"}),
        ("--jobs", {"type": int, "metavar": "N", "help": "notebooks at once (none: half the cores)"}),
        ("--resume", {"action": "store_true", "help": "finish the newest run, cut short or with failures, with its notebooks"}),
        ("--out", {"type": Path, "default": Path("reports"), "help": "folder that gets one subfolder a run, and `latest`"}),
        ("--parameter", {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE"),
                         "help": "set a parameter in every notebook that has it; VALUE is YAML"}),
        ("--timeout", {"type": float, "dest": "timeout_s", "help": "seconds a cell may take (none: 600, full size 7200)"}), QUIET]),
    "report compare": (_compare, "Put two runs side by side: seconds, records with ratios, verdicts that differ.", [
        ("a", {"metavar": "A", "help": "folder of a run, or its name in --reports, as `latest`"}),
        ("b", {"metavar": "B", "help": "the run it is compared with; ratios are B over A"}),
        ("--reports", {"type": Path, "default": Path("reports"), "help": "folder with the runs"}),
        ("--out", {"type": Path, "metavar": "FILE", "help": "the page (none: compare-A-B.html beside B)"})]),
}
# fmt: on
