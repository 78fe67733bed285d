"""`WhileGraph`: a CUDA graph that repeats a captured one while a flag on the device is set.

A whole decoding loop is then one launch, without any work of the host.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

# One thread copies the flag into the condition. NVRTC defines the type of the handle, and the
# driver provides the function.
KERNEL = b"""
extern "C" __device__ void cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value
);

extern "C" __global__ void go_on(cudaGraphConditionalHandle handle, const bool *active) {
    cudaGraphSetConditional(handle, *active);
}
"""
# The oldest target of CUDA 13; the driver compiles the PTX for its own GPU.
OLDEST = "--gpu-architecture=compute_75"


class WhileGraph:
    """Repeats a captured graph as long as a flag is set after a turn; there is at least one turn.

    The graph is a single WHILE node (CUDA 12.4; used for decoding in arXiv 2406.03791). It contains
    two nodes: the body as a child graph, and the kernel above. The child is a clone of the body,
    which is captured like any graph and owns its memory.
    """

    def __init__(self, body: torch.cuda.CUDAGraph, active: Tensor) -> None:
        """Build and instantiate the graph.

        Args:
            body: One turn, captured with keep_graph=True; kept alive.
            active: () bool on the device, written by the turn; kept alive.

        Raises:
            RuntimeError: The driver refuses.
        """
        from cuda.bindings import driver

        self.driver = driver
        self.kept_alive = body, active
        context = _checked(driver.cuCtxGetCurrent())
        self.graph = _checked(driver.cuGraphCreate(0))
        default = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = _checked(driver.cuGraphConditionalHandleCreate(self.graph, context, 1, default))
        loop = driver.CUgraphNodeParams()
        loop.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        loop.conditional.handle = handle
        loop.conditional.ctx = context
        loop.conditional.size = 1
        loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        _checked(driver.cuGraphAddNode(self.graph, None, None, 0, loop))
        inside = loop.conditional.phGraph_out[0]
        child = driver.CUgraph(body.raw_cuda_graph())
        turn = _checked(driver.cuGraphAddChildGraphNode(inside, None, 0, child))
        kernel = driver.CUDA_KERNEL_NODE_PARAMS()  # after the turn
        kernel.func = _checked(driver.cuModuleGetFunction(_module(int(context)), b"go_on"))
        for axis in "XYZ":
            setattr(kernel, f"gridDim{axis}", 1)
            setattr(kernel, f"blockDim{axis}", 1)
        values = int(handle), active.data_ptr()
        kernel.kernelParams = (values, (ctypes.c_uint64, ctypes.c_void_p))
        _checked(driver.cuGraphAddKernelNode(inside, [turn], 1, kernel))
        self.executable = _checked(driver.cuGraphInstantiate(self.graph, 0))

    def launch(self) -> None:
        """Start the loop on the current stream."""
        stream = self.driver.CUstream(torch.cuda.current_stream().cuda_stream)
        _checked(self.driver.cuGraphLaunch(self.executable, stream))

    def __del__(self) -> None:
        for destroy, handle in (("cuGraphExecDestroy", "executable"), ("cuGraphDestroy", "graph")):
            if hasattr(self, handle):
                getattr(self.driver, destroy)(getattr(self, handle))


def ptx() -> bytes:
    """PTX of the kernel for the driver. Needs NVRTC but no GPU."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(KERNEL, b"go_on.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, 1, [OLDEST.encode()]))
    text = bytearray(_checked(nvrtc.nvrtcGetPTXSize(program)))
    _checked(nvrtc.nvrtcGetPTX(program, text))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(text)


def _checked(answer: tuple) -> Any:
    """The result of a cuda-python call; RuntimeError with the name of its error if it failed."""
    error, *values = answer
    if error.value != 0:
        raise RuntimeError(f"CUDA error {error.name}")
    return values[0] if values else None


@cache
def _module(context: int) -> Any:
    """The module of the kernel, loaded once into each context; `context` is the current one."""
    from cuda.bindings import driver

    return _checked(driver.cuModuleLoadData(ptx()))
