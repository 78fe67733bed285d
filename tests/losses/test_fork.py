"""A process that is forked after a loss call can call the losses too, as with torchaudio's loss."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system cannot fork"
)

IN_FORKS = """
import multiprocessing, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from asrkit.losses import rnnt_loss, rnnt_loss_lean, tdt_loss

def value_and_gradient(_=None):
    # large enough for torch to use its threads too
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 11, 65, generator=generator, requires_grad=True)
    encoded = torch.randn(2, 40, 16, generator=generator, requires_grad=True)
    sizes = (torch.ones(2, 10, dtype=torch.int64), torch.tensor([40, 35]), torch.tensor([10, 8]))
    rnnt = rnnt_loss(logits, *sizes, blank=0)
    tdt = tdt_loss(logits, *sizes, blank=0)
    predicted, weight, bias = encoded[:, :11].detach(), encoded[0].detach(), encoded[0, :, 0].detach()
    lean = rnnt_loss_lean(encoded, predicted, weight, bias, *sizes, activation="relu", blank=0)
    (rnnt + tdt + lean).backward()
    parts = (rnnt.detach(), tdt.detach(), lean.detach(), logits.grad.abs().mean(), encoded.grad.abs().mean())
    return [round(float(part), 4) for part in parts]

torch.set_num_threads(2)
before = value_and_gradient()

child = os.fork()
if child == 0:
    os._exit(0 if value_and_gradient() == before else 1)
assert os.waitpid(child, 0)[1] == 0, "os.fork"

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(value_and_gradient, range(3)) == 3 * [before], "Pool"

class Losses(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.tensor(value_and_gradient())

loader = torch.utils.data.DataLoader(Losses(), num_workers=2, multiprocessing_context="fork")
for row in loader:
    torch.testing.assert_close(row[0], torch.tensor(before))

def check(rank):
    assert value_and_gradient() == before, "start_processes"

torch.multiprocessing.start_processes(check, nprocs=2, start_method="fork")
assert value_and_gradient() == before  # the parent continues
"""


def run(code, folder):
    """Run in a new process with its default number of threads."""
    environment = os.environ.copy()
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,  # a process that waits for lost threads never ends
        cwd=folder,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_process_computes_the_losses_of_its_parent(tmp_path):
    run(IN_FORKS, tmp_path)


FIRST_CALL = """
import os
import torch
from asrkit.decoders import ctc_greedy
from asrkit.losses import ctc_loss, rnnt_loss, tdt_loss

torch.set_num_threads(2)
logits = torch.randn(2, 40, 11, 505).exp()  # large enough to start the threads of torch
log_probs = logits[:, :, 0].log_softmax(-1)
strided = logits.mT.contiguous().mT  # logits of a node are not contiguous
sizes = (torch.ones(2, 10, dtype=torch.int64), torch.tensor([40, 35]), torch.tensor([10, 8]))

def rnnt(logits, impl):
    return rnnt_loss(logits, *sizes, blank=0, impl=impl, reduction="none")

CALLS = (
    lambda: rnnt(strided, "wavefront"),
    lambda: ctc_loss(log_probs, *sizes, blank=0),
    lambda: ctc_greedy(log_probs, sizes[1], impl="batched").scores,
    lambda: rnnt(strided, "numba_cpu"),
    lambda: tdt_loss(strided, *sizes, blank=0, impl="wavefront", reduction="none"),
    lambda: rnnt(logits, "numba_cpu"),
)

for first in range(len(CALLS) - 1):
    child = os.fork()
    if child == 0:
        try:
            torch.save([call() for call in CALLS[first:]], f"{first}.pt")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
expected = [call() for call in CALLS]
for first in range(len(CALLS) - 1):
    torch.testing.assert_close(torch.load(f"{first}.pt"), expected[first:])
"""


def test_a_process_forked_after_torch_used_its_threads_can_make_the_first_loss_call(
    tmp_path,
):
    run(FIRST_CALL, tmp_path)
