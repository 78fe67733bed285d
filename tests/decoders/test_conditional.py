"""The graph that repeats itself: how it is put together, by fakes, and its kernel, compiled without a GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders.transducer import conditional


def test_the_kernel_of_the_condition_compiles_without_a_gpu():
    pytest.importorskip("cuda.bindings.nvrtc")
    text = conditional.ptx().decode()
    assert ".visible .entry go_on(" in text and "cudaGraphSetConditional" in text
    assert text.endswith("\0")


def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(conditional, "KERNEL", b"no C")
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_COMPILATION"):
        conditional.ptx()


def test_the_loop_is_a_condition_around_the_body_and_then_the_kernel(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    calls, fine = [], driver.CUresult.CUDA_SUCCESS
    made = {
        "cuCtxGetCurrent": driver.CUcontext(5), "cuGraphCreate": driver.CUgraph(6), "cuModuleLoadData": driver.CUmodule(7),
        "cuGraphConditionalHandleCreate": driver.CUgraphConditionalHandle(8), "cuGraphAddNode": driver.CUgraphNode(9),
        "cuGraphAddChildGraphNode": driver.CUgraphNode(10), "cuModuleGetFunction": driver.CUfunction(11),
        "cuGraphAddKernelNode": driver.CUgraphNode(12), "cuGraphInstantiate": driver.CUgraphExec(13),
        "cuGraphExecDestroy": None, "cuGraphDestroy": None,
    }  # fmt: skip

    def stand_in(name):
        def call(*given):
            calls.append((name, given))
            if name == "cuGraphAddKernelNode":  # the pointers live as long as the call
                pointers = (ctypes.c_void_p * 2).from_address(given[3].kernelParams)
                calls.append([ctypes.c_uint64.from_address(pointer).value for pointer in pointers])
            return (fine, made[name]) if made[name] is not None else (fine,)

        return call

    for name in made:
        monkeypatch.setattr(driver, name, stand_in(name))
    conditional._module.cache_clear()
    active = torch.zeros((), dtype=torch.bool)
    graph = conditional.WhileGraph(SimpleNamespace(raw_cuda_graph=lambda: 99), active)
    conditional._module.cache_clear()
    assert [call[0] for call in calls if isinstance(call, tuple)] == [
        "cuCtxGetCurrent", "cuGraphCreate", "cuGraphConditionalHandleCreate", "cuGraphAddNode", "cuGraphAddChildGraphNode",
        "cuModuleLoadData", "cuModuleGetFunction", "cuGraphAddKernelNode", "cuGraphInstantiate",
    ]  # fmt: skip
    given = {call[0]: call[1] for call in calls if isinstance(call, tuple)}
    assert given["cuGraphConditionalHandleCreate"][2:] == (
        1,
        driver.CU_GRAPH_COND_ASSIGN_DEFAULT,
    )  # the first turn needs no flag
    node = given["cuGraphAddNode"][4].conditional
    assert (
        node.type == driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        and node.size == 1
        and int(node.handle) == 8
    )
    assert int(given["cuGraphAddChildGraphNode"][3]) == 99
    assert [int(before) for before in given["cuGraphAddKernelNode"][1]] == [10]
    assert [8, active.data_ptr()] in calls
    del graph
    assert [call[0] for call in calls[-2:]] == ["cuGraphExecDestroy", "cuGraphDestroy"]
