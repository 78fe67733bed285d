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


@pytest.fixture
def replace_triton(monkeypatch):
    """Function that replaces Triton's kernels, so that impl="auto" tries them again."""

    def replace(kernels):
        monkeypatch.setitem(sys.modules, "asrkit.losses.triton", kernels)
        monkeypatch.setattr(arguments, "triton_fails", lambda: "")
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)

    works = arguments.triton_works
    works.cache_clear()
    yield replace
    works.cache_clear()


@pytest.mark.parametrize(
    ("log_likelihood", "problem"),
    [
        (Faulting(), "CUDA error: an illegal memory access"),
        (torch.tensor([torch.nan]), "costs nan nats"),
        (torch.tensor([-7.0]), "costs 7.0 nats"),
    ],
)
def test_a_triton_with_wrong_results_is_not_chosen_and_warned_about_once(
    replace_triton, log_likelihood, problem
):
    actual = SimpleNamespace(log_likelihood=log_likelihood)
    kernels = {
        "arc_log_probs": wavefront.arc_log_probs,
        "lattice": lambda *inputs: actual,
    }
    replace_triton(SimpleNamespace(**kernels))
    expected = f"Triton's losses do not work on cpu: .*{problem}"
    with pytest.warns(RuntimeWarning, match=expected) as warned:
        actual = [arguments.triton_works(torch.device("cpu")) for _ in range(2)]
    assert (actual, len(warned)) == ([False, False], 1)


def test_a_first_call_inside_a_capture_is_refused_and_not_remembered(
    replace_triton, monkeypatch
):
    replace_triton(wavefront)
    capturing = iter([True, False])
    monkeypatch.setattr(
        "torch.cuda.is_current_stream_capturing", lambda: next(capturing)
    )
    with pytest.raises(RuntimeError, match="Call the loss once before capturing"):
        arguments.triton_works(torch.device("cpu"))
    assert arguments.triton_works(torch.device("cpu"))
