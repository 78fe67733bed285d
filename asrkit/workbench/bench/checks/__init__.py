"""Every fast path of a device against its reference, at sizes that take seconds: before a machine
is measured.

The references are the plain loops in float64, on the CPU where there are any. A check that fails
names what it vouched for: those arms and cases are not measured. It vouches for what it shows to be
right and for nothing else: a kind of model, a kind of graph, an arithmetic (`guards.way` has how
arms are named so). What no arm does, as decoding under autocast, it vouches for not at all. The
same table runs on a CPU, with its implementations.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.decoders.transducer import STRATEGIES, graphs
from asrkit.decoders.transducer.beam import transducer_beam
from asrkit.decoders.transducer.beam_reference import transducer_beam_reference
from asrkit.decoders.transducer.steps import GreedyModel
from asrkit.features import log_mel, normalize, normalize_sequential
from asrkit.models import (
    CTCConfig,
    CTCModel,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.cases import dtype_name
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.checks.losses import DTYPES, kernels, tiles
from asrkit.workbench.bench.compare import near
from asrkit.workbench.bench.ladder_pipeline import FileRecognizer
from asrkit.workbench.bench.planted import Planted, ctc_log_probs, planted
from asrkit.workbench.bench.planted import kind as kind_of
from asrkit.workbench.bench.suites import encoder, ladder, precision
from asrkit.workbench.bench.suites.losses import ROUNDED
from asrkit.workbench.profiling import cast_profile, launch_profile, measure, peak_memory

JUMPS: Sequence[tuple[int, ...]] = ((), (0, 1, 2, 3, 4))


def table(device: str) -> list[Check]:
    """All checks of a device, none of them begun."""
    made = [
        _graphs,
        _decoders,
        _ladder,
        kernels,
        tiles,
        _rest,
        _profiling,
        _encoder,
    ]  # the most valuable arms first
    return [one for checks in made for one in checks(device, device.startswith("cuda"))]


def _talker(durations: tuple[int, ...], device: str, dtype: torch.dtype) -> TransducerModel:
    """A transducer of random weights, loud enough to speak in bursts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = TransducerConfig(
            vocab_size=7,
            predictor=LSTMConfig(width=8, layers=2),
            joint_width=8,
            durations=durations,
            activation="relu",
        )
        model = TransducerModel(config).double().eval().requires_grad_(False)
    model.output.weight.mul_(4)
    model.output.bias[model.blank] += -2 if durations else 1
    return model.to(device, dtype)


def _frames(
    B: int, T: int, device: str, dtype: torch.dtype, seed: int = 1
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(B, T, 8, generator=draw, dtype=torch.float64)).to(
        device, dtype
    ), torch.linspace(T, 0, B).long().to(device)


def _decoders(device: str, cuda: bool) -> Iterator[Check]:
    for durations, strategy in product(JUMPS, STRATEGIES):
        names = [strategy]
        if strategy == "windowed_looping":  # graphs have checks of their own
            names += ["windowed_looping_off", r"window_\d+(_off)?"]
        arms = [rf"^{kind_of(durations)}-\S+ in \S+: {name}$" for name in names]
        yield Check(
            "decoders",
            f"{strategy} {kind_of(durations)}",
            "|".join(arms),
            partial(_greedy, device, strategy, durations),
        )
    for durations in JUMPS:
        yield Check(
            "decoders",
            f"planted {len(durations)} durations",
            "",
            partial(_planted, device, durations),
        )
        yield Check(
            "decoders",
            f"carry {len(durations)} durations",
            "",
            partial(_carry, device, durations, graphs="off"),
        )
        yield Check(
            "decoders", f"beam {len(durations)} durations", "", partial(_beam, device, durations)
        )
    yield Check(
        "decoders", "ctc batched", r"^ctc-greedy-batched in \S+: batched$", partial(_ctc, device)
    )


def _greedy(device: str, strategy: Any, durations: tuple[int, ...]) -> None:
    """Labels, frames, durations, scores and confidence as the definition finds them on the CPU, all
    in float64.
    """
    how: dict[str, Any] = {"confidence": "entropy", "max_symbols": 3, "graphs": "off"}
    wide = torch.float64
    wanted = transducer_greedy(
        _talker(durations, "cpu", wide), *_frames(9, 30, "cpu", wide), strategy="one_by_one", **how
    )
    found = transducer_greedy(
        _talker(durations, device, wide), *_frames(9, 30, device, wide), strategy=strategy, **how
    )
    assert wanted.lengths.sum() > 20, "the model says next to nothing"
    near(found.parts(), wanted.parts())


def _plan(durations: tuple[int, ...]) -> Planted:
    return planted(4, 40, V=33, width=240, durations=durations)


def _planted(device: str, durations: tuple[int, ...]) -> None:
    """What was planted is found in every dtype."""
    plan = _plan(durations)
    for dtype in DTYPES:
        model = deepcopy(plan.model).to(device, dtype)
        found = transducer_greedy(
            model, plan.encoded.to(device, dtype), plan.lengths.to(device), graphs="off"
        )
        assert found.tokens() == plan.labels, f"other labels in {dtype}"


def _carry(device: str, durations: tuple[int, ...], **how: Any) -> None:
    model, (encoded, lengths) = (
        _talker(durations, device, torch.float32),
        _frames(5, 30, device, torch.float32),
    )
    whole = transducer_greedy(model, encoded, lengths, graphs="off")
    first = transducer_greedy(model, encoded[:, :13], lengths.clamp(max=13), **how)
    rest = transducer_greedy(
        model, encoded[:, 13:], (lengths - 13).clamp(min=0), carry=first.carry, **how
    )
    assert [a + b for a, b in zip(first.tokens(), rest.tokens(), strict=True)] == whole.tokens()
    spoilt = encoded.masked_fill(~valid_mask(lengths, 30)[..., None], torch.nan)
    assert transducer_greedy(model, spoilt, lengths, **how).tokens() == whole.tokens(), (
        "padding matters"
    )


def _beam(device: str, durations: tuple[int, ...]) -> None:
    wide, how = torch.float64, dict[str, Any](width=4, nbest=2, max_symbols=3)
    wanted = transducer_beam_reference(
        _talker(durations, "cpu", wide), *_frames(4, 12, "cpu", wide), **how
    )
    found = transducer_beam(_talker(durations, device, wide), *_frames(4, 12, device, wide), **how)
    for ours, theirs in zip(
        (found, *found.alternatives), (wanted, *wanted.alternatives), strict=True
    ):
        assert ours.tokens() == theirs.tokens()
        near([ours.scores], [theirs.scores])


def _ctc(device: str) -> None:
    plan = _plan(())
    given = ctc_log_probs(plan), plan.lengths
    near(
        ctc_greedy(*(one.to(device) for one in given)).parts(),
        ctc_greedy_sequential(*given).parts(),
    )


def _graphs(device: str, cuda: bool) -> Iterator[Check]:
    """Graphs that are captured, on a GPU, with fused and with plain turns; on a CPU "auto" stands
    for the plain loop.

    A turn vouches for its own arms only: where a fused kernel is wrong the plain ones are measured,
    and the other way round.
    """
    ways: Any = [*product(("step", "full"), ("fused", "plain"))] * cuda + [("auto", "auto")]
    for mode, turn in ways:
        how: dict[str, Any] = {"graphs": mode, "turn": turn}
        made = list[tuple[str, str, Callable[[], object]]]()
        for durations, dtype in product(JUMPS, DTYPES if cuda else DTYPES[:1]):
            name = f"{dtype_name(dtype)} {len(durations)} durations"
            made.append(
                (
                    name,
                    graph_arms(mode, turn, durations, dtype),
                    partial(_looped, device, durations, dtype, **how),
                )
            )
        made += [("carry", "", partial(_carry, device, (), **how))]
        made += [("weights that change and move", "", partial(_moved, device, **how))]
        made += [("autocast", "", partial(_autocast, device, **how))]
        if cuda and mode != "auto":
            made += [("nothing captured waits", "", partial(_never_waits, device, mode, turn))]
        group = mode + " plain" * (turn == "plain")
        for name, arms, call in made:
            yield Check(f"graphs {group}", f"graphs={group}: {name}", arms, call)


def graph_arms(mode: str, turn: str, durations: Sequence[int], dtype: torch.dtype) -> str:
    """A pattern of the arms that decode by such graphs, of models that jump so, in that dtype; ""
    where there are none.

    Of the ladder a plain turn has the rungs of graphs. The rung of fused turns stands on a whole
    graph.
    """
    kind, end = kind_of(durations), "_plain" * (turn == "plain")
    arms = {rf"{kind}-\S+": [r"window_\d+"]}  # which say nothing of graphs
    if mode != "auto":
        arms = {rf"{kind}-\S+": [f"windowed_looping_{mode}{end}", rf"window_\d+_{mode}{end}"]}
    rungs = {
        ("step", "plain"): "graph_of_steps",
        ("full", "plain"): "graph_whole",
        ("full", "fused"): "fused_turns",
    }
    if (mode, turn) in rungs:
        arms[rf"ladder-{kind}\S*"] = [rf"\w+_{rungs[mode, turn]}"]
    named = [
        rf"^{what} in {dtype_name(dtype)}: {name}$"
        for what, names in arms.items()
        for name in names
    ]
    return "|".join(named) if dtype != torch.float16 else ""


def _looped(
    device: str, durations: tuple[int, ...], dtype: torch.dtype, *, graphs: Any, turn: Any = "auto"
) -> None:
    """What the plain loop finds, scores up to rounding: a graph's products may be other kernels'."""
    model, how = (
        _talker(durations, device, dtype),
        dict[str, Any](confidence="entropy", max_symbols=3),
    )
    way = {"fused": "fused", "plain": "not fused: as asked"}.get(turn, "")
    for B, T, seed, window in [
        (8, 48, 1, None),
        (8, 40, 2, None),
        (16, 20, 3, 1),
        (1, 48, 4, 8),
        (8, 48, 5, None),
    ]:
        given, how["window"] = _frames(B, T, device, dtype, seed), window
        found = transducer_greedy(model, *given, graphs=graphs, turn=turn, **how)
        if device.startswith("cuda"):
            assert found.impl.startswith(
                f"windowed_looping, graphs={'step' if graphs == 'auto' else graphs}, {way}"
            ), found.impl
        near(
            found.parts(),
            transducer_greedy(model, *given, graphs="off", **how).parts(),
            ROUNDED[dtype],
        )


def _moved(device: str, **how: Any) -> None:
    model, given = _talker((), device, torch.float32), _frames(8, 48, device, torch.float32)
    before = transducer_greedy(model, *given, **how)
    model.output.weight.neg_()
    after = transducer_greedy(model, *given, **how)
    near(after.parts(), transducer_greedy(model, *given, graphs="off").parts())
    assert after.tokens() != before.tokens(), "new weights, old labels"
    model.bfloat16()
    given = given[0].bfloat16(), given[1]
    found, wanted = (
        transducer_greedy(model, *given, **one).parts() for one in (how, {"graphs": "off"})
    )
    near(found, wanted, ROUNDED[torch.bfloat16])
    graphs.release_graphs(model)


def _autocast(device: str, **how: Any) -> None:
    model = _talker((), device, torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        for seed in (3, 4):
            given = _frames(8, 48, device, torch.float32, seed)
            found, wanted = (
                transducer_greedy(model, *given, **one).parts() for one in (how, {"graphs": "off"})
            )
            near(found, wanted, ROUNDED[torch.bfloat16])


def _never_waits(device: str, mode: Any, turn: Any) -> None:
    """torch itself raises at a wait, and the driver counts what Python launches beside the graph."""
    model, (encoded, lengths) = (
        _talker((0, 1, 2), device, torch.float32),
        _frames(8, 48, device, torch.float32),
    )
    transducer_greedy(model, encoded, lengths, graphs=mode, turn=turn)
    [(loop, run)] = graphs.MODELS[id(model)].loops.values()
    with torch.inference_mode():
        greedy = GreedyModel(model, device=encoded.device)
        carry = greedy.initial_carry(encoded)
        loop.load(encoded, lengths, carry)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.turn(greedy)
            if mode == "full":
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loop.load(encoded, lengths, carry)
        seen = launch_profile(run, device=device)
    graphs_run = seen.graph_launches or 0
    assert seen.launches == (0 if mode == "full" else graphs_run), (
        f"{seen.launches} launches beside {graphs_run} of graphs"
    )
    assert (graphs_run <= 1) == (mode == "full"), f"{graphs_run} graphs were launched"


def _rest(device: str, cuda: bool) -> Iterator[Check]:
    yield Check("models", "log_mel", "", partial(_log_mel, device))
    yield Check(
        "models",
        "normalize",
        r"^feature-norm-batched in \S+: batched$",
        partial(_normalize, device),
    )
    for mode in precision.MODES:
        arms = rf"^precision-\S+ in \S+: {mode}$"
        arms += rf"|^half-over-autocast in \S+: {mode}$" * (mode in ("autocast", "bfloat16"))
        yield Check("models", f"precision {mode}", arms, partial(_precision, device, mode))


def _log_mel(device: str) -> None:
    wave = torch.randn(3, 16_000, generator=torch.Generator().manual_seed(0)) / 10
    lengths = torch.tensor([16_000, 12_345, 800])
    near(
        log_mel(wave.to(device), lengths.to(device)), log_mel(wave, lengths), 2e-3
    )  # an FFT's last digits, through a logarithm


def _normalize(device: str) -> None:
    features, lengths = (
        torch.randn(4, 50, 80, generator=torch.Generator().manual_seed(0)) + 3,
        torch.tensor([50, 33, 1, 2]),
    )
    wanted = normalize_sequential(features.double(), lengths)
    for way in (normalize, normalize_sequential):
        near([way(features.to(device), lengths.to(device))], [wanted], 1e-4)


def _precision(device: str, mode: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(CTCConfig(vocab_size=32, encoder=presets.tiny().encoder)).eval()
    features, lengths = encoder.speech(2, 2, 80, device)
    exact = precision.reader(model, "float64")(features.cpu(), lengths.cpu())
    found = precision.reader(model.to(device), mode)(features, lengths)
    off = precision.deviation(
        exact, precision.ModelOutput(found.log_probs.cpu(), found.lengths.cpu(), found.tokens)
    )
    assert off.log_prob_max < 0.1, off


def _encoder(device: str, cuda: bool) -> Iterator[Check]:
    """FastConformers of two blocks in every way, against float64 on the CPU. Compiled on a GPU
    only: a rehearsal need not wait.
    """
    ways = {
        name: way
        for group in encoder.groups(cuda, compiled=cuda).values()
        for name, way in group.items()
    }
    for name, way in ways.items():
        group = "compiled" if way.compiled else "encoder"
        arms = rf"^encoder-\S+ in \S+: {name}$"
        if rung := _rung_of(way, cuda):
            arms += rf"|^ladder-\S+ in {way.arithmetic}: {rung}$"
        yield Check(group, f"encoder {name}", arms, partial(_encoded, device, way))


def _rung_of(way: encoder.Way, cuda: bool) -> str:
    """A pattern of a ladder's arms that encode so, or "": none is in float16, and a graph is
    optimized unless it is alone.
    """
    if not cuda or way.arithmetic not in ("float32", "bfloat16"):
        return ""
    if way.graphed:
        known = {
            ("float32", False): "only_graphed_encoder",
            ("bfloat16", True): "to_graphed_encoder",
        }
        return known.get((way.arithmetic, way.optimized), "")
    return r"\w+_optimized_encoder" if way.optimized else ""


def _encoded(device: str, way: encoder.Way) -> None:
    tiny: Any = presets.tiny().encoder
    model, (features, lengths) = (
        encoder.random_encoder(tiny, "cpu"),
        encoder.speech(3, 2, 80, "cpu"),
    )
    moved = encoder.twin(deepcopy(model).to(device), way.weights)
    given = features.clone().to(device), lengths.to(device)
    call = encoder.arm(moved, given, way)
    for sign in (1, -1):  # a graph has to read its inputs anew
        given[0].copy_(sign * features)
        with torch.inference_mode():
            wanted, ends = model.double()(sign * features.double(), lengths)
        found, its = call()
        assert torch.equal(its.cpu(), ends)
        off = ((found.cpu().double() - wanted).norm() / wanted.norm()).item()
        limit = encoder.TOLERANCE[way.arithmetic]
        assert off <= limit, f"{off:.2g} of the norm apart; {limit:g} is let pass"


def _profiling(device: str, cuda: bool) -> Iterator[Check]:
    for call in (_cast_profile, _launch_profile, _peak_memory, _oom_search, _timing):
        yield Check("profiling", call.__name__[1:], "", partial(call, device))


def _cast_profile(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256)).to(device)
    with torch.no_grad():
        given = (torch.randn(100, 64, device=device),)
        modes = ("float32", "autocast", "half")
        seen = {mode: cast_profile(model, given, mode, device=device, repeats=2) for mode in modes}
    counts = {mode: len(profile.casts) for mode, profile in seen.items()}
    expected = {
        "float32": 0,
        "autocast": 4 if torch.device(device).type == "cuda" else 3,
        "half": 0,
    }
    assert counts == expected, counts
    assert all(op.ms > 0 for profile in seen.values() for op in profile.ops), "an op without time"


def _launch_profile(device: str) -> None:
    x = torch.ones(4, device=device)
    seen = launch_profile(lambda: (x + 1).sum().item(), device=device)
    assert (seen.launches, seen.syncs) == (2, 1), seen
    if seen.kernels is not None:
        assert seen.kernels >= 2 and seen.stream_syncs and not seen.graph_launches, seen


def _peak_memory(device: str) -> None:
    def overlap() -> object:
        a, b = (torch.zeros(size * 250_000, device=device) for size in (4, 8))
        del a
        return b, torch.zeros(500_000, device=device)

    peak = peak_memory(overlap, device=device)
    assert abs(peak - 12e6) <= (4096 if torch.device(device).type == "cuda" else 0), peak


def _oom_search(device: str) -> None:
    """Where tqdm is installed, which this search shows its progress with."""
    from asrkit.data import Buckets, oom_search

    def step(n: int, seconds: float, tokens: int) -> None:
        torch.empty(int(n * seconds * 2**16), dtype=torch.uint8, device=device)

    buckets = Buckets([1.0, 4.0], [0, 0], [1, 1])  # type: ignore[arg-type]
    found = oom_search(step, buckets, device=device, budget_bytes=2**24, progress=False)
    assert 0.9 < found.table.sizes[0] * 2**16 / 2**24 <= 1, found.table.sizes


def _timing(device: str) -> None:
    x = torch.ones(256, 256, device=device)
    found = measure({"product": lambda: x @ x}, repeats=3, device=device)["product"]
    assert min(found.samples_ms) > 0 and ("Event" in found.timer) == (
        torch.device(device).type == "cuda"
    ), found


def _ladder(device: str, cuda: bool) -> Iterator[Check]:
    """Each rung alone, of tiny recognisers. What fails is left out of the ladders of its kind, and
    rungs above do without.
    """
    for what, config, _ in ladder.configs("tiny"):
        of = what.removesuffix("-tiny")
        yield Check("ladder", f"{of} baseline", f"^{of}", partial(_rung, device, what, config, ""))
        for rung in ladder.RUNGS:
            if (cuda or rung not in ladder.GPU_RUNGS) and not (
                of == "ladder-ctc" and rung in ladder.TRANSDUCER_RUNGS
            ):
                call = partial(_rung, device, what, config, rung)
                arms = "|".join(rf"^{of}\S* in \S+: {how}_{rung}$" for how in ("to", "only"))
                yield Check("ladder", f"{of} {rung}", arms, call)


def _rung(device: str, what: str, config: ladder.Config, rung: str) -> None:
    """The script is said, twice: graphs are captured, then replayed. Where a rung cannot be, there
    is nothing to check.
    """
    fields: Any = ladder.NEEDS.get(rung, {}) | ladder.RUNGS.get(rung, {})
    with tempfile.TemporaryDirectory() as folder:
        made = ladder.scripted(
            config, [16_000, 33_333, 8_000], Path(folder), batch=2, device=device
        )
        try:
            heard = FileRecognizer(made.task, replace(ladder.BASELINE, **fields))
        except ValueError:
            return
        for _ in range(2):
            assert heard().tokens() == made.labels, f"{what} says other labels than its script"
