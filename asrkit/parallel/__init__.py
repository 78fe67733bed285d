"""One utterance on several processes: its frames are cut into parts, one a rank, in their order.

Each rank of a `torch.distributed` group holds one part of the time axis, rank 0 the first. What is
computed equals the computation on the whole, forward and backward. Gradients of weights are those
of a rank's own part: their sum over the ranks is the gradient of the whole.

`halo` fetches the neighbours' frames, `conv1d_split` convolves with them, `BatchNorm` normalises by
the statistics of all parts, and `time_wavefront` passes an LSTM's states from part to part.
`split_in_time` puts the first two into a whole model of convolutions, such as a Jasper.
"""

from asrkit.parallel.convolution import conv1d_split
from asrkit.parallel.halo import halo
from asrkit.parallel.model import split_in_time
from asrkit.parallel.norm import BatchNorm
from asrkit.parallel.recurrence import time_wavefront

__all__ = ["BatchNorm", "conv1d_split", "halo", "split_in_time", "time_wavefront"]
