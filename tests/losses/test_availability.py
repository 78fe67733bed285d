"""What can be had of Numba's CUDA and Triton: a package that is there and broken costs its own kernels, and is named."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from asrkit import runtime
from asrkit.losses import lattice, wavefront

ASK = """
import torch
from asrkit.losses import rnnt_loss
from asrkit.runtime import lacks
print(lacks("numba_cuda"), lacks("triton"), sep="|")
try:
    rnnt_loss(torch.zeros(1, 2, 2, 3), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]), impl="numba_cuda")
except ValueError as error:
    print(error)
"""
SAID = "impl: expected another implementation, got 'numba_cuda', which fails here: {}. Pass impl='auto'."


@pytest.mark.parametrize(("text", "said"), [
    ("raise RuntimeError('built for another driver')", "RuntimeError: built for another driver"),
    ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
])  # fmt: skip
def test_a_broken_numba_cuda_costs_only_its_own_kernels(tmp_path, text, said):
    (tmp_path / "numba_cuda").mkdir()
    (tmp_path / "numba_cuda" / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    broken, triton, error = done.stdout.replace("\n", "|").rstrip("|").split("|")
    assert (broken, triton, error) == (said, "", SAID.format(said))


def test_a_package_that_is_not_there_is_named_and_asked_for_once(monkeypatch):
    asked = list[str]()

    def absent(name):
        asked.append(name)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(runtime, "import_module", absent)
    runtime.lacks.cache_clear()
    assert [runtime.lacks("triton") for _ in range(3)] == [
        "no package triton"
    ] * 3 and asked == ["triton"]
    runtime.lacks.cache_clear()


def test_a_numba_cuda_that_finds_no_nvvm_fails_when_it_is_asked_for_and_not_in_the_middle_of_a_loss(
    monkeypatch,
):
    cuda = pytest.importorskip("numba_cuda") and __import__(
        "numba.cuda", fromlist=["cuda"]
    )

    def compiles(*given, **how):
        raise OSError("libnvvm.so: cannot open shared object file")

    monkeypatch.setattr(cuda, "compile", compiles)
    runtime.lacks.cache_clear()
    assert (
        runtime.lacks("numba_cuda")
        == "OSError: libnvvm.so: cannot open shared object file"
    )
    runtime.lacks.cache_clear()
    monkeypatch.undo()
    assert runtime.lacks("numba_cuda") == ""


class Faulting:
    """A tensor of which a kernel that failed should have written the numbers."""

    def tolist(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def triton_finds(monkeypatch):
    """Puts a lattice in the place of Triton's kernels; impl="auto" asks for it anew."""

    def put(kernels):
        monkeypatch.setitem(sys.modules, "asrkit.losses.triton", kernels)
        monkeypatch.setattr(lattice, "lacks", lambda package: "")

    works = lattice.triton_works
    works.cache_clear()
    yield put
    works.cache_clear()


@pytest.mark.parametrize(("log_likelihood", "said"), [
    (Faulting(), "CUDA error: an illegal memory access"), (torch.tensor([torch.nan]), "costs nan nats"),
    (torch.tensor([-7.0]), "costs 7.0 nats"),
])  # fmt: skip
def test_a_triton_that_finds_nothing_right_is_not_taken_and_named_once(
    triton_finds, log_likelihood, said
):
    found = SimpleNamespace(log_likelihood=log_likelihood)
    triton_finds(
        SimpleNamespace(
            arc_log_probs=wavefront.arc_log_probs, lattice=lambda *given: found
        )
    )
    with pytest.warns(
        RuntimeWarning, match=f"Triton's losses do not work on cpu: .*{said}"
    ) as told:
        assert [lattice.triton_works(torch.device("cpu")) for _ in range(2)] == [
            False
        ] * 2
    assert len(told) == 1


def test_on_a_gpu_auto_takes_triton_where_it_works_and_plain_torch_elsewhere(
    triton_finds, monkeypatch
):
    triton_finds(wavefront)
    assert lattice.triton_works(torch.device("cpu"))
    for dtype, works, taken in (
        (torch.float32, True, "triton"),
        (torch.float32, False, "wavefront"),
        (torch.float64, True, "wavefront"),
    ):
        monkeypatch.setattr(lattice, "triton_works", lambda device, works=works: works)
        scores = SimpleNamespace(dtype=dtype, device=torch.device("cuda"))
        assert lattice.fastest(scores) == taken
