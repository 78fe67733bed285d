"""Optimizers: LAMB for large batches, NovoGrad for Jasper, and averaged weights.

How a step travels, and where to look for what:

    queued.py     what `Lamb` and `NovoGrad` share: groups, rates, states, steps without a wait
    lamb.py       `Lamb`, a torch.optim.Optimizer: arguments, state, which implementation runs
    step.py       one step over all tensors: clipping, the skip of non-finite gradients, ratios
    reference.py  the three parts of a step, tensor after tensor: read it first
    foreach.py    the same by torch's calls on lists of tensors: what a GPU runs
    numba_cpu.py  the same in three passes over memory, compiled for the CPU
    norms.py      sums of squares of whole parameters, of which a rank may hold a part
    novograd.py   `NovoGrad`, whole: formula, arguments, state, both implementations
    average.py    `Average`: the exponential moving average of weights

torch has neither LAMB nor NovoGrad. Both take the weights of FSDP2, and ZeroRedundancyOptimizer
shares their state out over the ranks.
"""

from asrkit.optim.average import Average
from asrkit.optim.lamb import Lamb
from asrkit.optim.novograd import NovoGrad

__all__ = ["Average", "Lamb", "NovoGrad"]
