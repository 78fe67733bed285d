"""Decoding by attention against its definition, with drafts and by graphs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import aed_greedy, aed_greedy_reference, ctc_draft, ctc_greedy
from asrkit.models import AEDConfig, AEDModel, ConvConfig
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.planted_attention import (
    PlantedText,
    ctc_text,
    planted_decoder,
    planted_text,
)
from asrkit.workbench.bench.suites.aed import BEST, ERRORS, SLOW_WAYS, WAYS

MOST = 9  # labels; random weights seldom end
SMALL: dict[str, Any] = {"V": 33, "width": 112, "layers": 2, "heads": 2, "most": 64}


def attention_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of every way to decode by attention that the suite `aed` times."""
    for name, options in (WAYS | SLOW_WAYS).items():
        names = [name]
        if name in BEST and not cuda:
            names.append(f"{name}_packed")
        yield _check(f"attention {name}", names, partial(_way, device, options))
    drafts = [f"draft_{per_cent}" for per_cent in ERRORS]
    yield _check("attention drafts", drafts, partial(_drafts, device))
    if not cuda:
        return
    for name in BEST:
        for graphs in ("step", "full"):
            options = WAYS[name] | {"graphs": graphs}
            call = partial(_way, device, options)
            yield _check(f"attention {name}, graphs={graphs}", [f"{name}_{graphs}"], call)


def _check(name: str, arms: list[str], call: partial[None]) -> Check:
    """A check that vouches for arms of these names in all arithmetic."""
    pattern = "|".join(rf"^aed-\S+ in \S+: (\d+_\d+_)?{arm}$" for arm in arms)
    return Check("decoders", name, pattern, call)


def random_aed(device: str) -> tuple[AEDModel, Tensor, Tensor]:
    """A small model of random weights in float64, frames (B, T, D) and lengths (B,) from T to 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sizes: dict[str, Any] = {"width": 8, "heads": 2, "layers": 2, "most": 32}
        config = AEDConfig(
            vocab_size=11, pad=0, bos=1, eos=2, encoder=ConvConfig(width=8), dropout=0.0, **sizes
        )
        model = AEDModel(config).double().eval().requires_grad_(False)
        for layer in model.stack():
            torch.nn.init.normal_(layer.cross_attention.key_value.bias)
        for weight in model.layers.parameters():
            weight.mul_(3)
        frames = torch.randn(6, 12, 8, dtype=torch.float64)
    lengths = torch.linspace(12, 0, 6).long()
    return model.to(device), frames.to(device), lengths.to(device)


def _way(device: str, options: dict[str, Any]) -> None:
    """Labels, scores and confidence are those of the definition on the CPU, all in float64."""
    asked: dict[str, Any] = {"most": MOST, "confidence": "entropy"}
    wanted = aed_greedy_reference(*random_aed("cpu"), **asked)
    got = aed_greedy(*random_aed(device), **{"graphs": "off", **asked, **options})
    assert wanted.lengths.sum() > 20, "the model says next to nothing"
    near(got.parts(), wanted.parts())


def _drafts(device: str) -> None:
    """A CTC head's text changes nothing, however much of it is misheard."""
    plan: PlantedText = planted_text(planted_decoder(**SMALL), 4, 40)
    plan = plan.to(device, torch.float32)
    given = (plan.model, plan.encoded, plan.lengths)
    wanted = aed_greedy(*given, graphs="off")
    assert wanted.tokens() == plan.labels, "other labels than were planted"
    for per_cent in (*ERRORS, 100):
        ctc = ctc_text(plan, per_cent / 100).to(device)
        draft = ctc_draft(plan.model, ctc_greedy(ctc, plan.lengths))
        got = aed_greedy(*given, draft=draft, graphs="off")
        near(got.parts(), wanted.parts())
