"""What a lean loss would launch on a GPU that is not here: its ops counted on fake tensors, its
kernels compiled or named.

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
    """Runs ops on CUDA tensors on fakes, all others for real; RuntimeError for one that would wait
    for the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(
            allow_non_fake_inputs=True
        )  # numbers that Python writes into tensors
        self.ops = Counter[str]()  # of torch that a GPU would get, by name
        self.kernels = list[str]()  # of Triton and Numba, in their order
        self.asked = dict[
            str, dict[str, Any]
        ]()  # Triton's arguments by name, of the latest launch of each
        self.made = dict[str, cubin.Cubin]()  # what was compiled

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        given, device = tensors((args, kwargs)), kwargs.get("device")
        if not (
            any(isinstance(one, FakeTensor) for one in given)
            or (device and torch.device(device).type == "cuda")
        ):
            return func(*args, **kwargs)
        if waits(func, args, kwargs):
            raise RuntimeError(f"{op_name(func)} waits for the GPU")
        if func is torch.ops.aten.addmm.dtype_out:  # torch's fakes cannot take it apart
            result = kwargs["out"]
        else:
            with self.fakes:
                result = func(*args, **kwargs)
        self.ops[op_name(func)] += works(func, given, tensors(result))
        return result

    @property
    def launches(self) -> int:
        """Ops and kernels together."""
        return self.ops.total() + len(self.kernels)


def lean_launches(
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
    """What rnnt_loss_lean or tdt_loss_lean (weight with V rows) launches on a GPU, forward and
    backward, without its reduction.

    The arguments' checks, which wait for the lengths once, are left out. `halves` is the dtype of
    these two, where autocast leaves them wider than the weight. `compiles` puts Triton's kernels
    for sm_`cc` into `made`.
    """
    sizes = (B, T, D), (B, U1, D), (V, D), (V,)
    with gpu_of_fakes(torch.tensor([[T, U1 - 1]] * B), cc, compiles) as count:
        dtypes = halves or dtype, halves or dtype, dtype, dtype
        given = [
            torch.empty(size, device="cuda", dtype=kind).requires_grad_()
            for size, kind in zip(sizes, dtypes, strict=True)
        ]
        rest = [torch.empty(size, device="cuda", dtype=torch.long) for size in ((B, U1 - 1), B, B)]
        costs = loss(*given, *rest, reduction="none", **options)
        with torch.no_grad():  # torch's engine would look for the device
            grads = LeanLoss.backward(costs.grad_fn, torch.empty_like(costs))
    assert [(one.shape, one.dtype) for one in grads[:4]] == [
        (one.shape, one.dtype) for one in given
    ]
    return count


@contextmanager
def gpu_of_fakes(lengths: Tensor, cc: int, compiles: bool) -> Iterator[OnFakes]:
    """Within it the lean losses take fake CUDA tensors of these lengths (B, 2)."""
    count, copies = OnFakes(), dict[int, Tensor]()

    def of_numba(kernel: Any, *arguments: Any, **more: Any) -> None:
        count.kernels.append(kernel.__name__)

    def on(nodes: Nodes, device: torch.device) -> Tensor:
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
        mock.patch.object(Nodes, "on", on),
    ]
    if not torch.cuda.is_available():  # where it is, the device is set up as for any other use
        patches.append(mock.patch.object(torch.cuda, "_lazy_init", return_value=None))
    if not lacks("numba_cuda"):
        lattices = [import_module(f"asrkit.losses.{room}.numba_cuda") for room in ("rnnt", "tdt")]
        patches += [mock.patch.object(lattice, "launch", of_numba) for lattice in lattices]
    if not lacks("triton"):
        patches += _of_triton(count, cc, compiles)
    with ExitStack() as stack, count:
        for patch in patches:
            stack.enter_context(patch)
        yield count


def _of_triton(count: OnFakes, cc: int, compiles: bool) -> list[Any]:
    """Patches that have Triton compile for sm_`cc`, or do nothing, where it would launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    jit, target = triton.runtime.jit, GPUTarget("cuda", cc, 32)
    run = jit.JITFunction.run
    device = {
        "get_current_device": lambda: cc,
        "get_current_stream": lambda device: 0,
        "get_current_target": lambda: target,
    }

    def stand_in(value: Any) -> Any:
        return jit.MockTensor(value.dtype) if isinstance(value, Tensor) else value

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.__name__
        count.kernels.append(name)
        count.asked[name] = kwargs
        if compiles and name not in count.made:
            made = run(kernel, *map(stand_in, args), grid=grid, warmup=True, **kwargs)
            threads, shared_B = 32 * made.metadata.num_warps, made.metadata.shared
            count.made[name] = cubin.read(
                made.asm["cubin"], name, cc=cc, threads=threads, shared_B=shared_B
            )

    return [
        mock.patch.object(jit.JITFunction, "run", compile_only),
        mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(**device)),
    ]
