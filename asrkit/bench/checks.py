"""Every fast path of a device against its reference, at sizes that take seconds: before a machine is measured.

The references are the plain loops in float64, on the CPU where there are any. A check that fails names what it vouched for: those
arms and cases are not measured. The same table runs on a CPU, with its implementations.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.bench import encoder, losses, precision
from asrkit.bench.cases import Case, check
from asrkit.bench.planted import Planted, ctc_log_probs, planted
from asrkit.decoders import ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.decoders.transducer import STRATEGIES, graphs
from asrkit.decoders.transducer.beam import transducer_beam
from asrkit.decoders.transducer.beam_reference import transducer_beam_reference
from asrkit.decoders.transducer.reading import Reader
from asrkit.features import log_mel, normalize, normalize_sequential
from asrkit.losses import pack_joint, rnnt_loss, rnnt_loss_lean, rnnt_loss_packed, split_batches, tdt_loss, tdt_loss_lean
from asrkit.models import CTCConfig, CTCModel, LSTMConfig, TransducerConfig, TransducerModel, presets
from asrkit.profiling import cast_profile, launch_profile, measure, peak_memory
from asrkit.shapes import valid_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
JUMPS: Sequence[tuple[int, ...]] = ((), (0, 1, 2, 3, 4))
LEAN = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}  # of a gradient's largest value; halves sum in any order
ROUNDED = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Check(NamedTuple):
    """One comparison: `call` raises where it disagrees. Those of a `group` share a process."""

    group: str
    name: str
    vouches: str  # a pattern: the arms and cases that are left out where it fails; "" for none
    call: Callable[[], object]


def table(device: str) -> list[Check]:
    """All checks of a device, none of them begun."""
    made = [_losses, _decoders, _graphs, _rest, _encoder, _profiling, _lean]
    return [one for checks in made for one in checks(device, device.startswith("cuda"))]


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """AssertionError unless tensors are alike to `tolerance` of the largest value wanted, and integers are equal."""
    for ours, theirs in zip(found, wanted, strict=True):
        a, b = ours.detach().cpu(), theirs.detach().cpu()
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"integers differ in {(a != b).sum()} of {a.numel()} places"
            continue
        a, b = a.double(), b.double()
        off = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs())  # infinities may be equal
        size = b[b.isfinite()].abs().amax().item() if b.isfinite().any() else 0.0
        worst = off.amax().item() if off.numel() else 0.0
        assert worst <= tolerance * max(1.0, size), f"{worst:.2g} apart, of {size:.2g}; {tolerance:g} of that is let pass"


def _ragged(shape: Sequence[int], n: int = 0, padding: float = torch.nan) -> tuple[Tensor, ...]:
    """Logits (B, T, U1, V + n) in float64, of which float32 and the halves are roundings, targets and lengths, on the CPU."""
    B, T, U, V = shape
    draw = torch.Generator().manual_seed(B * T + U)
    logits = 2 * torch.randn(B, T, U + 1, V + n, generator=draw)
    targets = torch.randint(0, V - 1, (B, U), generator=draw)
    frames, labels = torch.linspace(T, max(1, T // 2), B).long(), torch.linspace(U // 2, U, B).long()
    for b in range(B):
        logits[b, frames[b] :] = logits[b, :, labels[b] + 1 :] = padding
    return logits, targets, frames, labels


def _graded(loss: Callable[..., Tensor], logits: Tensor, rest: Sequence[Tensor], **how: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    costs = loss(leaf, *rest, reduction="none", **how)
    weight = torch.linspace(-1, 2, len(costs), dtype=costs.dtype, device=costs.device)
    return costs, torch.autograd.grad(costs, leaf, weight)[0]


def _loss(
    device: str, loss: Callable[..., Tensor], impl: str, dtype: torch.dtype, shape: Sequence[int], how: dict, overwrite: bool
) -> None:
    """Values and gradients of a loss on logits in `dtype`, against the loops in float64 on the same logits."""
    n = len(losses.DURATIONS) * (loss is tdt_loss)
    logits, *rest = _ragged(shape, n, 0.0 if impl == "torchaudio" else torch.nan)
    given = logits.to(dtype)
    wanted = _graded(loss, given.double(), rest, impl="reference", **how)
    more = {"overwrite_logits": True} if overwrite else {}
    found = _graded(loss, given.to(device), [one.to(device) for one in rest], impl=impl, **how, **more)
    near(found[:1], wanted[:1], 2e-3 if impl == "torchaudio" else 2e-5)
    near(found[1:], wanted[1:], max(ROUNDED[dtype], 1e-3 * (impl == "torchaudio")))


def _losses(device: str, cuda: bool) -> Iterator[Check]:
    """numba_cuda's lattices have one thread a row or frame: longer ones than its blocks are among the shapes."""
    fast = "numba_cuda" if cuda else "numba_cpu"
    options: dict[str, Any] = {"fastemit_lambda": 0.1, "clamp": 0.05}
    shapes = [(3, 6, 4, 9), (1, 1, 0, 5), *([(2, 40, 300, 65), (2, 300, 20, 1030)] if cuda else [(2, 12, 30, 65)])]
    doors: Any = rnnt_loss, tdt_loss
    for impl, loss, dtype in product((fast, "wavefront"), doors, DTYPES):
        for shape, how, overwrite in [
            *((shape, {}, False) for shape in shapes),
            (shapes[0], options, False),
            (shapes[0], {}, True),
        ]:
            name = (
                f"{loss.__name__} {impl} {_name(dtype)} {'×'.join(map(str, shape))}"
                + " options" * bool(how)
                + " in place" * overwrite
            )
            arms = rf"^{impl}|^rnnt-loss-ragged$" if impl == fast else rf"^{impl}"
            yield Check(f"losses {impl}", name, arms, partial(_loss, device, loss, impl, dtype, shape, how, overwrite))
    for dtype in DTYPES[:2] if cuda else DTYPES[:1]:
        call = partial(_loss, device, rnnt_loss, "torchaudio", dtype, shapes[0], {}, False)
        yield Check("losses wavefront", f"rnnt_loss torchaudio {_name(dtype)}", "^torchaudio", call)
    for impl in (fast, "wavefront"):
        yield Check(f"losses {impl}", f"rnnt_loss_packed {impl}", "^rnnt-loss-ragged$", partial(_packed, device, impl))
    for activation, rate in product(("none", "relu", "tanh"), (0.0, 0.3)):
        call = partial(_pack_joint, device, activation, rate)
        yield Check("losses wavefront", f"pack_joint {activation} dropout {rate}", "", call)
    yield Check("losses wavefront", "split_batches", "^split$", partial(_split, device))


def _packed(device: str, impl: str) -> None:
    logits, targets, frames, labels = _ragged((3, 6, 4, 9))
    valid = valid_mask(frames, 6)[:, :, None] & valid_mask(labels + 1, 5)[:, None]
    cost, gradient = _graded(rnnt_loss, logits.double(), (targets, frames, labels), impl="reference")
    rest = [one.to(device) for one in (targets, frames, labels)]
    near(_graded(rnnt_loss_packed, logits[valid].to(device), rest, impl=impl), (cost, gradient[valid]), 2e-5)


def _pack_joint(device: str, activation: Any, rate: float) -> None:
    """Of halves in float32 on the device, against float64 on the CPU: the mask is a hash, and so the same."""
    draw = torch.Generator().manual_seed(0)
    halves = [torch.randn(2, size, 16, generator=draw) for size in (5, 4)]
    lengths, results = (torch.tensor([5, 3]), torch.tensor([1, 3])), []
    for to in ({"dtype": torch.float64}, {"device": device}):
        leaves = [half.to(**to).requires_grad_() for half in halves]
        sizes = [length.to(leaves[0].device) for length in lengths]
        joint = pack_joint(*leaves, *sizes, activation=activation, dropout=rate, seed=3)
        results.append([joint, *torch.autograd.grad(joint.square().sum(), leaves)])
    near(results[1], results[0])


def _split(device: str) -> None:
    """Sub-batches of two, from the halves of a joint, against the whole batch in float64."""
    leaves, rest = losses.halves((5, 8, 4, 12, 9), device)

    def graded(leaves: Sequence[Tensor], **how: Any) -> Sequence[Tensor]:
        encoded, predicted, weight, bias = leaves

        def build(encoded: Tensor, predicted: Tensor) -> Tensor:
            return torch.nn.functional.linear(torch.tanh(encoded[:, :, None] + predicted[:, None]), weight, bias)

        if how:
            cost = split_batches(build, encoded, predicted, *rest, **how)
        else:
            cost = rnnt_loss(build(encoded, predicted), rest[0], rest[1], rest[2], impl="wavefront")
        return [cost, *torch.autograd.grad(cost, leaves)]

    wanted = graded([leaf.detach().double().requires_grad_() for leaf in leaves])
    near(graded(leaves, size=2, overwrite_logits=True), wanted)


def _lean(device: str, cuda: bool) -> Iterator[Check]:
    for impl in ("plain", "triton" if cuda else "numba_cpu"):
        arms = "^lean_triton" if impl == "triton" else "^lean"
        for activation, dtype, rate, durations in product(("relu", "tanh"), DTYPES, (0.0, 0.3), ((), (0, 2))):
            name = f"lean {impl} {activation} {_name(dtype)} dropout {rate} durations {list(durations)}"
            yield Check(f"lean {impl}", name, arms, partial(_one_lean, device, impl, activation, dtype, rate, durations))
        yield Check(f"lean {impl}", f"lean {impl} skips", arms, partial(_skips, device, impl))


def _one_lean(device: str, impl: Any, activation: Any, dtype: torch.dtype, rate: float, durations: tuple[int, ...]) -> None:
    """Loss and four gradients against the plain tiles in float64 on the CPU, of the same rounded numbers."""
    draw = torch.Generator().manual_seed(0)
    B, T, U, D, V = 3, 5, 3, 20, 9
    sizes = (B, T, D), (B, U + 1, D), (V + len(durations), D), (V + len(durations),)
    given = [torch.randn(*size, generator=draw).to(dtype) for size in sizes]
    rest = [torch.randint(0, V - 1, (B, U), generator=draw), torch.tensor([5, 2, 1]), torch.tensor([2, 3, 0])]
    results = []
    for to, way in (({"dtype": torch.float64}, "plain"), ({"device": device}, impl)):
        leaves = [one.to(**to).requires_grad_() for one in given]
        places = [one.to(leaves[0].device) for one in rest]
        how: dict[str, Any] = {"activation": activation, "dropout": rate, "seed": 3, "tile": 8, "reduction": "none", "impl": way}
        costs = (
            tdt_loss_lean(*leaves, *places, durations=durations, **how) if durations else rnnt_loss_lean(*leaves, *places, **how)
        )
        weight = torch.tensor([1.0, -2, 3]).to(costs) * costs.isfinite()
        results.append([costs, *torch.autograd.grad(costs, leaves, weight)])
    near(results[1], results[0], LEAN[dtype])


def _skips(device: str, impl: Any) -> None:
    """With skipping on, on a lattice in which one alignment dominates: no worse than what is skipped allows."""
    leaves, rest = losses.halves((2, 60, 21, 64, 32), device, trained=True)
    results = []
    ways: Any = ("plain", 0.0), (impl, losses.SKIP)
    for way, skip in ways:
        cost = rnnt_loss_lean(*leaves, *rest, activation="tanh", impl=way, skip=skip)
        results.append([cost, *torch.autograd.grad(cost, leaves)])
    near(results[1], results[0], 1e-4)


def _talker(durations: tuple[int, ...], device: str, dtype: torch.dtype) -> TransducerModel:
    """A transducer of random weights, loud enough to speak in bursts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = TransducerConfig(
            vocab_size=7, predictor=LSTMConfig(width=8, layers=2), joint_width=8, durations=durations, activation="relu"
        )
        model = TransducerModel(config).double().eval().requires_grad_(False)
    model.output.weight.mul_(4)
    model.output.bias[model.blank] += -2 if durations else 1
    return model.to(device, dtype)


def _frames(B: int, T: int, device: str, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(B, T, 8, generator=draw, dtype=torch.float64)).to(device, dtype), torch.linspace(T, 0, B).long().to(
        device
    )


def _decoders(device: str, cuda: bool) -> Iterator[Check]:
    for durations, strategy in product(JUMPS, STRATEGIES):
        kind, arms = "TDT" if durations else "RNN-T", rf"^{strategy}|^window_" if strategy == "label_looping" else rf"^{strategy}$"
        yield Check("decoders", f"{strategy} {kind}", arms, partial(_greedy, device, strategy, durations))
    for durations in JUMPS:
        yield Check("decoders", f"planted {len(durations)} durations", "", partial(_planted, device, durations))
        yield Check("decoders", f"carry {len(durations)} durations", "", partial(_carry, device, "off", durations))
        yield Check("decoders", f"beam {len(durations)} durations", "", partial(_beam, device, durations))
    yield Check("decoders", "ctc batched", "^batched$|^ctc-|_ctc$|^both_batched$", partial(_ctc, device))


def _greedy(device: str, strategy: Any, durations: tuple[int, ...]) -> None:
    """Labels, frames, durations, scores and confidence as the definition finds them on the CPU, all in float64."""
    how: dict[str, Any] = {"confidence": "entropy", "max_symbols": 3, "graphs": "off"}
    wide = torch.float64
    wanted = transducer_greedy(_talker(durations, "cpu", wide), *_frames(9, 30, "cpu", wide), strategy="one_by_one", **how)
    found = transducer_greedy(_talker(durations, device, wide), *_frames(9, 30, device, wide), strategy=strategy, **how)
    assert wanted.lengths.sum() > 20, "the model says next to nothing"
    near(found.parts(), wanted.parts())


def _plan(durations: tuple[int, ...]) -> Planted:
    return planted(4, 40, V=33, width=240, durations=durations)


def _planted(device: str, durations: tuple[int, ...]) -> None:
    """What was planted is found in every dtype."""
    plan = _plan(durations)
    for dtype in DTYPES:
        model = deepcopy(plan.model).to(device, dtype)
        found = transducer_greedy(model, plan.encoded.to(device, dtype), plan.lengths.to(device), graphs="off")
        assert found.tokens() == plan.labels, f"other labels in {dtype}"


def _carry(device: str, mode: Any, durations: tuple[int, ...]) -> None:
    model, (encoded, lengths) = _talker(durations, device, torch.float32), _frames(5, 30, device, torch.float32)
    whole = transducer_greedy(model, encoded, lengths, graphs="off")
    first = transducer_greedy(model, encoded[:, :13], lengths.clamp(max=13), graphs=mode)
    rest = transducer_greedy(model, encoded[:, 13:], (lengths - 13).clamp(min=0), graphs=mode, carry=first.carry)
    assert [a + b for a, b in zip(first.tokens(), rest.tokens(), strict=True)] == whole.tokens()
    spoilt = encoded.masked_fill(~valid_mask(lengths, 30)[..., None], torch.nan)
    assert transducer_greedy(model, spoilt, lengths, graphs=mode).tokens() == whole.tokens(), "padding matters"


def _beam(device: str, durations: tuple[int, ...]) -> None:
    wide, how = torch.float64, dict[str, Any](width=4, nbest=2, max_symbols=3)
    wanted = transducer_beam_reference(_talker(durations, "cpu", wide), *_frames(4, 12, "cpu", wide), **how)
    found = transducer_beam(_talker(durations, device, wide), *_frames(4, 12, device, wide), **how)
    for ours, theirs in zip((found, *found.alternatives), (wanted, *wanted.alternatives), strict=True):
        assert ours.tokens() == theirs.tokens()
        near([ours.scores], [theirs.scores])


def _ctc(device: str) -> None:
    plan = _plan(())
    given = ctc_log_probs(plan), plan.lengths
    near(ctc_greedy(*(one.to(device) for one in given)).parts(), ctc_greedy_sequential(*given).parts())


def _graphs(device: str, cuda: bool) -> Iterator[Check]:
    """Graphs that are captured, on a GPU; on a CPU "auto" stands for the plain loop."""
    for mode in ("step", "full", "auto") if cuda else ("auto",):
        arms = f"^label_looping_{mode}$" if mode != "auto" else ""
        calls: dict[str, Callable[[], object]] = {
            f"{_name(dtype)} {len(durations)} durations": partial(_looped, device, mode, durations, dtype)
            for durations, dtype in product(JUMPS, DTYPES)
        }
        calls["carry"] = partial(_carry, device, mode, ())
        calls["weights that change and move"] = partial(_moved, device, mode)
        calls["autocast"] = partial(_autocast, device, mode)
        if cuda and mode != "auto":
            calls["nothing captured waits"] = partial(_never_waits, device, mode)
        for name, call in calls.items():
            yield Check(f"graphs {mode}", f"graphs={mode}: {name}", arms, call)


def _looped(device: str, mode: Any, durations: tuple[int, ...], dtype: torch.dtype) -> None:
    """What the plain loop finds; sizes are whole powers, for half precision rounds by size."""
    model, how = _talker(durations, device, dtype), dict[str, Any](confidence="entropy", max_symbols=3)
    for B, T, seed in [(8, 48, 1), (8, 40, 2), (4, 20, 3), (1, 48, 4), (8, 48, 5)]:
        given = _frames(B, T, device, dtype, seed)
        found = transducer_greedy(model, *given, graphs=mode, **how)
        if device.startswith("cuda"):
            assert found.impl == f"label_looping, graphs={'step' if mode == 'auto' else mode}", found.impl
        near(found.parts(), transducer_greedy(model, *given, graphs="off", **how).parts())


def _moved(device: str, mode: Any) -> None:
    model, given = _talker((), device, torch.float32), _frames(8, 48, device, torch.float32)
    before = transducer_greedy(model, *given, graphs=mode)
    model.output.weight.neg_()
    after = transducer_greedy(model, *given, graphs=mode)
    near(after.parts(), transducer_greedy(model, *given, graphs="off").parts())
    assert after.tokens() != before.tokens(), "new weights, old labels"
    model.bfloat16()
    given = given[0].bfloat16(), given[1]
    near(transducer_greedy(model, *given, graphs=mode).parts(), transducer_greedy(model, *given, graphs="off").parts())
    graphs.release_graphs(model)


def _autocast(device: str, mode: Any) -> None:
    model = _talker((), device, torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        for seed in (3, 4):
            given = _frames(8, 48, device, torch.float32, seed)
            near(transducer_greedy(model, *given, graphs=mode).parts(), transducer_greedy(model, *given, graphs="off").parts())


def _never_waits(device: str, mode: str) -> None:
    """torch itself raises at a wait, and the driver counts what Python launches beside the graph."""
    model, (encoded, lengths) = _talker((0, 1, 2), device, torch.float32), _frames(8, 48, device, torch.float32)
    transducer_greedy(model, encoded, lengths, graphs=mode)  # type: ignore[arg-type]
    [(loop, run)] = graphs.MODELS[id(model)].loops.values()
    with torch.inference_mode():
        read = Reader(model, device=encoded.device)
        carry = read.start(encoded)
        loop.load(encoded, lengths, carry)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.turn(read)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loop.load(encoded, lengths, carry)
        seen = launch_profile(run, device=device)
    assert seen.launches <= (seen.graph_launches or 0), f"{seen.launches} launches beside {seen.graph_launches} of graphs"


def _rest(device: str, cuda: bool) -> Iterator[Check]:
    yield Check("models", "log_mel", "", partial(_log_mel, device))
    yield Check("models", "normalize", "^batched$|_norm$|^both_batched$", partial(_normalize, device))
    for mode in precision.MODES:
        yield Check("models", f"precision {mode}", f"^{mode}$", partial(_precision, device, mode))


def _log_mel(device: str) -> None:
    wave = torch.randn(3, 16_000, generator=torch.Generator().manual_seed(0)) / 10
    lengths = torch.tensor([16_000, 12_345, 800])
    near(log_mel(wave.to(device), lengths.to(device)), log_mel(wave, lengths), 2e-3)  # an FFT's last digits, through a logarithm


def _normalize(device: str) -> None:
    features, lengths = torch.randn(4, 50, 80, generator=torch.Generator().manual_seed(0)) + 3, torch.tensor([50, 33, 1, 2])
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
    off = precision.deviation(exact, precision.Said(found.log_probs.cpu(), found.lengths.cpu(), found.tokens))
    assert off.log_prob_max < 0.1, off


def _encoder(device: str, cuda: bool) -> Iterator[Check]:
    """FastConformers of two blocks in every way, against float64 on the CPU. Compiled on a GPU only: a rehearsal need not wait."""
    ways = {name: way for group in encoder.groups(cuda, compiled=cuda).values() for name, way in group.items()}
    for name, way in ways.items():
        group = "compiled" if way.compiled else "encoder"
        yield Check(group, f"encoder {name}", f"^{name}$", partial(_encoded, device, way))


def _encoded(device: str, way: encoder.Way) -> None:
    tiny: Any = presets.tiny().encoder
    model, (features, lengths) = encoder.random_encoder(tiny, "cpu"), encoder.speech(3, 2, 80, "cpu")
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
    expected = {"float32": 0, "autocast": 4 if torch.device(device).type == "cuda" else 3, "half": 0}
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
    assert min(found.samples_ms) > 0 and ("Event" in found.timer) == (torch.device(device).type == "cuda"), found


def quick(suite: Callable[..., Iterator[Any]], device: str) -> None:
    """Every case of a suite at its smallest: all arms agree."""
    for case in suite(device, True):
        if isinstance(case, Case):
            check(case, device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
