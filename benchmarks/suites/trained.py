"""Small models trained on spoken digits: the suites `jasper-seeds` and `encoder-decoder`.

Each training has a folder in $ASRKIT_HOME/benchmarks, named after the commit, and is resumed there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from asrkit.files import home
from asrkit.models import AEDConfig, Checkpoint, FastConformerConfig, load_checkpoint, presets
from asrkit.models.presets import ModelConfig
from asrkit.shapes import expect
from asrkit.text import CharTokenizer
from asrkit.transcribe.options import BeamOptions, PipelineConfig
from asrkit.transcribe.recognizer import Recognizer
from asrkit.workbench.machine import code
from asrkit.workbench.measure import measure
from asrkit.workbench.measure.publishing import error_rate, latency, time_ratio
from asrkit.workbench.records import Measurement, Record
from benchmarks.harness.cases import Case, Suite, study_params
from benchmarks.harness.table import pivot

if TYPE_CHECKING:  # a bare GPU machine lacks what speech and training need
    from asrkit.data import Utterances
    from asrkit.training import TrainConfig

Params = dict[str, Any]
SETS = ("dev", "test")
QUICK = {"train": 60, "dev": 10, "test": 10}  # utterances
QUICK_STEPS = 20
DECODING = {"greedy": None, "beam of 4 with CTC": BeamOptions(beam=4)}
LAYERS = {"deep": (2, 4), "shallow": (4, 1)}  # of encoder and decoder; about equal parameters
WIDTH = 144
TOKENIZER = CharTokenizer()


def spoken_digits(*, train: int = 1000, dev: int = 500, test: int = 500) -> "dict[str, Utterances]":
    """Strings of digits by synthetic voices; no voice is in two sets.

    Args:
        train: number of utterances in the training set.
        dev: number of utterances in the development set.
        test: number of utterances in the test set.
    """
    from asrkit.data import Utterances, corpora

    sizes = {"train": 3 * train, "dev": 3 * dev, "test": 3 * test}  # a third is digits
    sets = corpora.spoken_commands(**sizes, kinds=["digits"], progress=False)
    return {name: Utterances.load(cuts, progress=False) for name, cuts in sets.items()}


def encoder_decoder(layers: tuple[int, int]) -> AEDConfig:
    """A FastConformer with a CTC head and an attention decoder of the same width, for characters.

    Args:
        layers: number of layers of encoder and decoder.
    """
    V = TOKENIZER.vocab_size
    in_encoder, in_decoder = layers
    return AEDConfig(
        vocab_size=V + 3,
        pad=V,
        bos=V + 1,
        eos=V + 2,
        encoder=FastConformerConfig(width=WIDTH, layers=in_encoder, subsampling=4),
        width=WIDTH,
        layers=in_decoder,
        ctc=True,
    )


def trained(
    config: ModelConfig,
    speech: "Mapping[str, Utterances]",
    folder: Path,
    settings: "TrainConfig",
    device: str = "cpu",
) -> Checkpoint:
    """Train a model, or resume its training; a finished one is read.

    Args:
        config: sizes of the model.
        speech: utterances by set; those of "train" are trained on.
        folder: folder of the run, as of `asrkit train --out`.
        settings: settings of the run.
        device: device that computes.
    """
    from asrkit.training import train

    train_set = speech["train"]
    result = train(
        config, TOKENIZER, train_set, out=folder, config=settings, device=device, progress=False
    )
    return load_checkpoint(result.path, device=device)


@cache
def speech(quick: bool) -> "dict[str, Utterances]":
    """Spoken digits by set; few if quick."""
    return spoken_digits(**QUICK) if quick else spoken_digits()


def trained_model(params: Params, config: ModelConfig, **settings: Any) -> Checkpoint:
    """The model of a training of `params`, which is resumed if it was interrupted.

    Args:
        params: params of the records: suite, steps, seed, device, threads, and quick.
        config: sizes of the model.
        settings: further fields of TrainConfig.
    """
    from asrkit.training import TrainConfig  # lazily, since a bare GPU machine cannot train

    settings |= {name: params[name] for name in ("steps", "seed", "threads")}
    run = "{suite}-{impl}-{steps}-steps-".format(**params).replace(" ", "-")
    return trained(
        config,
        speech("quick" in params),
        home() / "benchmarks" / f"{run}{code()['commit']!s:.7}",
        TrainConfig(seconds=math.inf, **settings),
        params["device"],
    )


def word_errors(
    what: str, model: Checkpoint, params: Params, config: PipelineConfig | None = None
) -> list[Measurement]:
    """The word error rate on each set."""
    from asrkit.training import evaluate

    sets = speech("quick" in params)
    return [
        error_rate(
            what,
            "wer",
            evaluate(model, sets[name], config=config).errors,
            impl=params["impl"],
            params=params | {"set": name},
        )
        for name in SETS
    ]


# Seeds


def seeds(device: str, quick: bool, *, seeds: int | None = None) -> Iterator[Case]:
    """Yield trainings of a small Jasper that differ only in their seed.

    Args:
        device: "cpu" or "cuda".
        quick: few utterances and steps.
        seeds: number of trainings, with the seeds 1 to this number; None: eight, as
            published, or two if quick.
    """
    if seeds is None:
        seeds = 2 if quick else 8
    expect(seeds >= 1, "seeds", "at least 1", seeds)
    config = presets.mini_jasper(TOKENIZER.vocab_size)
    shared = study_params(device, quick, suite="jasper-seeds", weights="trained")
    shared["steps"] = QUICK_STEPS if quick else 900
    for seed in range(1, seeds + 1):
        params = shared | {"seed": seed, "impl": f"seed {seed}"}
        yield Case(
            what=f"jasper-seeds: {params['impl']}",
            params=params,
            measure=partial(seed_errors, params, config),
        )


def seed_errors(params: Params, config: ModelConfig) -> list[Measurement]:
    """The word error rates of a training."""
    model = trained_model(params, config, optimizer="novograd")  # as published
    return word_errors("jasper-word-errors", model, params)


def seeds_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each set: word error rates in %, their mean and their standard deviation, which is
    that of these seeds alone (divided by their number), as published.
    """
    rows = pivot(
        "jasper-word-errors",
        ("set",),
        lambda record: {record["impl"]: 100 * record["value"]},
        records,
    )
    for row in rows:
        _, *rates = row.values()
        row |= {"mean": fmean(rates), "std": pstdev(rates)}
    return rows


# From the decoder to the encoder


def pair(device: str, quick: bool) -> Iterator[Case]:
    """Yield two trained encoder-decoders of about equal parameters.

    Args:
        device: "cpu" or "cuda".
        quick: few utterances and steps.
    """
    params = study_params(device, quick, suite="encoder-decoder", weights="trained", seed=0)
    params["steps"] = QUICK_STEPS if quick else 2000
    yield Case(what="encoder-decoder", params=params, measure=partial(compared, params))


def compared(params: Params) -> list[Measurement]:
    """Word error rates of both, the time to recognise the test set, and its ratio."""
    from asrkit.data import batches

    sets = speech("quick" in params)
    drawn = [*batches(sets["test"], TOKENIZER, batch_seconds=120.0)]
    measured: list[Measurement] = []
    models = {}
    of_model = {}
    for name, layers in LAYERS.items():
        in_encoder, in_decoder = layers
        of_model[name] = params | {"impl": name, "encoder": in_encoder, "decoder": in_decoder}
        model = trained_model(of_model[name], encoder_decoder(layers), smoothing=0.1, peak_lr=0.002)
        models[name] = model
        of_model[name]["parameters"] = sum(w.numel() for w in model.model.parameters())
    for title, search in DECODING.items():
        config = PipelineConfig(search=search)
        arms = {}
        for name, model in models.items():
            of_model[name] |= {"decoding": title}
            measured += word_errors("encoder-decoder-pair", model, of_model[name], config)
            arms[name] = partial(recognise, Recognizer.from_checkpoint(model, config), drawn)
        times = measure(arms, repeats=5, warmup=1, device=params["device"])
        for name, timing in times.items():
            own = of_model[name] | {"audio_s": sets["test"].total_seconds}
            measured.append(latency("encoder-decoder-pair", timing, impl=name, params=own))
        own = own | {"arms": [*LAYERS]}
        measured.append(
            time_ratio("encoder-decoder-pair", times, *LAYERS, impl="shallow", params=own)
        )
    return measured


def recognise(recognizer: Recognizer, drawn: Sequence[Any]) -> None:
    """Transcribe batches of speech to tokens."""
    for batch in drawn:
        recognizer(batch.waveforms, batch.sample_lengths).tokens()


def pair_columns(record: Record) -> dict[str, Any]:
    """Columns of a record: parameters, and a word error rate, a time or a ratio of times."""
    params, value = record["params"], record["value"]
    column = {"parameters": params["parameters"]}
    if record["metric"] == "wer":
        return column | {f"{params['set']}: WER, %": 100 * value}
    if record["metric"] == "latency":
        return column | {"test set, ms": value, "RTFx": 1e3 * params["audio_s"] / value}
    in_encoder, in_decoder = LAYERS["deep"]
    return column | {f"time of {in_encoder} + {in_decoder} layers over this": value}


SEEDS_SUITE = Suite(name="jasper-seeds", cases=seeds, rows=seeds_rows)
PAIR_SUITE = Suite(
    name="encoder-decoder",
    cases=pair,
    rows=partial(pivot, "encoder-decoder-pair", ("decoding", "encoder", "decoder"), pair_columns),
)
