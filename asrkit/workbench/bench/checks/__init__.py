"""Every fast path of a device against its reference, at sizes that take seconds: before a machine
is measured.

The references are the plain loops in float64, on the CPU where there are any. A check that fails
names what it vouched for: those arms and cases are not measured. It vouches for what it shows to be
right and for nothing else: a kind of model, a kind of graph, an arithmetic (`guards.way` has how
arms are named so). What no arm does, as decoding under autocast, it does not vouch for. The same
table runs on a CPU, with its implementations.
"""

from asrkit.workbench.bench.checks.attention import attention_checks
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.checks.decoders import decoder_checks, graph_checks
from asrkit.workbench.bench.checks.jasper import jasper_checks
from asrkit.workbench.bench.checks.losses import kernels, tiles
from asrkit.workbench.bench.checks.models import encoder_checks, feature_checks, ladder_checks
from asrkit.workbench.bench.checks.optimizers import optimizer_checks
from asrkit.workbench.bench.checks.profiling import profiling_checks
from asrkit.workbench.bench.checks.recurrent import recurrent_checks

GROUPS = (  # the most valuable arms first
    graph_checks,
    decoder_checks,
    attention_checks,
    ladder_checks,
    kernels,
    tiles,
    feature_checks,
    optimizer_checks,
    profiling_checks,
    encoder_checks,
    jasper_checks,
    recurrent_checks,
)


def table(device: str) -> list[Check]:
    """All checks of a device, none of them begun."""
    cuda = device.startswith("cuda")
    return [check for group in GROUPS for check in group(device, cuda)]
