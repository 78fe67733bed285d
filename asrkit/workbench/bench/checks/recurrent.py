"""The LSTM encoder in phases against each utterance by itself."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from asrkit.models import LSTMEncoder
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.suites import phases

LENGTHS = (60, 49, 41, 23, 6, 1)  # odd ones too, in stacked frames as well


def recurrent_checks(device: str, cuda: bool) -> Iterator[Check]:
    """A check for each way to run a batch, in float32 and on a GPU in bfloat16."""
    dtypes = [torch.float32]
    if cuda:
        dtypes.append(torch.bfloat16)
    ways = {f"phases_{count}": phases.in_phases(count) for count in phases.COUNTS}
    ways |= {f"sub_batches_{n}": phases.in_sub_batches(n) for n in phases.SUB_BATCHES}
    ways |= {"whole": phases.in_phases(1), "packed": phases.packed}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for way, encode in ways.items():
            arms = rf"^lstm-\S+ in {name}: {way}$"
            call = partial(_encoded, device, dtype, encode)
            yield Check("recurrent", f"lstm {way} {name}", arms, call)


def _encoded(device: str, dtype: torch.dtype, encode: phases.Encode) -> None:
    model = phases.random_encoder(phases.QUICK)
    speech = phases.make_speech(model, torch.tensor(LENGTHS))
    wanted = _one_by_one(deepcopy(model).double(), speech)
    moved = model.to(device, dtype)
    there = phases.Speech(
        features=speech.features.to(device, dtype),
        lengths=speech.lengths,
        gradient=speech.gradient.to(device, dtype),
    )
    got = phases.Step(moved, there, encode)()
    near([part.cpu() for part in got], wanted, phases.TOLERANCES[dtype])


def _one_by_one(model: LSTMEncoder, speech: phases.Speech) -> list[Tensor]:
    """Encoded frames and gradients of the weights in float64, each utterance without padding."""
    encoded = torch.zeros_like(speech.gradient, dtype=torch.float64)
    for row, length in enumerate(speech.lengths.tolist()):
        features = speech.features[row : row + 1, :length].double()
        frames, _ = model(features, torch.tensor([length]))
        frames.backward(speech.gradient[row : row + 1, : frames.shape[1]].double())
        encoded[row, : frames.shape[1]] = frames[0].detach()
    return [encoded, *[weight.grad for weight in model.parameters() if weight.grad is not None]]
