"""Four processes that try many things in turn, so that they are started once: see test_ranks.py.

Each scenario is a function of (rank, speech, folder). Scenarios say how many ranks they take; the
others go on to the next one. What a function returns goes to `NAME-RANK.json`.
"""

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from asrkit.data import AugmentConfig, Batch, Utterances
from asrkit.files import lock
from asrkit.models import (
    AEDConfig,
    Checkpoint,
    ConvConfig,
    CTCConfig,
    JasperConfig,
    LSTMConfig,
    LSTMEncoderConfig,
    Stage,
    TransducerConfig,
    TransducerModel,
    load_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, TrainResult, evaluate, train
from asrkit.training.processes import STEPPING, STORE, joined

TOKENIZER = CharTokenizer()
MODEL = TransducerConfig(
    vocab_size=TOKENIZER.vocab_size,
    encoder=ConvConfig(width=16, layers=1, dropout=0.1),
    predictor=LSTMConfig(width=16),
    joint_width=16,
    dropout=0.1,
)
PLAIN = AugmentConfig(
    speed=(1, 1), noise=0, room=0, telephone=0, gain_db=(0.0, 0.0), time_masks=0, frequency_masks=0
)
# In bfloat16, which "auto" takes where the CPU computes in it, or at AdamW's own rate, the last bit
# of a gradient moves later losses by 1e-3: no bound would tell another order of sums from an error.
CONFIG = TrainConfig(
    steps=8,
    seconds=math.inf,
    batch_seconds=3.0,
    peak_lr=1e-3,
    precision="float32",
    threads=1,
    lanes=2,
    checkpoint_s=1e9,
)
WAYS = list(itertools.product((1, 2, 4), (False, True)))  # ranks, and whether FSDP2 shards
CHAIN = replace(CONFIG, steps=37, batch_seconds=1.0, lanes=4, augment=PLAIN)
RECURRENT = replace(MODEL, encoder=LSTMEncoderConfig(width=16))
NOVOGRAD = replace(CONFIG, steps=6, batch_seconds=1.0, optimizer="novograd")
JASPER = CTCConfig(
    vocab_size=TOKENIZER.vocab_size,
    encoder=JasperConfig(
        bins=80,
        stages=[
            Stage(channels=8, kernel=5, repeat=1, stride=2, dense=False),
            Stage(channels=8, kernel=3, repeat=2),
            Stage(channels=12, kernel=3, repeat=2),
        ],
    ),
)
ATTENTION = AEDConfig(
    vocab_size=TOKENIZER.vocab_size + 3,
    pad=TOKENIZER.vocab_size,
    bos=TOKENIZER.vocab_size + 1,
    eos=TOKENIZER.vocab_size + 2,
    encoder=MODEL.encoder,
    width=32,
    layers=2,
    ctc=True,
)
SMOOTHED = replace(CONFIG, steps=6, batch_seconds=1.0, smoothing=0.1)
LAMB = replace(CONFIG, steps=20, batch_seconds=1.0, optimizer="lamb", peak_lr=0.1)
Scenario = Callable[[int, Utterances, Path], object]


def every_pair(things: list) -> list:
    """A sequence in which each ordered pair of `things` is found once: a de Bruijn sequence."""
    sequence = []
    for number, thing in enumerate(things):
        sequence.append(thing)
        for later in things[number + 1 :]:
            sequence += [thing, later]
    return [*sequence, things[0]]


def run(
    speech: Utterances,
    out: Path,
    config: TrainConfig = CONFIG,
    *,
    model: TransducerConfig | CTCConfig | AEDConfig = MODEL,
    **given: object,
) -> TrainResult:
    """`train` of this gang's model."""
    return train(model, TOKENIZER, speech, out=out, config=config, progress=False, **given)


def losses(result: TrainResult) -> list[float]:
    """Loss of every step."""
    return [line["loss"] for line in result.history]


def error_of(action: Callable[[], object]) -> str:
    """Text of the error that `action` raises; "" for none."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def replicated(rank: int, speech: Utterances, folder: Path) -> object:
    """Two ranks under DDP, with a dev set, and the timeout after the first step."""
    timeouts = []

    def note_timeout(_: list) -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        timeouts.append(backend.options._timeout == STEPPING)

    result = train(
        MODEL, TOKENIZER, speech, speech, out=folder / "replicated", config=CONFIG,
        progress=False, on_step=note_timeout,
    )  # fmt: skip
    return [losses(result), str(result.dev), timeouts]


def sharded(rank: int, speech: Utterances, folder: Path) -> object:
    """Two ranks under FSDP2."""
    result = run(speech, folder / "sharded", replace(CONFIG, shard=True))
    return losses(result)


def recurrent(rank: int, speech: Utterances, folder: Path) -> object:
    """An LSTM encoder trained by LAMB under DDP, which stops after ten steps."""

    def stop(history: list) -> None:
        if rank == 0 and len(history) == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    out = folder / "recurrent"
    return losses(run(speech, out, LAMB, model=RECURRENT, on_step=stop))


def recurrent_sharded(rank: int, speech: Utterances, folder: Path) -> object:
    """The same goes on under FSDP2."""
    config = replace(LAMB, shard=True)
    return losses(run(speech, folder / "recurrent", config, model=RECURRENT))


def ctc_alone(rank: int, speech: Utterances, folder: Path) -> object:
    """A Jasper trained by CTC alone and NovoGrad under DDP, which stops after three steps."""

    def stop(history: list) -> None:
        if rank == 0 and len(history) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    return losses(run(speech, folder / "ctc", NOVOGRAD, model=JASPER, on_step=stop))


def ctc_alone_sharded(rank: int, speech: Utterances, folder: Path) -> object:
    """The same goes on under FSDP2."""
    return losses(run(speech, folder / "ctc", replace(NOVOGRAD, shard=True), model=JASPER))


def attention(rank: int, speech: Utterances, folder: Path) -> object:
    """An encoder-decoder model trained under DDP, which stops after three steps."""

    def stop(history: list) -> None:
        if rank == 0 and len(history) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    out = folder / "attention"
    return losses(run(speech, out, SMOOTHED, model=ATTENTION, on_step=stop))


def attention_sharded(rank: int, speech: Utterances, folder: Path) -> object:
    """The same goes on under FSDP2."""
    config = replace(SMOOTHED, shard=True)
    return losses(run(speech, folder / "attention", config, model=ATTENTION))


def attention_alone(rank: int, speech: Utterances, folder: Path) -> object:
    """The same without CTC, whose head has no gradient."""
    config = replace(SMOOTHED, steps=2, ctc_weight=0.0)
    return losses(run(speech, folder / "attention_alone", config, model=ATTENTION))


def untrained_heads(rank: int, speech: Utterances, folder: Path) -> object:
    """Weights without a gradient: DDP must not wait for them."""
    config = replace(CONFIG, steps=3, ctc_weight=0.0)
    return losses(run(speech, folder / "heads", config))


def scores(rank: int, speech: Utterances, folder: Path) -> object:
    """Both ranks score half of the batches each."""
    torch.manual_seed(0)
    model = TransducerModel(MODEL).eval()
    checkpoint = Checkpoint(model, TOKENIZER, {}, {})
    with joined(torch.device("cpu")) as processes:
        rate, texts, _ = evaluate(checkpoint, speech, batch_seconds=5.0, processes=processes)
    return [str(rate), texts]


def other_data(rank: int, speech: Utterances, folder: Path) -> object:
    """Rank 1 has one utterance less."""
    count = len(speech) - rank
    fewer = Utterances(
        waveforms=speech.waveforms[:count],
        ids=speech.ids[:count],
        texts=speech.texts[:count],
        speakers=speech.speakers[:count],
    )
    return error_of(lambda: run(fewer, folder / "other"))


def other_settings(rank: int, speech: Utterances, folder: Path) -> object:
    """Rank 1 has another seed."""
    return error_of(lambda: run(speech, folder / "other", replace(CONFIG, seed=rank)))


def other_torch(rank: int, speech: Utterances, folder: Path) -> object:
    """Rank 1 says that it has another torch."""
    before = torch.__version__
    torch.__version__ = f"2.{rank}"
    try:
        return error_of(lambda: run(speech, folder / "other"))
    finally:
        torch.__version__ = before


def other_batches(rank: int, speech: Utterances, folder: Path) -> object:
    """Batches of one's own that are not the same from step 2 on."""

    def own(first: int):
        for number in itertools.count(first):
            row = number if number < 4 else number + rank
            yield speech.batch([row % len(speech)], TOKENIZER)

    return error_of(lambda: run(speech, folder / "batches", batches=own))


def unreadable(rank: int, speech: Utterances, folder: Path) -> object:
    """Rank 1 cannot read the batches of step 3."""

    def own(first: int):
        for number in itertools.count(first):
            if number == 6 and rank == 1:
                raise ValueError("audio: expected sound.")
            yield speech.batch([number % len(speech)], TOKENIZER)

    return error_of(lambda: run(speech, folder / "unreadable", batches=own))


def not_finite(rank: int, speech: Utterances, folder: Path, *, shard: bool = False) -> object:
    """The batch of lane 1 in step 2 has no finite gradient; weights around it, and the norms."""
    weights = []

    def own(first: int):
        for number in itertools.count(first):
            batch = speech.batch([number % len(speech)], TOKENIZER)
            if number == 5:
                batch.waveforms[:] = math.nan
            yield batch

    config = replace(CONFIG, steps=4, checkpoint_s=0.0, augment=PLAIN, ema=0.0, shard=shard)
    out = folder / f"not_finite-{shard}"

    def note_weights(history: list) -> None:
        if rank == 0 and len(history) > 1:  # the model of the step before
            weights.append(load_checkpoint(out).model.output.weight.sum().item())

    result = run(speech, out, config, batches=own, on_step=note_weights)
    return [[line["gradient_norm"] for line in result.history], weights]


def not_finite_sharded(rank: int, speech: Utterances, folder: Path) -> object:
    """The same under FSDP2."""
    return not_finite(rank, speech, folder, shard=True)


def batches_from(
    speech: Utterances, *, pause_at: int | None = None
) -> Callable[[int], Iterator[Batch]]:
    """Batches of one utterance each, in order; before one of them there is a pause."""

    def own(first: int) -> Iterator[Batch]:
        for number in itertools.count(first):
            if number == pause_at:
                time.sleep(2)
            yield speech.batch([number % len(speech)], TOKENIZER)

    return own


def slow(rank: int, speech: Utterances, folder: Path) -> object:
    """Rank 1 takes long over the batches of step 3, for which rank 0 waits."""
    pause_at = 6 if rank == 1 else None
    batches = batches_from(speech, pause_at=pause_at)
    return losses(run(speech, folder / "slow", replace(CONFIG, steps=5), batches=batches))


def uneven_lanes(rank: int, speech: Utterances, folder: Path) -> object:
    """Three lanes on two ranks."""
    return error_of(lambda: run(speech, folder / "other", replace(CONFIG, lanes=3)))


def folder_in_use(rank: int, speech: Utterances, folder: Path) -> object:
    """Somebody else trains in the folder."""
    if rank == 1:
        return error_of(lambda: run(speech, folder / "used"))
    with lock(folder / "used"):
        return error_of(lambda: run(speech, folder / "used"))


def link(number: int, shard: bool) -> Scenario:
    """A step of the chain: what was saved by another number of ranks goes on for one step."""

    def one_step(rank: int, speech: Utterances, folder: Path) -> object:
        def stop(_: list) -> None:
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        result = run(speech, folder / "chain", replace(CHAIN, shard=shard), on_step=stop)
        return [result.finished, losses(result)]

    one_step.__name__ = f"link{number}"
    return one_step


TWO = (
    replicated,
    sharded,
    recurrent,
    recurrent_sharded,
    ctc_alone,
    ctc_alone_sharded,
    attention,
    attention_sharded,
    attention_alone,
    untrained_heads,
    scores,
    other_data,
    other_settings,
    other_torch,
    other_batches,
    unreadable,
    not_finite,
    not_finite_sharded,
    slow,
    uneven_lanes,
    folder_in_use,
)
LINKS = [(link(n, shard), ranks) for n, (ranks, shard) in enumerate(every_pair(WAYS))]
SCENARIOS: list[tuple[Scenario, int]] = [*((scenario, 2) for scenario in TWO), *LINKS]


def work(rank: int, folder: Path) -> None:
    """Run all scenarios as one of the four processes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    speech = torch.load(folder / "speech.pt", weights_only=False)
    for scenario, ranks in SCENARIOS:
        if rank < ranks:
            name = scenario.__name__
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
            os.environ[STORE] = str(folder / f"store-{name}")
            found = scenario(rank, speech, folder)
            (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
