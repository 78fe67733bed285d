"""Jasper in every way that the suite times it, against float64 on the CPU."""

from collections.abc import Iterator
from functools import partial

import torch

from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.suites import jasper
from asrkit.workbench.bench.suites.encoder import TOLERANCE


def jasper_checks(device: str, cuda: bool) -> Iterator[Check]:
    """A small Jasper, its utterances of unequal lengths. Compiled on a GPU only."""
    for name, way in jasper.ways(cuda, compiled=cuda).items():
        group = "jasper"
        if way.form == "compiled":
            group = "compiled"
        arms = rf"^jasper-inference in \S+: {name}$"
        yield Check(group, f"jasper {name}", arms, partial(_read, device, way))


def _read(device: str, way: jasper.Way) -> None:
    """Twice with other features: a graph has to read its inputs anew."""
    model = jasper.random_jasper(jasper.config_of(quick=True), "cpu")
    bins = model.encoder.config.bins
    features, lengths = jasper.speech(3, 1.5, bins, "cpu")
    buffer = features.clone().to(device)
    moved = jasper.random_jasper(model.config, device)
    call = jasper.arm(moved, (buffer, lengths.to(device)), way)
    exact = model.double()
    for sign in (1, -1):
        signed = sign * features
        buffer.copy_(signed)
        with torch.inference_mode():
            wanted, wanted_lengths = exact(signed.double(), lengths)
        found, found_lengths = call()
        assert torch.equal(found_lengths.cpu(), wanted_lengths)
        frames = torch.arange(wanted.shape[1])
        valid = (frames < wanted_lengths[:, None])[..., None]
        difference = (found.cpu().double() - wanted) * valid
        off = (difference.norm() / (wanted * valid).norm()).item()
        limit = TOLERANCE[way.arithmetic]
        assert off <= limit, f"{off:.2g} of the norm apart; {limit:g} is let pass"
