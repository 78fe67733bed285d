"""What a share measures, in which order and why, and how the minutes are dealt out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

RESERVE_S, LAST_CASE_S = (
    30.0,
    60.0,
)  # nothing runs in the last, nothing begins in the other; less where the minutes are few
CHECKS_SHARE = 0.35  # of the time, at most
CHECKS_S = 160.0  # an estimate for an H100, compiling included
ELSEWHERE = {"batching": "follows from lengths by arithmetic and needs no GPU"}


class Part(NamedTuple):
    """A suite or some of it; see budget_s for what it gets of the time."""

    name: str
    weight: float
    why: str
    suite: str = ""  # if not the name
    options: Mapping[str, Any] = {}
    estimate_s: float = (
        0.0  # on an H100, of the whole part, its process included; estimated, not measured
    )
    owed: bool = False
    cases: str = ""  # what the names of all its cases begin with, for a check that fails them all

    @property
    def owed_s(self) -> float:
        """Seconds that the part is owed."""
        return self.estimate_s if self.owed else 0.0


def _ladder(kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "few": True,
    }  # the arms that decode one utterance after another take longest, and are few then


def _claims(*groups: str) -> dict[str, Any]:
    return {"only": groups}


PARTS = (
    Part("casts", 0.2, "three claims in a few seconds", "claims", _claims("casts"), 10, True),
    Part(
        "frontends",
        0.5,
        "batched CTC front end, autocast: six claims of one model",
        "claims",
        _claims("frontends", "half"),
        30,
        True,
    ),
    Part(
        "loops",
        0.7,
        "label looping with graphs, of RNN-T and TDT: six claims",
        "claims",
        _claims("loops"),
        39,
        True,
    ),
    Part(
        "windows",
        0.7,
        "windowed looping, graphs off, step and full, turns fused and plain: which is the default",
        "claims",
        _claims("windows"),
        40,
        True,
    ),
    Part(
        "ladder-rnnt",
        1.5,
        "all steps together at RNN-T 1.1B, the summary of the series",
        "ladder",
        _ladder("rnnt"),
        76,
        True,
        cases="ladder-rnnt",
    ),
    Part(
        "ladder-tdt",
        1,
        "the same at TDT 0.6B, the goal's model",
        "ladder",
        _ladder("tdt"),
        50,
        True,
        cases="ladder-tdt",
    ),
    Part(
        "losses-large",
        1,
        "the losses beside torchaudio's at one large shape",
        "losses",
        {"first": True},
        40,
        True,
    ),
    Part(
        "recognisers",
        2,
        "1.1B with and without graphs, an encoder's idle time: four claims",
        "claims",
        _claims("recognisers", "idle"),
        65,
    ),
    Part(
        "encoder",
        2,
        "most of the time of a recogniser goes here",
        options={"compiled": False},
        estimate_s=90,
    ),
    Part(
        "decoders",
        2,
        "every loop and graph over batch sizes: which one is the default depends on it",
        estimate_s=165,
    ),
    Part(
        "losses",
        2,
        "all shapes, kernels counted, and the largest batches that train",
        estimate_s=230,
    ),
    Part(
        "ladder-ctc",
        1,
        "the ladder without a loop over labels",
        "ladder",
        _ladder("ctc"),
        40,
        cases="ladder-ctc",
    ),
    Part("features", 0.2, "small, and part of the claims already", estimate_s=8),
    Part("precision", 1, "what half precision costs and loses, at published sizes", estimate_s=60),
    Part(
        "compiled",
        2,
        "torch.compile takes longest, so what time is left",
        "encoder",
        {"compiled": True},
        200,
    ),
)


def ends(total_s: float) -> tuple[float, float]:
    """Seconds after which nothing begins any more, and after which nothing runs."""
    return total_s - min(LAST_CASE_S, total_s / 6), total_s - min(RESERVE_S, total_s / 12)


def budget_s(parts: Sequence[Part], left_s: float) -> float:
    """What the first of these parts may take of the seconds that are left.

    All that it needs as far as the others are not owed it, for what comes first is worth most; more
    where there is more: its weight's share. With too little for all that is owed, what comes first
    gets it still.
    """
    first, free = parts[0], left_s - sum(part.owed_s for part in parts[1:])
    if free < first.owed_s:
        return min(first.owed_s, left_s)
    share = first.owed_s + (free - first.owed_s) * first.weight / sum(part.weight for part in parts)
    return min(free, max(share, first.estimate_s))


def lines(minutes: float) -> Iterator[str]:
    """The plan as a table: seconds that each part may take if all before it take what they may,
    estimates, and why.
    """
    begins, _ = ends(60 * minutes)
    checks = min(CHECKS_S, CHECKS_SHARE * 60 * minutes)
    left = begins - checks
    yield f"The share of {minutes:g} minutes on an H100. Seconds in the second column are estimates, not measured."
    yield f"{'part':12} {'needs':>6} {'may take':>8}  why"
    yield f"{'checks':12} {CHECKS_S:6.0f} {checks:8.0f}  every path against its reference: what fails is not measured"
    for place, part in enumerate(PARTS):
        budget = budget_s(PARTS[place:], left)
        left -= budget
        yield f"{part.name:12} {part.estimate_s:6.0f} {budget:8.0f}  {part.why}{' (owed)' * part.owed}"
    yield from (f"{name:12} {'':6} {'':8}  elsewhere: {why}" for name, why in ELSEWHERE.items())
    yield "What a part leaves over goes to those behind it. Run again in the same folder, or with --resume, the share goes on."
