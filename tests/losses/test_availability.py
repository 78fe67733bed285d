"""A broken Triton: its own kernels are refused and all others work."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from asrkit.losses import arguments, wavefront

CODE = """
import torch
from asrkit.losses import rnnt_loss
inputs = torch.zeros(1, 2, 2, 3), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1])
print(f"{rnnt_loss(*inputs):.4f}")
try:
    rnnt_loss(*inputs, impl="triton")
except ValueError as error:
    print(error)
"""
REFUSED = (
    "impl: expected another implementation, got 'triton', which fails here: "
    "RuntimeError: built for another driver. Pass impl='auto'."
)


def test_a_broken_triton_costs_only_its_own_kernels(tmp_path):
    (tmp_path / "triton").mkdir()
    broken = "raise RuntimeError('built for another driver')"
    (tmp_path / "triton" / "__init__.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2.6027", REFUSED]


class Faulting:
    """The output of a kernel that failed."""

    def tolist(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def costs(log_likelihood):
    """Kernels of a lattice with this output."""
    found = SimpleNamespace(log_likelihood=log_likelihood)
    lattice = {"lattice": lambda *inputs: found}
    return SimpleNamespace(arc_log_probs=wavefront.arc_log_probs, **lattice)


@pytest.fixture
def replace_kernels(monkeypatch):
    """Function that replaces kernels, so that impl="auto" tries them again on a CPU."""

    def replace(**kernels):
        for impl, module in kernels.items():
            monkeypatch.setitem(sys.modules, f"asrkit.losses.{impl}", module)
        monkeypatch.setattr(arguments, "compiler_fails", lambda impl: "")
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)

    arguments.fastest_on_gpu.cache_clear()
    yield replace
    arguments.fastest_on_gpu.cache_clear()


@pytest.mark.parametrize(
    ("log_likelihood", "problem"),
    [
        (Faulting(), "CUDA error: an illegal memory access"),
        (torch.tensor([torch.nan]), "costs nan nats"),
        (torch.tensor([-7.0]), "costs 7.0 nats"),
    ],
)
def test_kernels_with_wrong_results_are_not_chosen_and_warned_about_once(
    replace_kernels, log_likelihood, problem
):
    wrong = costs(log_likelihood)
    for numba_cuda, chosen in ((wavefront, "numba_cuda"), (wrong, "wavefront")):
        replace_kernels(triton=wrong, numba_cuda=numba_cuda)
        arguments.fastest_on_gpu.cache_clear()
        expected = f"triton does not work on cpu: .*{problem}.*with impl='{chosen}'"
        with pytest.warns(RuntimeWarning, match=expected) as warned:
            actual = [arguments.fastest_on_gpu(torch.device("cpu")) for _ in range(2)]
        assert (actual, len(warned)) == ([chosen, chosen], 1)


def test_without_triton_a_gpu_runs_numba_cuda(replace_kernels, monkeypatch):
    replace_kernels(numba_cuda=wavefront)
    missing = {"triton": "ModuleNotFoundError: No module named 'triton'"}
    monkeypatch.setattr(arguments, "compiler_fails", lambda impl: missing.get(impl, ""))
    with pytest.warns(RuntimeWarning, match="No module named 'triton'"):
        assert arguments.fastest_on_gpu(torch.device("cpu")) == "numba_cuda"


def test_a_first_call_inside_a_capture_is_refused_and_not_remembered(
    replace_kernels, monkeypatch
):
    replace_kernels(triton=wavefront)
    capturing = iter([True, False])
    monkeypatch.setattr(
        "torch.cuda.is_current_stream_capturing", lambda: next(capturing)
    )
    with pytest.raises(RuntimeError, match="Call the loss once before capturing"):
        arguments.fastest_on_gpu(torch.device("cpu"))
    assert arguments.fastest_on_gpu(torch.device("cpu")) == "triton"
