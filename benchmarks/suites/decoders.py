"""The decoders suite: greedy decoding.

Labels are planted (asrkit.workbench.lessons.shared.planted): 12.5 frames and 3.5 labels a second.

Transducers have V = 1025 tokens, a joint of width D = 640, an LSTM of one layer, and utterances of
5, 15 and 30 seconds.

Attention decoders have 12, 6 and 2 layers, V = 1024 and D = 256. They are timed with different
caches, and with drafts of a CTC head that gets a share of the labels wrong.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asrkit.decoders import (
    Hypotheses,
    aed_greedy,
    ctc_draft,
    ctc_greedy,
    ctc_greedy_sequential,
    transducer_greedy,
)
from asrkit.models import optimize
from asrkit.workbench.lessons.shared.cache_policies import POLICIES, with_policy
from asrkit.workbench.lessons.shared.planted import (
    DURATIONS,
    Planted,
    PlantedDecoder,
    ctc_log_probs,
    planted,
    planted_decoder,
    planted_text,
)
from asrkit.workbench.measure import launch_profile
from asrkit.workbench.measure.comparison import Arms
from asrkit.workbench.measure.ops import dtype_name
from benchmarks.harness.cases import Case, PeerArms, Suite
from benchmarks.peers.peer_decoders import GRAPHS, write

Options = dict[str, Any]  # options of transducer_greedy or aed_greedy
Batches = tuple[tuple[int, int], ...]  # utterances, and frames of the longest
LOOPS = ("frame_looping", "label_looping", "windowed_looping")
CACHES = {  # what an attention decoder caches
    "kept": POLICIES["KV cache"],
    "absorbed": POLICIES["absorbed"],
    "recomputed": POLICIES["NeMo 3.0"],
}
ERRORS = (0, 5, 20)  # per cent of the labels that the CTC head gets wrong


class Sizes(NamedTuple):
    """Sizes of batches, the most important first, and of models."""

    loops: Batches
    slow: tuple[int, int]  # a batch for the slow loops
    ctc: Batches
    attention: Batches
    layers: tuple[int, ...]  # numbers of layers of attention decoders
    transducer: Options  # sizes that differ from the defaults of `planted`
    decoder: Options  # sizes that differ from the defaults of `planted_decoder`


FULL = Sizes(
    loops=((32, 187), (1, 187), (128, 62), (8, 187), (32, 62), (32, 375)),
    slow=(8, 62),
    ctc=((1, 375), (8, 375), (32, 375), (128, 375)),
    attention=((1, 250), (8, 250), (32, 62)),
    layers=(12, 6, 2),
    transducer={},
    decoder={},
)
QUICK = Sizes(
    loops=((4, 40),),
    slow=(2, 30),
    ctc=((8, 40),),
    attention=((3, 40),),
    layers=(2,),
    transducer={"V": 33, "width": 240},
    decoder={"V": 33, "width": 112, "heads": 2, "most": 64},
)


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield RNN-T and TDT (loops in bfloat16, then in float32, then the slow loops), CTC, and
    attention decoders, each at several batch sizes.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes.
    """
    sizes = QUICK if quick else FULL
    cuda = device == "cuda"
    make: Callable[..., Planted] = partial(planted, **sizes.transducer)
    if cuda or not quick:
        for (B, T), durations in product(sizes.loops[: 4 if cuda else 2], DURATIONS):
            yield from versus_nemo(make(B, T, durations=durations), device, dtype=torch.bfloat16)
    for (B, T), durations in product(sizes.loops, DURATIONS):
        yield from versus_nemo(make(B, T, durations=durations), device)
    for durations in DURATIONS:
        names = (*LOOPS, "one_by_one")
        yield from versus_nemo(make(*sizes.slow, durations=durations), device, names)
    for B, T in sizes.ctc:
        yield ctc(make(B, T), device)
    for layers in sizes.layers:
        decoder = planted_decoder(layers=layers, **sizes.decoder)
        for B, T in sizes.attention:
            yield attention(decoder, B, T, device)


def ctc(plan: Planted, device: str) -> Case:
    """Greedy CTC: utterance by utterance, and batched."""
    log_probs = ctc_log_probs(plan).to(device)
    lengths = plan.lengths.to(device)
    arms = {
        "sequential": partial(ctc_greedy_sequential, log_probs, lengths),
        "batched": partial(ctc_greedy, log_probs, lengths, impl="batched"),
    }
    # launches are not counted for the compiled loop, which uses no GPU
    arm_params = {name: counts(arm, device) for name, arm in arms.items()}
    if device != "cuda":
        arms["numba_cpu"] = partial(ctc_greedy, log_probs, lengths, impl="numba_cpu")
    return Case(
        what="ctc-greedy-batched",
        arms=arms,
        params={
            "shape": [*log_probs.shape],
            "labels": sum(map(len, plan.labels)),
        },
        arm_params=arm_params,
        ratios=[("sequential", name) for name in arms if name != "sequential"],
        tolerance=1e-4,
    )


def versus_nemo(
    plan: Planted,
    device: str,
    names: tuple[str, ...] = LOOPS,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Case]:
    """One case of all loops, with NeMo's loops on the same weights and frames as peers.

    On CUDA the batched loops also run in graphs. NeMo's slow loops take part if our one-by-one loop
    does. NeMo's graphs are compared with our largest graph. The file for NeMo is deleted when the
    next case is requested.

    Args:
        plan: model and frames.
        device: "cpu" or "cuda".
        names: our loops without graphs.
        dtype: dtype of model and frames.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pt"
        plan = plan.to(device, dtype)
        write(path, plan.model, plan.encoded, plan.lengths)
        case = transducer(plan, device, names)
        request = case.what
        if "one_by_one" in names:
            request += "-loops"
        if device == "cuda":
            request += "-cuda"
        peers = PeerArms(
            request={"kind": request, "max_symbols": 10, "device": device, "plan": str(path)},
            ours="windowed_looping",
            against={GRAPHS: [*case.arms][-1]},
        )
        yield replace(case, peers=peers)


def transducer(plan: Planted, device: str, names: tuple[str, ...]) -> Case:
    """An arm for each loop, and on CUDA for the batched loops in graphs, windowed looping last.

    Args:
        plan: model and frames, on the device.
        device: "cpu" or "cuda".
        names: loops without graphs.
    """
    variants = {name: {"strategy": name, "graphs": "off"} for name in names}
    pairs = [(name, "windowed_looping") for name in names if name != "windowed_looping"]
    pairs.append(("frame_looping", "label_looping"))
    if device == "cuda":
        for name, mode in product(LOOPS, ("step", "full")):
            variants[f"{name}_{mode}"] = {"strategy": name, "graphs": mode}
            pairs.append((name, f"{name}_{mode}"))
        pairs.append(("frame_looping_full", "label_looping_full"))
        pairs.append(("label_looping_full", "windowed_looping_full"))
    decode = partial(_decode_transducer, plan)
    arms, arm_params = _counted(plan.model, decode, variants, device)
    return Case(
        what="tdt-greedy" if plan.model.durations else "rnnt-greedy",
        arms=arms,
        params=_params(plan),
        arm_params=arm_params,
        ratios=pairs,
        warmup=0 if len(plan.labels) >= 32 else 1,
        tolerance=_tolerance(plan),
    )


def _decode_transducer(plan: Planted, model: Any, **options: Any) -> Hypotheses:
    return transducer_greedy(model, plan.encoded, plan.lengths, **options)


def _params(plan: Planted) -> dict[str, Any]:
    """Params of a transducer's decoding."""
    B, T, D = plan.encoded.shape
    return {
        "shape": [B, T, D, plan.model.blank + 1],
        "dtype": dtype_name(plan.encoded.dtype),
        "durations": [*plan.model.durations],
        "frames": int(plan.lengths.sum()),
        "labels": sum(map(len, plan.labels)),
        "path_joints": plan.joints(),
    }


def _tolerance(plan: Planted) -> float:
    """The tolerance for scores, which are sums of many logarithms."""
    return 1e-3 if plan.encoded.dtype == torch.float32 else 0.2


CALLS = {"join": "join", "predict": "predict", "step": "follow"}  # method -> name in records


class Counting:
    """A model that counts the calls of its methods in `CALLS`, by their names in records."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.model, name)
        if name not in CALLS:
            return value

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[CALLS[name]] += 1
            return value(*arguments, **options)

        return counted


def counts(call: Callable[[], object], device: str) -> dict[str, int]:
    """Launches of kernels and copies on a GPU, and waits for it, in one call.

    torch's dispatcher counts them, so on a CPU they are the launches that a GPU would have.
    """
    profile = launch_profile(call, device=device, runtime=False)
    return {"launches": profile.launches, "syncs": profile.syncs}


def _counted(
    model: Any,
    decode: Callable[..., Hypotheses],
    variants: Mapping[str, Options],
    device: str,
) -> tuple[Arms, dict[str, dict[str, Any]]]:
    """An arm for each variant that can run, and its counted calls. A variant that fails is reported
    on standard error and left out.

    Args:
        model: model of the variants whose options name no other model.
        decode: takes a model and options.
        variants: options by name of arm.
        device: "cpu" or "cuda".
    """
    arms: dict[str, Callable[[], Hypotheses]] = {}
    params: dict[str, dict[str, Any]] = {}
    for name, options in variants.items():
        arm = partial(decode, **{"model": model, **options})
        counting = Counting(arm.keywords["model"])
        watched = partial(arm, model=counting)
        if options.get("graphs", "off") != "off":
            watched = arm  # calls inside a graph cannot be counted
        try:
            arm()  # captures the graph for later calls
            params[name] = counts(watched, device) | counting.calls
        except (ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        arms[name] = arm
    return arms, params


def attention(decoder: PlantedDecoder, B: int, T: int, device: str) -> Case:
    """One case of attention decoding: caches, drafts, and on a CPU packed weights; on a GPU in
    bfloat16.

    Args:
        decoder: planted decoder.
        B: number of utterances.
        T: frames of the longest.
        device: "cpu" or "cuda".
    """
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    plan = planted_text(decoder, B, T).to(device, dtype)
    variants = {name: {"model": with_policy(plan.model, policy)} for name, policy in CACHES.items()}
    pairs = [("recomputed", "kept"), ("absorbed", "kept")]
    if not cuda:
        variants["kept_packed"] = {"model": optimize(deepcopy(plan.model))}
        pairs.append(("kept", "kept_packed"))
    for per_cent in ERRORS:
        ctc = ctc_log_probs(plan, per_cent / 100).to(device)
        variants[f"draft_{per_cent}"] = {"ctc": ctc}
        pairs.append(("kept", f"draft_{per_cent}"))
    arms, arm_params = _counted(plan.model, partial(_decode_text, plan), variants, device)
    D, layers = decoder.model.config.width, decoder.model.config.layers
    return Case(
        what="aed-greedy",
        arms=arms,
        params={
            "shape": [B, T, D, layers],
            "dtype": dtype_name(dtype),
            "labels": sum(map(len, plan.labels)),
            "steps": 1 + max(map(len, plan.labels)),
            "audio_s": int(plan.lengths.sum()) / 12.5,
            "weights": "planted",
        },
        arm_params=arm_params,
        ratios=pairs,
        warmup=0,
        tolerance=_tolerance(plan),
    )


def _decode_text(plan: Planted, model: Any, ctc: Any = None, **options: Any) -> Hypotheses:
    """Greedy hypotheses; with log-probabilities `ctc` the draft is part of the call."""
    if ctc is not None:
        options["draft"] = ctc_draft(plan.model, ctc_greedy(ctc, plan.lengths))
    return aed_greedy(model, plan.encoded, plan.lengths, prompt=plan.prompt, **options)


SUITE = Suite(
    name="decoders",
    cases=suite,
    gpu_tests=("tests/decoders/test_graphs_gpu.py",),
    share=4,
)
