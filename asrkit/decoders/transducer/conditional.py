"""A CUDA graph that repeats a captured one while a flag on the device is set: a whole loop in one
launch, without the host.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

# One thread copies the flag into the condition. NVRTC brings the type of the handle, and the driver
# the function.
KERNEL = b"""
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);

extern "C" __global__ void go_on(cudaGraphConditionalHandle handle, const bool *active) {
    cudaGraphSetConditional(handle, *active);
}
"""
# that CUDA 13 still compiles for; the driver compiles it on for its own GPU
OLDEST = "--gpu-architecture=compute_75"


class WhileGraph:
    """Repeats `body`, captured with keep_graph=True, as long as `active` () bool is set after a
    turn; there is one turn at least.

    The graph is one conditional node (CUDA 12.4; arXiv 2406.03791 decodes so) around two: the body
    as a child graph, and the kernel above. Being cloned there, the body was captured the ordinary
    way, and its memory stays with `body`, which is kept.
    """

    def __init__(self, body: torch.cuda.CUDAGraph, active: Tensor) -> None:
        from cuda.bindings import driver

        self.driver, self.kept = driver, (body, active)
        context = told(driver.cuCtxGetCurrent())
        self.graph = told(driver.cuGraphCreate(0))
        default = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = told(driver.cuGraphConditionalHandleCreate(self.graph, context, 1, default))
        loop = driver.CUgraphNodeParams()
        loop.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        loop.conditional.handle, loop.conditional.ctx, loop.conditional.size = handle, context, 1
        loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        told(driver.cuGraphAddNode(self.graph, None, None, 0, loop))
        inside = loop.conditional.phGraph_out[0]
        turn = told(
            driver.cuGraphAddChildGraphNode(inside, None, 0, driver.CUgraph(body.raw_cuda_graph()))
        )
        decide = driver.CUDA_KERNEL_NODE_PARAMS()
        decide.func = told(driver.cuModuleGetFunction(_module(int(context)), b"go_on"))
        decide.gridDimX = decide.gridDimY = decide.gridDimZ = decide.blockDimX = (
            decide.blockDimY
        ) = decide.blockDimZ = 1
        decide.kernelParams = ((int(handle), active.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p))
        told(driver.cuGraphAddKernelNode(inside, [turn], 1, decide))
        self.executable = told(driver.cuGraphInstantiate(self.graph, 0))

    def launch(self) -> None:
        """Starts the loop on the current stream."""
        stream = self.driver.CUstream(torch.cuda.current_stream().cuda_stream)
        told(self.driver.cuGraphLaunch(self.executable, stream))

    def __del__(self) -> None:
        for destroy, handle in (("cuGraphExecDestroy", "executable"), ("cuGraphDestroy", "graph")):
            if hasattr(self, handle):
                getattr(self.driver, destroy)(getattr(self, handle))


def ptx() -> bytes:
    """The kernel for the driver; needs NVRTC and no GPU."""
    from cuda.bindings import nvrtc

    program = told(nvrtc.nvrtcCreateProgram(KERNEL, b"go_on.cu", 0, [], []))
    told(nvrtc.nvrtcCompileProgram(program, 1, [OLDEST.encode()]))
    text = bytearray(told(nvrtc.nvrtcGetPTXSize(program)))
    told(nvrtc.nvrtcGetPTX(program, text))
    told(nvrtc.nvrtcDestroyProgram(program))
    return bytes(text)


def told(answer: tuple) -> Any:
    """What a call of cuda-python gave back; RuntimeError with the name of its error if it gave
    none.
    """
    error, *values = answer
    if error.value != 0:
        raise RuntimeError(f"CUDA says {error.name}")
    return values[0] if values else None


@cache
def _module(context: int) -> Any:
    """The kernel, loaded once in each context, which is the current one."""
    from cuda.bindings import driver

    return told(driver.cuModuleLoadData(ptx()))
