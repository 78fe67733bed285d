"""What can be had of Triton: where it is broken, its own kernels are refused and the rest goes on."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from asrkit.losses import arguments, wavefront

ASK = """
import torch
from asrkit.losses import rnnt_loss
given = torch.zeros(1, 2, 2, 3), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1])
print(f"{rnnt_loss(*given):.4f}")
try:
    rnnt_loss(*given, impl="triton")
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
        [sys.executable, "-c", ASK],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2.6027", REFUSED]


class Faulting:
    """A tensor of which a kernel that failed should have written the numbers."""

    def tolist(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def triton_finds(monkeypatch):
    """Puts a lattice in the place of Triton's kernels; impl="auto" asks for it anew."""

    def put(kernels):
        monkeypatch.setitem(sys.modules, "asrkit.losses.triton", kernels)
        monkeypatch.setattr(arguments, "triton_fails", lambda: "")
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)

    works = arguments.triton_works
    works.cache_clear()
    yield put
    works.cache_clear()


@pytest.mark.parametrize(
    ("log_likelihood", "said"),
    [
        (Faulting(), "CUDA error: an illegal memory access"),
        (torch.tensor([torch.nan]), "costs nan nats"),
        (torch.tensor([-7.0]), "costs 7.0 nats"),
    ],
)
def test_a_triton_that_finds_nothing_right_is_not_taken_and_named_once(
    triton_finds, log_likelihood, said
):
    found = SimpleNamespace(log_likelihood=log_likelihood)
    kernels = {
        "arc_log_probs": wavefront.arc_log_probs,
        "lattice": lambda *given: found,
    }
    triton_finds(SimpleNamespace(**kernels))
    expected = f"Triton's losses do not work on cpu: .*{said}"
    with pytest.warns(RuntimeWarning, match=expected) as told:
        found = [arguments.triton_works(torch.device("cpu")) for _ in range(2)]
    assert (found, len(told)) == ([False, False], 1)


def test_a_first_call_inside_a_capture_is_refused_and_decides_nothing(
    triton_finds, monkeypatch
):
    triton_finds(wavefront)
    capturing = iter([True, False])
    monkeypatch.setattr(
        "torch.cuda.is_current_stream_capturing", lambda: next(capturing)
    )
    with pytest.raises(RuntimeError, match="Call the loss once before capturing"):
        arguments.triton_works(torch.device("cpu"))
    assert arguments.triton_works(torch.device("cpu"))
