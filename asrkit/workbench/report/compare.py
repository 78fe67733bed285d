"""Two runs side by side: what both measured with ratios, seconds, verdicts that differ, and whether
it is fair to compare.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit.shapes import expect
from asrkit.workbench import ledger
from asrkit.workbench import records as store
from asrkit.workbench.report.pages import measured
from asrkit.workbench.report.site import FACTS, _write, facts, site


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The page, pairs of records (ratio is B over A) and verdicts that differ, as (id, of A, of B,
    why if just one ran it).
    """

    path: Path
    a: str  # name of the run
    b: str
    pairs: Sequence[Mapping[str, Any]]
    notebooks: Sequence[Mapping[str, Any]]
    verdicts: Sequence[tuple[str, str, str, str]]
    warnings: Sequence[str]

    def summary(self, most: int = 20) -> str:
        """Warnings, seconds of notebooks, the `most` records and all verdicts that differ."""
        lines = [[row["name"], row["a"], row["b"], row["ratio"], ""] for row in self.notebooks]
        alone = Counter(how for *_, how in self.verdicts if how)
        said = {"no": "quartiles apart", "yes": "quartiles overlap"}
        for pair in self.pairs[:most]:
            x, y = pair["a"], pair["b"]
            how = said.get(pair["overlap"], pair["overlap"])
            of = " ".join(
                filter(None, [x["metric"], x["impl"], x["phase"], x["dtype"], x["shape"]])
            )
            lines.append([f"{x['what']}, {of}", x["median"], y["median"], pair["ratio"], how])
        lines = [["", "A", "B", "B / A", ""], *lines] if lines else []
        widths = [max((len(line[column]) for line in lines), default=0) for column in range(5)]
        table = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        changed = [f"{name}: {x} in A, {y} in B" for name, x, y, how in self.verdicts if not how]
        changed += [f"{number} more verdicts differ: {how}" for how, number in alone.items()]
        rest = [f"and {len(self.pairs) - most} more records on the page"] * (len(self.pairs) > most)
        return "\n".join([*self.warnings, *table, *rest, *changed])

    def facts(self) -> dict[str, Any]:
        """The result for programs: numbers of records and verdicts, and the path of the page."""
        return {
            "a": self.a,
            "b": self.b,
            "records": len(self.pairs),
            "apart": sum(pair["overlap"] == "no" for pair in self.pairs),
            "verdicts_changed": len(self.verdicts),
            "same_machine": not any("machine" in warning for warning in self.warnings),
            "path": str(self.path),
        }


def compare(a: Path, b: Path, out: Path | None = None) -> Comparison:
    """Put two run folders side by side on one offline page, `out` or beside B as compare-A-B.html."""
    a, b = a.resolve(), b.resolve()
    expect(
        out is None or (out.suffix == ".html" and (out.is_file() or not out.exists())),
        "out",
        "a file of HTML",
        repr(str(out)),
    )
    manifests = [_manifest(folder) for folder in (a, b)]
    first, second = [_records(folder) for folder in (a, b)]
    pairs = [_pair(first[key], second[key]) for key in first if key in second]
    pairs.sort(key=lambda pair: -pair["apart"])
    runs = [{run["name"]: run for run in manifest["runs"]} for manifest in manifests]
    notebooks = []
    for name in sorted({*runs[0], *runs[1]}):
        x, y = (run.get(name) for run in runs)
        both = (
            x
            and y
            and x["status"] == y["status"] == "ran"
            and x["parameters"] == y["parameters"]
            and x["seconds"]
        )
        notebooks.append(
            {
                "name": name,
                "a": f"{x['seconds']:.1f}" if x else "–",
                "b": f"{y['seconds']:.1f}" if y else "–",
                "ratio": f"{y['seconds'] / x['seconds']:.2f}" if x and y and both else "–",
                "a_status": x["status"] if x else "not in this run",
                "b_status": y["status"] if y else "not in this run",
            }
        )
    claims = [manifest["claims"] for manifest in manifests]
    homes = {claim.id: claim.notebook for claim in ledger.load_claims()}
    ran = [{name for name, run in some.items() if run["status"] == "ran"} for some in runs]
    only = {
        name: f"only {'A' if name in ran[0] else 'B'} ran the notebook" for name in ran[0] ^ ran[1]
    }
    verdicts = [
        (name, x, y, only.get(homes.get(name, ""), ""))
        for name in sorted({*claims[0], *claims[1]})
        if (x := claims[0].get(name, "no such claim"))
        != (y := claims[1].get(name, "no such claim"))
    ]
    machine = [manifest["machine"]["id"] for manifest in manifests]
    warnings = ["The machines differ: a ratio between them is no claim about speed."] * (
        machine[0] != machine[1]
    )
    warnings += [
        f"{key.capitalize()} differs: {x} and {y}."
        for key in ("size", "device")
        if (x := manifests[0]["plan"][key]) != (y := manifests[1]["plan"][key])
    ]
    loads = [
        statistics.median([record["load1"] for record in some.values()] or [math.nan])
        for some in (first, second)
    ]
    columns = [{**manifest, "captured_at": manifest["now"]} for manifest in manifests]
    told = [("run", [a.name, b.name]), *facts(columns)]
    told += [
        ("load, median of the records", [f"{load:.1f}".replace("nan", "–") for load in loads]),
        ("command", [manifest["command"].replace("\n", "; ") for manifest in manifests]),
    ]
    some = sum(bool(how) for *_, how in verdicts)
    sentence = (
        f"{len(pairs)} records in both, {sum(pair['overlap'] == 'no' for pair in pairs)} with quartiles apart; "
        f"{len(verdicts)} verdicts differ{f', {some} as only one run has the notebook' * bool(some)}."
    )
    if max(loads) > max(1.0, 2 * min(loads)):
        warnings.append(
            f"The load differs: {loads[0]:.1f} in A, {loads[1]:.1f} in B; what waits for a core is slower."
        )
    templates, common = site()
    path = out or b.parent / f"compare-{a.name}-{b.name}.html"
    alone = (len({*first} - {*second}), len({*second} - {*first}))
    page = templates.get_template("compare.html.j2").render(
        **common,
        a=a,
        b=b,
        sentence=sentence,
        warnings=warnings,
        facts=told,
        notebooks=notebooks,
        pairs=pairs,
        alone=alone,
        verdicts=verdicts,
    )
    _write(path, page)
    return Comparison(
        path=path,
        a=a.name,
        b=b.name,
        pairs=pairs,
        notebooks=notebooks,
        verdicts=verdicts,
        warnings=warnings,
    )


def _manifest(folder: Path) -> dict[str, Any]:
    expect(
        (folder / "manifest.json").is_file(),
        "runs",
        "folders of whole runs, with a manifest.json",
        repr(folder.name),
        "asrkit report --resume finishes one that was cut short.",
    )
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        whole = {"id", "gpus", *FACTS} <= {*manifest["machine"]} and {"size", "device"} <= {
            *manifest["plan"]
        }
        whole &= {"commit", "dirty"} <= {*manifest["code"]} and isinstance(
            manifest["command"] + manifest["now"], str
        )
        whole &= all(
            {"name", "status", "seconds", "parameters"} <= {*run} for run in manifest["runs"]
        )
        whole &= all(isinstance(manifest[name], dict) for name in ("machine", "software", "claims"))
    except (ValueError, TypeError, KeyError):
        whole = False
    expect(
        whole,
        "runs",
        "manifests of asrkit report",
        f"another or a torn one, {folder / 'manifest.json'}",
        "Run the report again.",
    )
    return manifest


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    """Records by what they are of: name, metric, implementation, parameters that are no fraction,
    and which of several.
    """
    found, times = {}, defaultdict[str, int](int)
    for record in store.read(folder / "records") if (folder / "records").is_dir() else []:
        params = {
            name: value for name, value in record["params"].items() if not isinstance(value, float)
        }
        key = json.dumps(
            [record["what"], record["metric"], record["impl"], record["unit"], params],
            sort_keys=True,
        )
        times[key] += 1
        found[f"{key} {times[key]}"] = record
    return found


def _pair(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    x, y = a["stats"], b["stats"]
    several = x["n"] > 1 and y["n"] > 1
    overlap = (
        ("yes" if x["p25"] <= y["p75"] and y["p25"] <= x["p75"] else "no")
        if several
        else "one observation"
    )
    ratio = b["value"] / a["value"] if a["value"] else None
    apart, shown = (
        (max(ratio, 1 / ratio) if ratio and ratio > 0 else 1.0),
        "–" if ratio is None else f"{ratio:.3g}",
    )
    return {"a": measured(a), "b": measured(b), "ratio": shown, "overlap": overlap, "apart": apart}
