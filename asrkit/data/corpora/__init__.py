"""Speech with transcripts as lhotse cuts at 16 kHz: synthetic, or read from manifests.

`published.prepare_corpora` writes manifests of published corpora and of local folders.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lhotse import CutSet

from asrkit.data.corpora.manifests import RATE_HZ, SPLIT_NAMES, SPLITS, from_manifest, split_of
from asrkit.data.corpora.synthetic import KINDS, spoken_commands
from asrkit.shapes import expect

__all__ = [
    "KINDS",
    "RATE_HZ",
    "SPLITS",
    "from_manifest",
    "load",
    "spoken_commands",
]


def load(
    manifests: Sequence[str | Path] = ("spoken_commands",),
    *,
    hold_out: str | None = None,
    kinds: Sequence[str] | None = None,
    progress: bool = True,
) -> dict[str, CutSet]:
    """Mix corpora into one training, one development and one test set.

    Args:
        manifests: "spoken_commands", or manifests that `from_manifest` reads. The `split` of a cut
            names its set (test-other is a test set, validation a dev set); without one it is train.
        hold_out: A speaker of the manifests whose cuts become the test set.
        kinds: Kinds of spoken_commands to use; None for all.
        progress: Show a progress bar while a corpus is built.

    Returns:
        Cuts of `train`, `dev` and `test`.
    """
    sets: dict[str, list[Any]] = {split: [] for split in SPLITS}
    speakers: set[str] = set()
    for manifest in manifests:
        if manifest == "spoken_commands":
            for split, cuts in spoken_commands(kinds=kinds, progress=progress).items():
                sets[split] += cuts
            continue
        for cut in from_manifest(manifest):
            supervision = cut.supervisions[0]
            speaker = str(supervision.speaker)
            speakers.add(speaker)
            stated = str((supervision.custom or {}).get("split") or "all")
            split = split_of(stated)
            wanted = f"a split that begins with one of {', '.join(SPLIT_NAMES)}"
            expect(split != "", "manifest", wanted, f"{stated!r} of {cut.id!r}")
            if hold_out is not None and split == "test":
                split = "train"
            if speaker == hold_out:
                split = "test"
            sets[split].append(cut)
    wanted = f"a speaker of a manifest, such as {', '.join(sorted(speakers)[:9]) or 'none here'}"
    remedy = "spoken_commands has its own test set."
    expect(hold_out is None or hold_out in speakers, "hold_out", wanted, repr(hold_out), remedy)
    return {split: CutSet.from_cuts(cuts) for split, cuts in sets.items()}
