"""The suites by name, in the order in which `asrkit bench all` measures them.

A new suite declares a `Suite` in a module of its own and is added to the list below.
"""

from asrkit.workbench.bench.suites import (
    aed,
    batching,
    claims,
    decoders,
    encoder,
    engines,
    headline,
    jasper,
    ladder,
    losses,
    precision,
    training,
)

SUITES = {
    suite.name: suite
    for suite in [
        headline.SUITE,
        losses.SUITE,
        decoders.SUITE,
        encoder.SUITE,
        ladder.SUITE,
        decoders.FEATURES,
        aed.SUITE,
        claims.SUITE,
        precision.SUITE,
        jasper.SUITE,
        training.SUITE,
        batching.SUITE,
        engines.SUITE,
    ]
}
