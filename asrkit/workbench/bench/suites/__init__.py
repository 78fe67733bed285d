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
    jasper,
    ladder,
    losses,
    optimizers,
    precision,
    training,
)

SUITES = {
    suite.name: suite
    for suite in [
        losses.SUITE,
        decoders.SUITE,
        decoders.FEATURES,
        aed.SUITE,
        precision.SUITE,
        encoder.SUITE,
        engines.SUITE,
        jasper.SUITE,
        batching.SUITE,
        training.SUITE,
        optimizers.SUITE,
        claims.SUITE,
        ladder.SUITE,
    ]
}
