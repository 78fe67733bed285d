"""The verdicts that a claim can have, and what each of them means."""

LEGEND = {
    "reproduced": "Measured on this machine, and within the tolerance of the claim.",
    "arithmetic checked": "Recomputed from published numbers, and within the tolerance of the "
    "claim. Nothing was measured.",
    "direction only": "Agrees in part. Either a ratio lies on the published side of 1, but outside "
    "the tolerance; or the value is within the tolerance, but was measured at a smaller scale than "
    "the claim is about. The reason says which.",
    "not reproduced": "Measured or recomputed, and it disagrees.",
    "too noisy": "Measured, but with fewer than three repeats, or they lie too far apart for a "
    "verdict.",
    "evidence, not comparable": "Something close to it was measured, and the value is shown. It "
    "cannot settle the claim: other hardware, other conditions, or nothing published to compare "
    "with.",
    "ill-defined": "The source gives no number, or does not say what was compared with what, so "
    "there is nothing to reproduce.",
    "not measurable here": "It needs a GPU, or many machines, that are not here.",
    "not measured yet": "No run has measured it: its notebook did not run, or needs a larger size.",
    "planned": "The notebook or the benchmark that measures it is still to be written. Some of "
    "these need machines that are not here.",
}
LABELS = tuple(LEGEND)
NOT_COMPARABLE = "evidence, not comparable"
