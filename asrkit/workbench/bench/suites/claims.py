"""The suite of claims: what the ledger says needs a GPU, measured at the sizes that are published,
on a machine without notebooks.

Records carry the ids of claims. On a CPU the same studies run at toy sizes, as a rehearsal that
settles nothing. Weights are random, and what decoders read is planted
(asrkit.workbench.bench.planted): 3.5 labels a second, in as many frames as the encoder gave.

Here are the studies of decoders and of whole recognisers; those of what surrounds them are in
asrkit.workbench.bench.suites.claims_frontend, those of encoder-decoder models in
asrkit.workbench.bench.suites.claims_attention.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses, ctc_greedy, transducer_greedy
from asrkit.models import CTCConfig, CTCModel, TransducerConfig, TransducerModel, presets
from asrkit.models.transducer import log_probs
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import ModelVariants, Recognizer
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.planted import DURATIONS, Planted, ctc_log_probs, planted
from asrkit.workbench.bench.planted import kind as kind_of_durations
from asrkit.workbench.bench.studies import StudyRecords, idle, repeats
from asrkit.workbench.bench.suites import claims_attention, claims_frontend, decoders
from asrkit.workbench.bench.suites.claims_frontend import RATE_HZ
from asrkit.workbench.bench.suites.encoders import random_transducer, shrunk
from asrkit.workbench.measure import measure
from asrkit.workbench.records import Measurement

Make = Callable[[str, bool], Iterable[Measurement]]
Arms = dict[str, Callable[[], Hypotheses]]


def suite(device: str, quick: bool, *, only: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the studies of each group in STUDIES.

    Args:
        device: "cpu" or "cuda".
        quick: toy sizes, as always on a CPU.
        only: some of these groups; none: all.
    """
    cuda = device.startswith("cuda")
    quick = quick or not cuda
    for group, studies in STUDIES.items():
        if only and group not in only:
            continue
        for ids, study in studies.items():
            measured = tuple(name for name in ids if cuda or name not in GPU_CLAIMS)
            if measured:
                measure = partial(study, device, quick)
                what = f"claims: {', '.join(measured)}"
                yield Case(what=what, measure=measure)


def graph_options(device: str) -> dict[str, dict[str, Any]]:
    """Options of the arms that decode by CUDA graphs on this device, most promising first."""
    if not device.startswith("cuda"):
        return {}
    return decoders.by_graphs(("full", "step"))


def _checked(
    arms: Mapping[str, Callable[[], Hypotheses]], labels: list[list[int]], case: str
) -> tuple[Arms, list[str]]:
    """The arms that find what was planted, and messages about graphs that do not: the others are
    measured all the same.

    A graph that cannot run is left out, and named on standard error. AssertionError where a loop
    without a graph is wrong.
    """
    right: Arms = {}
    wrong: list[str] = []
    for name, call in arms.items():
        by_graph = name in graph_options("cuda")
        try:
            tokens = call().tokens()
        except RuntimeError as error:
            if not by_graph:
                raise
            print(f"{name} of {case} is left out: {error}", file=sys.stderr)
            continue
        if tokens == labels:
            right[name] = call
            continue
        wrong.append(f"{name} finds other labels than were planted")
        assert by_graph, wrong[-1]
    return right, wrong


def _measured(arms: Mapping[str, Callable[[], Any]], device: str, quick: bool) -> Any:
    """Timings by arm."""
    if not arms:
        return {}
    return measure(arms, **repeats(device, quick))


def _loops(durations: Sequence[int], device: str, quick: bool) -> Iterator[Measurement]:
    """Decoding alone: frame looping, label looping as published, and windowed looping, launched one
    by one and in a graph.
    """
    sizes = claims_frontend.sizes_of(quick)
    plan = planted(*sizes.loops, durations=durations, **sizes.planted)
    inputs = (plan.model.to(device), plan.encoded.to(device), plan.lengths.to(device))
    options: dict[str, Any] = {
        name: {"strategy": name, "graphs": "off"}
        for name in ("frame_looping", "label_looping", "windowed_looping")
    }
    options |= graph_options(device)
    case = f"{kind_of_durations(durations)}-greedy"
    tried = {name: partial(transducer_greedy, *inputs, **way) for name, way in options.items()}
    arms, wrong = _checked(tried, plan.labels, case)
    times = _measured(arms, device, quick)
    shape = [*plan.encoded.shape, plan.model.blank + 1]
    records = StudyRecords(device, quick, shape=shape, durations=[*durations], dtype="float32")
    if {"frame_looping", "label_looping"} <= {*arms}:
        for what in _label_looping_claims(durations):
            yield records.ratio(what, times, "frame_looping", "label_looping")
    graph = next((name for name in graph_options(device) if name in arms), None)
    if graph and "windowed_looping" in arms:
        names = ("eager", "graph")
        yield records.ratio(
            "graphs-cut-launches", times, "windowed_looping", graph, arms=names, graph=graph
        )
    if device.startswith("cuda") and not durations and "frame_looping" in arms:
        timing = times["frame_looping"]
        shares = idle(arms["frame_looping"], timing)
        yield records.value(
            "rnnt-gpu-idle", shares, timing, "frame_looping", metric="share", unit="1"
        )
    assert not wrong, "; ".join(wrong)


def _label_looping_claims(durations: Sequence[int]) -> tuple[str, ...]:
    """The claims about label looping, of RNN-T or of TDT."""
    if durations:
        return ("label-looping-tdt-3.8x",)
    return ("label-looping-2x", "label-looping-faster")


@dataclass(frozen=True, kw_only=True)
class _PlantedBatch:
    """Waveforms of noise, and what decoders read instead of what the encoder makes of them."""

    plan: Planted
    waveforms: Tensor  # (B, S)
    lengths: Tensor  # (B,)
    encoded: Tensor  # (B, T, D), planted
    ends: Tensor  # (B,)

    def recognise(self, recognizer: Recognizer) -> Hypotheses:
        """All stages of a recogniser; the decoder reads what is planted."""
        recognizer.encode(*recognizer.features(self.waveforms, self.lengths))
        return recognizer.decode(self.encoded, self.ends)


def _planted_batch(config: TransducerConfig, device: str, quick: bool) -> _PlantedBatch:
    sizes = claims_frontend.sizes_of(quick)
    B = sizes.utterances
    seconds = sizes.seconds
    noise = torch.randn(B, seconds * RATE_HZ, generator=torch.Generator().manual_seed(0)) / 10
    predictor: Any = config.predictor
    plan = planted(
        B,
        -(-100 * seconds // 8),
        V=config.vocab_size + 1,
        width=config.joint_width,
        layers=predictor.layers,
        durations=config.durations,
    )
    return _PlantedBatch(
        plan=plan,
        waveforms=noise.to(device),
        lengths=torch.linspace(seconds, seconds / 2, B).mul(RATE_HZ).long().to(device),
        encoded=plan.encoded.to(device, torch.bfloat16),
        ends=plan.lengths.to(device),
    )


def _recognisers(preset: str, device: str, quick: bool) -> Iterator[Measurement]:
    """Waveforms to labels in bfloat16: a transducer without and with graphs, and beside RNN-T a CTC
    model of that size.
    """
    config: Any = presets.PRESETS[preset]()
    if quick:
        config = shrunk(config)
    batch = _planted_batch(config, device, quick)
    with torch.device(device):
        model = random_transducer(config, batch.plan.model).to(device, torch.bfloat16)
    variants = ModelVariants(model)
    options: dict[str, Any] = {"windowed_looping_off": {"graphs": "off"}} | graph_options(device)
    kind = kind_of_durations(config.durations)
    case = f"{kind}-recogniser"
    tried = {
        name: partial(batch.recognise, Recognizer(variants, PipelineConfig(encoder="eager", **way)))
        for name, way in options.items()
    }
    arms, wrong = _checked(tried, batch.plan.labels, case)
    preferred = [*graph_options(device), "windowed_looping_off"]
    best = next((name for name in preferred if name in arms), None)
    if kind == "rnnt":
        arms["ctc"] = _ctc_arm(model, batch)
    times = _measured(arms, device, quick)
    audio_s = batch.lengths.sum().item() / RATE_HZ
    records = StudyRecords(
        device,
        quick,
        shape=[*batch.encoded.shape[:2], config.encoder.width, config.encoder.layers],
        audio_s=audio_s,
        dtype="bfloat16",
        preset="tiny" if quick else preset,
        labels=sum(map(len, batch.plan.labels)),
    )
    yield from _whole_graph(kind, times, records)
    if best and kind == "rnnt":  # the paper's RNN-T has graphs
        yield records.ratio("rnnt-near-ctc", times, best, "ctc", arms=("rnnt", "ctc"), graph=best)
    for name, timing in times.items():
        rates = [1e3 * audio_s / ms for ms in timing.samples_ms]
        yield records.value("recogniser-batch", rates, timing, name, metric="rtfx", unit="s/s")
        yield records.value("recogniser-batch", timing.samples_ms, timing, name)
    assert not wrong, "; ".join(wrong)


def _whole_graph(
    kind: str, times: Mapping[str, Any], records: StudyRecords
) -> Iterator[Measurement]:
    """What a graph of the whole decoding loop is worth, where one has been measured."""
    names = ("windowed_looping_off", "windowed_looping_full")
    if {*names} <= {*times}:
        what = f"graphs-label-looping-{kind}"
        yield records.ratio(what, times, *names, arms=names, graph=names[1])


def _ctc_arm(model: TransducerModel, batch: _PlantedBatch) -> Callable[[], Hypotheses]:
    """The same encoder with a CTC head, whose log-probs are computed and not decoded: planted ones
    are.
    """
    device = batch.waveforms.device
    with torch.device("meta"):
        ctc = CTCModel(CTCConfig(vocab_size=model.blank, encoder=model.config.encoder)).eval()
    ctc.encoder = model.encoder
    ctc.output = torch.nn.Linear(model.encoder.width, model.blank + 1).to(device, torch.bfloat16)
    recognizer = Recognizer(ctc, PipelineConfig(encoder="eager"))
    scores = ctc_log_probs(batch.plan).to(device)

    @torch.inference_mode()
    def recognise() -> Hypotheses:
        encoded, _ = recognizer.encode(*recognizer.features(batch.waveforms, batch.lengths))
        log_probs(ctc.output(encoded))
        return ctc_greedy(scores, batch.ends)

    return recognise


STUDIES: dict[str, dict[tuple[str, ...], Make]] = {
    **claims_frontend.STUDIES,
    "loops": {
        (
            "label-looping-2x",
            "label-looping-faster",
            "graphs-cut-launches",
            "rnnt-gpu-idle",
        ): partial(_loops, DURATIONS[0]),
        ("label-looping-tdt-3.8x", "graphs-cut-launches"): partial(_loops, DURATIONS[1]),
    },
    "recognisers": {
        ("graphs-label-looping-rnnt", "rnnt-near-ctc"): partial(_recognisers, "parakeet_rnnt_1_1b"),
        ("graphs-label-looping-tdt",): partial(_recognisers, "parakeet_tdt_1_1b"),
    },
    "idle": {("launch-bound-small-batch",): claims_frontend.launches},
    "attention": {("decoder-bottleneck", "decoder-3x"): claims_attention.moved_layers},
}
GPU_CLAIMS = {  # which a CPU cannot rehearse
    "graphs-cut-launches",
    "rnnt-gpu-idle",
    "graphs-label-looping-rnnt",
    "launch-bound-small-batch",
}


SUITE = Suite(name="claims", cases=suite, gpu_tests=("tests/decoders/test_graphs_gpu.py",))
