"""Benchmark suites: both arms of every comparison on the same inputs in one run, correctness first, records out."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses, ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.features import normalize, normalize_sequential
from asrkit.losses import rnnt_loss
from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.profiling import measure, peak_memory, ratio
from asrkit.records import Measurement, append
from asrkit.shapes import expect

Arms = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arms that must agree; the last two, a slow and a fast one, make the ratio."""

    what: str  # claim or benchmark id
    arms: Arms
    params: dict[str, Any]
    proof: Arms | None = None  # what to check instead, where float32 rounding decides what the arms return
    tolerance: float = 1e-5  # of floats, relative and absolute; integers must be equal
    memory: bool = False


def _rows(B: int, T: int, D: int, device: str) -> tuple[Tensor, Tensor]:
    """Random (B, T, D) and lengths (B,) as in a bucketed batch: from T down to T / 2."""
    made = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
    return made.to(device), torch.linspace(T, T / 2, B).long().to(device)


def losses(device: str, quick: bool) -> Iterator[Case]:
    """The transducer loss, forward and backward. Least work: read the logits twice, write their gradient."""
    for B, T, U1, V in [(1, 12, 6, 9), *([(2, 40, 11, 29)] if quick else [(1, 200, 101, 1024), (8, 200, 101, 29)])]:
        rows, _ = _rows(B * T, U1, V, device)
        logits, targets = rows.view(B, T, U1, V).requires_grad_(), torch.arange(U1 - 1, device=device).expand(B, -1) % (V - 1)
        rest = targets, torch.full((B,), T, device=device), torch.full((B,), U1 - 1, device=device)

        def arm(impl: Any, logits: Tensor = logits, rest: Any = rest) -> tuple[Tensor, Tensor]:
            cost = rnnt_loss(logits, *rest, impl=impl)
            return cost.detach(), torch.autograd.grad(cost, logits)[0]

        arms = {name: partial(arm, name) for name in ["reference"] * (T < 20) + ["torchaudio", "wavefront"]}
        params = {"shape": [B, T, U1, V], "floor_B": 3 * 4 * logits.nelement()}
        # torchaudio's float32 recursion errs by 1e-3 in the gradient of the large ones, wavefront's in float64 by 1e-6.
        yield Case(what="rnnt-loss-wavefront", arms=arms, params=params, tolerance=1e-5 if T < 20 else 5e-3, memory=True)


def decoding(device: str, quick: bool) -> Iterator[Case]:
    """Greedy CTC, one by one and batched, then a transducer of random weights. Least work: read once; one joint a step."""
    B, T, V = (8, 50, 129) if quick else (32, 250, 1025)
    logits, lengths = _rows(B, T, V, device)
    both = {"sequential": ctc_greedy_sequential, "batched": ctc_greedy}
    arms: Arms = {name: partial(decode, logits.log_softmax(-1), lengths) for name, decode in both.items()}
    yield Case(what="ctc-greedy-batched", arms=arms, params={"shape": [B, T, V], "floor_B": 4 * B * T * V})
    V, D, T = (33, 32, 20) if quick else (1025, 320, 50)
    config = TransducerConfig(vocab_size=V - 1, predictor=LSTMConfig(width=D), joint_width=D)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        weights = TransducerModel(config).eval()
        start = weights.join(3 * _rows(32, T, D, "cpu")[0], weights.predict(torch.tensor([V - 1]))[0])
        weights.output.bias[-1] += (start[..., :-1].amax(-1) - start[..., -1]).quantile(0.75)  # a label on a frame in four

    def pair(dtype: torch.dtype) -> Arms:
        call = partial(transducer_greedy, deepcopy(weights).to(device, dtype), 3 * encoded.to(dtype), lengths)
        return {"one_by_one": partial(call, strategy="one_by_one"), "frame_looping": partial(call, strategy="frame_looping")}

    for B in (1, 4) if quick else (1, 8, 32):
        encoded, lengths = _rows(B, T, D, device)
        arms, proof = pair(torch.float32), pair(torch.float64)
        steps = int(lengths.sum() + arms["frame_looping"]().lengths.sum())
        params = {"shape": [B, T, D, V], "steps": steps, "floor_FLOP": steps * 2 * D * V}
        yield Case(what="transducer-frame-looping", arms=arms, params=params, proof=proof)


def features(device: str, quick: bool) -> Iterator[Case]:
    """Per-feature normalisation, one utterance after another and batched. Least work: read once, write once."""
    B, T, F = (8, 200, 80) if quick else (32, 1600, 80)
    mel = _rows(B, T, F, device)
    arms = {"sequential": lambda: (normalize_sequential(*mel),), "batched": lambda: (normalize(*mel),)}
    yield Case(what="feature-norm-batched", arms=arms, params={"shape": [B, T, F], "floor_B": 2 * 4 * B * T * F})


SUITES: dict[str, Callable[[str, bool], Iterator[Case]]] = {"losses": losses, "decoding": decoding, "features": features}


def check(case: Case) -> None:
    """AssertionError unless all arms of `case` return the same tensors, up to its tolerance."""
    found = {name: arm() for name, arm in (case.proof or case.arms).items()}
    (reference, wanted), *others = (
        (name, [*vars(one).values()][:-1] if isinstance(one, Hypotheses) else one) for name, one in found.items()
    )
    for name, got in others:
        head = f"{case.what}: {name} disagrees with {reference}, so nothing was measured. "
        for x, y in zip(wanted, got, strict=True):
            close = case.tolerance * x.is_floating_point()
            torch.testing.assert_close(y, x, rtol=close, atol=close, msg=head.__add__)


def run(suite: str, *, device: str = "cpu", out: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Sealed records of one suite, appended to `out` case by case: latency of each arm, memory, and the ratio of two.

    Before a case is timed its arms must agree; where they do not, `check` raises and no record is made of it.
    """
    expect(suite in SUITES, "suite", "one of " + ", ".join(map(repr, SUITES)), repr(suite))
    done = []
    for case in SUITES[suite](device, quick):
        check(case)
        params = case.params | {"dtype": "float32", "threads": torch.get_num_threads(), "device": device}
        shared: dict[str, Any] = {"params": params, "load1": os.getloadavg()[0]}
        timings, made = measure(case.arms, repeats=5 if quick else 20, warmup=1 if quick else 3, device=device), []
        for name, timing in timings.items():
            shared |= {"impl": name, "warmup": timing.warmup, "timer": timing.timer}
            made.append(Measurement(case.what, "latency", "ms", timing.median_ms, timing.samples_ms, **shared))
            if case.memory:
                peak, alone = peak_memory(case.arms[name], device=device), shared | {"warmup": 0, "timer": "torch allocator"}
                made.append(Measurement(case.what, "peak_memory", "B", peak, **alone))
        slow, fast = [*case.arms][-2:]
        ratios, shared["params"] = ratio(timings, slow, fast), params | {"arms": [slow, fast]}
        made.append(Measurement(case.what, "ratio", "1", median(ratios), ratios, **shared))
        done += [one.sealed() for one in made]
        if out is not None:
            append(out, *made)
    return done


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Aligned lines of text, one a record; beside a latency, the rate of the least work (`floor_…`) that it stands for."""
    rows = [("what", "metric", "implementation", "shape", "median", "quartiles", "least work")]
    for record in records:
        params, stats, unit = record["params"], record["stats"], {"1": "×", "B": "MiB"}.get(record["unit"], record["unit"])
        numbers = [f"{number / (2**20 if unit == 'MiB' else 1):.3g}" for number in (record["value"], stats["p25"], stats["p75"])]
        ((floor, least),) = ((key, value) for key, value in params.items() if key.startswith("floor_"))
        rate = f"{least / record['value'] / 1e6:.3g} G{floor[6:]}/s" if record["metric"] == "latency" else ""
        impl, shape = " / ".join(params.get("arms", [record["impl"]])), "×".join(map(str, params["shape"]))
        rows.append((record["what"], record["metric"], impl, shape, f"{numbers[0]} {unit}", "–".join(numbers[1:]), rate))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
