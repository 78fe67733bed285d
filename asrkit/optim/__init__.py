"""Optimizers: LAMB for large batches, plain and sharded, NovoGrad for Jasper, averaged weights, and
the rate of MLPerf's RNN-T.

How a step travels, and where to look for what:

    queued.py     what `Lamb` and `NovoGrad` share: groups, rates, states, steps without a wait
    lamb.py       `Lamb`, a torch.optim.Optimizer: arguments, state, which implementation runs
    step.py       one step over all tensors: clipping, the skip of non-finite gradients, ratios
    reference.py  the three parts of a step, tensor after tensor: read it first
    foreach.py    the same by torch's calls on lists of tensors: what a GPU runs
    numba_cpu.py  the same in three passes over memory, compiled for the CPU
    norms.py      sums of squares of whole parameters, of which a rank may hold a part
    layout.py     which part of which parameter lies on which rank
    novograd.py   `NovoGrad`, whole: formula, arguments, state, both implementations
    sharded.py    `ShardedLamb`: each rank holds the state of its part, and updates that
    average.py    `Average`: the exponential moving average of weights
    schedule.py   `WarmUpHoldDecay`: the learning rate, step by step

torch.optim, FSDP2 and ZeroRedundancyOptimizer stay usable with everything in asrkit: torch has no
LAMB, no NovoGrad, and no sharded optimizer that knows norms of whole parameters.
"""

from asrkit.optim.average import Average
from asrkit.optim.lamb import Lamb
from asrkit.optim.novograd import NovoGrad
from asrkit.optim.schedule import WarmUpHoldDecay
from asrkit.optim.sharded import ShardedLamb

__all__ = ["Average", "Lamb", "NovoGrad", "ShardedLamb", "WarmUpHoldDecay"]
