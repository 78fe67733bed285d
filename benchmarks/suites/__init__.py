"""The suites by name, in the order in which `python -m benchmarks all` measures them.

A new suite declares a `Suite` in a module of its own and is added to the list below.
"""

from benchmarks.suites import (
    batching,
    claims,
    decoders,
    encoders,
    ladder,
    losses,
    precision,
    training,
    transcription,
)

SUITES = {
    suite.name: suite
    for suite in [
        transcription.SUITE,
        losses.SUITE,
        decoders.SUITE,
        encoders.SUITE,
        ladder.SUITE,
        claims.SUITE,
        precision.SUITE,
        training.SUITE,
        batching.SUITE,
    ]
}
