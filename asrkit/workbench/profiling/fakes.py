"""What a lean loss launches on a GPU, counted without one.

Its ops are counted on fake tensors, its kernels compiled or named.

Host tensors stay real, so that lengths can be read. Whatever touches a CUDA tensor runs on torch's
fakes, which have a shape and no numbers. A kernel is bound to its arguments and, if asked for,
compiled as a launch would do it; none is launched. So counts are exact and say nothing about time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from asrkit.losses import availability, lean
from asrkit.losses.lean.driver import LeanLoss
from asrkit.losses.nodes import Nodes
from asrkit.runtime import lacks, op_name, waits
from asrkit.workbench.profiling import cubin
from asrkit.workbench.profiling.ops import EachOp, tensors, works

PROCESSORS = 132  # multiprocessors of an H100, which the forward kernel's grid asks for


class OnFakes(EachOp):
    """Runs ops on CUDA tensors on fakes, all others for real.

    An op that would wait for the GPU is a RuntimeError.

    Attributes:
        ops: Ops of torch that a GPU would get, by name.
        kernels: Names of the Triton and Numba kernels, in their order.
        arguments: Triton's keyword arguments of the latest launch of each kernel.
        compiled: What was compiled, by kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        # Python writes numbers into tensors, which are no fakes.
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.ops = Counter[str]()
        self.kernels = list[str]()
        self.arguments = dict[str, dict[str, Any]]()
        self.compiled = dict[str, cubin.Cubin]()

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` on fakes where `args` and `kwargs` hold some or name a GPU, and count it."""
        inputs = tensors((args, kwargs))
        device = kwargs.get("device")
        fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        on_cuda = device is not None and torch.device(device).type == "cuda"
        if not (fake or on_cuda):
            return func(*args, **kwargs)
        if waits(func, args, kwargs):
            raise RuntimeError(f"{op_name(func)} waits for the GPU")
        if func is torch.ops.aten.addmm.dtype_out:  # torch's fakes cannot take it apart
            result = kwargs["out"]
        else:
            with self.fakes:
                result = func(*args, **kwargs)
        self.ops[op_name(func)] += works(func, inputs, tensors(result))
        return result

    @property
    def launches(self) -> int:
        """Ops and kernels together."""
        return self.ops.total() + len(self.kernels)


def lean_launches(  # noqa: PLR0913 - sizes by their letters, all keyword-only
    loss: Callable[..., Tensor],
    *,
    B: int,
    T: int,
    U1: int,
    D: int,
    V: int,
    dtype: torch.dtype = torch.bfloat16,
    halves: torch.dtype | None = None,
    cc: int = 90,
    compiles: bool = False,
    **options: Any,
) -> OnFakes:
    """What a lean loss launches on a GPU, forward and backward, without its reduction.

    The checks of arguments, which wait for the lengths once, are left out.

    Args:
        loss: rnnt_loss_lean or tdt_loss_lean.
        B: Utterances.
        T: Frames.
        U1: Lattice rows, labels + 1.
        D: Width of the joint.
        V: Rows of the output's weight.
        dtype: dtype of weight and bias.
        halves: dtype of the two halves of the joint, where autocast leaves them wider than `dtype`.
        cc: Compute capability, 90 for sm_90.
        compiles: Whether Triton's kernels are compiled, into `compiled`.
        options: Options of the loss.
    """
    sizes = [(B, T, D), (B, U1, D), (V, D), (V,)]
    dtypes = [halves or dtype, halves or dtype, dtype, dtype]
    with gpu_of_fakes(torch.tensor([[T, U1 - 1]] * B), cc, compiles) as count:
        inputs = []
        for size, input_dtype in zip(sizes, dtypes, strict=True):
            tensor = torch.empty(size, device="cuda", dtype=input_dtype)
            inputs.append(tensor.requires_grad_())
        targets = torch.empty(B, U1 - 1, device="cuda", dtype=torch.long)
        lengths = [torch.empty(B, device="cuda", dtype=torch.long) for _ in range(2)]
        costs = loss(*inputs, targets, *lengths, reduction="none", **options)
        with torch.no_grad():  # torch's engine would look for the device
            grads = LeanLoss.backward(costs.grad_fn, torch.empty_like(costs))
    for grad, tensor in zip(grads, inputs, strict=False):
        assert grad.shape == tensor.shape
        assert grad.dtype == tensor.dtype
    return count


@contextmanager
def gpu_of_fakes(lengths: Tensor, cc: int, compiles: bool) -> Iterator[OnFakes]:
    """Let the lean losses take fake CUDA tensors while the block runs.

    Args:
        lengths: Frames and labels of each utterance (B, 2).
        cc: Compute capability, 90 for sm_90.
        compiles: Whether Triton's kernels are compiled.
    """
    count = OnFakes()
    copies = dict[int, Tensor]()

    def count_numba_kernel(kernel: Any, *_: Any, **__: Any) -> None:
        count.kernels.append(kernel.__name__)

    def table_on(nodes: Nodes, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return nodes.table
        if id(nodes) not in copies:
            copies[id(nodes)] = count.fakes.from_tensor(nodes.table).to(device)
        return copies[id(nodes)]

    chip = SimpleNamespace(multi_processor_count=PROCESSORS)
    patches: list[Any] = [
        mock.patch.object(availability, "numba_cuda_works", return_value=True),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=chip),
        mock.patch.object(torch.cuda, "device_of", return_value=nullcontext()),
        mock.patch.object(lean, "check_lengths", return_value=lengths),
        mock.patch.object(Nodes, "on", table_on),
    ]
    if not torch.cuda.is_available():  # where it is, the device is set up as for any other use
        patches.append(mock.patch.object(torch.cuda, "_lazy_init", return_value=None))
    if not lacks("numba_cuda"):
        lattices = [import_module(f"asrkit.losses.{room}.numba_cuda") for room in ("rnnt", "tdt")]
        for lattice in lattices:
            patches.append(mock.patch.object(lattice, "launch", count_numba_kernel))
    if not lacks("triton"):
        patches += _triton_patches(count, cc, compiles)
    with ExitStack() as stack, count:
        for patch in patches:
            stack.enter_context(patch)
        yield count


def _triton_patches(count: OnFakes, cc: int, compiles: bool) -> list[Any]:
    """Patches that let Triton compile for sm_`cc`, or do nothing, where it would launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    jit = triton.runtime.jit
    run = jit.JITFunction.run
    target = GPUTarget("cuda", cc, 32)
    device = {
        "get_current_device": lambda: cc,
        "get_current_stream": lambda device: 0,
        "get_current_target": lambda: target,
    }

    def stand_in(value: Any) -> Any:
        if isinstance(value, Tensor):
            return jit.MockTensor(value.dtype)
        return value

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Count a launch of `kernel` on `grid`; `warmup`: compiling only, which it always is."""
        name = kernel.__name__
        count.kernels.append(name)
        count.arguments[name] = kwargs
        if compiles and name not in count.compiled:
            compiled = run(kernel, *map(stand_in, args), grid=grid, warmup=True, **kwargs)
            count.compiled[name] = cubin.read(
                compiled.asm["cubin"],
                name,
                cc=cc,
                threads=32 * compiled.metadata.num_warps,
                shared_B=compiled.metadata.shared,
            )

    return [
        mock.patch.object(jit.JITFunction, "run", compile_only),
        mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(**device)),
    ]
