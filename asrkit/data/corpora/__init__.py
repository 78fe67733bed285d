"""Speech with transcripts as lhotse cuts at 16 kHz: synthetic, or read from manifests.

`published.prepare_corpora` makes manifests of published corpora and of local folders.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lhotse import CutSet

from asrkit.data.corpora.manifests import RATE_HZ, SPLITS, from_manifest
from asrkit.data.corpora.synthetic import KINDS, digit_strings, intact, spoken_commands
from asrkit.shapes import expect, whole

__all__ = [
    "KINDS",
    "RATE_HZ",
    "SPLITS",
    "digit_strings",
    "from_manifest",
    "intact",
    "load",
    "spoken_commands",
]


def load(
    manifests: Sequence[str | Path] = ("spoken_commands",),
    *,
    hold_out: str | None = None,
    join_digits: int = 0,
    kinds: Sequence[str] | None = None,
    progress: bool = True,
) -> dict[str, CutSet]:
    """Mix corpora into one training, one development and one test set.

    Args:
        manifests: "spoken_commands", or manifests that `from_manifest` reads. Cuts of a manifest go
            to the set that their `split` names (test-other is a test set), else to train.
        hold_out: A speaker of the manifests, who becomes their test set.
        join_digits: Number of digit strings to join from one-word cuts of each manifest. They are
            added to the cuts in train; in dev and test a tenth as many take the cuts' place.
        kinds: Use only these kinds of spoken_commands.
        progress: Show a progress bar while a corpus is built.

    Returns:
        Cuts of `train`, `dev` and `test`.
    """
    expect(whole(join_digits, 0), "join_digits", "a whole number from 0 up", repr(join_digits))
    from_files = _files(manifests)
    expect(
        hold_out is None or len(from_files) > 0,
        "hold_out",
        "a speaker of a manifest",
        repr(hold_out),
        "spoken_commands has its own test set. Add a manifest, or hold out nobody.",
    )
    sets: dict[str, list[Any]] = {split: [] for split in SPLITS}
    speakers: set[str] = set()
    for number, manifest in enumerate(manifests):
        if manifest == "spoken_commands":
            for split, cuts in spoken_commands(kinds=kinds, progress=progress).items():
                sets[split] += cuts
            continue
        parts: dict[str, list[Any]] = {split: [] for split in SPLITS}
        for cut in from_manifest(manifest):
            speakers.add(_speaker(cut))
            parts[_split(cut, hold_out)].append(cut)
        for split, part in parts.items():
            sets[split] += _with_digit_strings(part, split, join_digits, seed=number)
    known = hold_out is None or hold_out in speakers
    wanted = f"one of the speakers {sorted(speakers)[:9]}"
    expect(known, "hold_out", wanted, repr(hold_out))
    return {split: CutSet.from_cuts(cuts) for split, cuts in sets.items()}


def _files(manifests: Sequence[str | Path]) -> list[str | Path]:
    """The manifests that are files, not the corpus that is built in."""
    return [manifest for manifest in manifests if manifest != "spoken_commands"]


def _speaker(cut: Any) -> str:
    return str(cut.supervisions[0].speaker)


def _split(cut: Any, hold_out: str | None) -> str:
    """The set that a cut of a manifest goes to; `hold_out`, if any, is the speaker to test with."""
    if hold_out is not None and _speaker(cut) == hold_out:
        return "test"
    name = str((cut.supervisions[0].custom or {}).get("split")).lower().partition("-")[0]
    if name not in SPLITS or (hold_out is not None and name == "test"):
        return "train"
    return name


def _with_digit_strings(cuts: list[Any], split: str, count: int, *, seed: int) -> list[Any]:
    """The cuts of a split and digit strings joined from them; in dev and test these alone."""
    if not count or not cuts:
        return cuts
    if split != "train":
        return [*digit_strings(CutSet.from_cuts(cuts), count=-(-count // 10), seed=seed)]
    return [*digit_strings(CutSet.from_cuts(cuts), count=count, seed=seed), *cuts]
