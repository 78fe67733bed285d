"""The suites by name, in the order in which `python -m benchmarks all` measures them.

To add one, declare a `Suite` in a new module and list it below.
"""

from benchmarks.suites import (
    batching,
    claims,
    decoders,
    encoders,
    jasper,
    ladder,
    losses,
    precision,
    trained,
    training,
    transcription,
)

SUITES = {
    suite.name: suite
    for suite in [
        losses.SUITE,
        decoders.SUITE,
        transcription.SUITE,
        training.SUITE,
        ladder.SUITE,
        claims.SUITE,
        encoders.SUITE,
        precision.SUITE,
        batching.SUITE,
        jasper.INFERENCE_SUITE,
        jasper.TRAINING_SUITE,
        trained.SEEDS_SUITE,
        trained.PAIR_SUITE,
    ]
}
