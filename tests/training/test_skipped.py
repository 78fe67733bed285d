"""A step that is not finite changes nothing; utterances without an alignment do not count."""

import copy
import itertools
import math
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import sentencepiece
import torch

from asrkit.data import UNALTERED
from asrkit.losses import ctc_loss, tdt_loss
from asrkit.models import make_model
from asrkit.text import SentencePieceTokenizer
from asrkit.training import Prepared, TrainConfig, train, training_loss
from asrkit.training.distributed import Processes
from asrkit.training.loop import Run
from asrkit.training.objective import alignable

sys.path.insert(0, str(Path(__file__).parent))
from trainings import (
    ATTENTION,
    CTC,
    ENCODERS,
    SHORT,
    TDT,
    TOKENIZER,
    TRANSDUCER,
    V,
    losses,
    run,
    stop_after,
)

MODELS = {
    "transducer": TRANSDUCER,
    "TDT": TDT,
    "fastconformer": replace(CTC, encoder=ENCODERS["fastconformer"]),
    "jasper": replace(CTC, encoder=ENCODERS["jasper"]),
    "lstm": replace(CTC, encoder=ENCODERS["lstm"]),
    "attention": ATTENTION,
}


def batch(scale=1.0):
    features = scale * torch.randn(3, 60, 80)
    lengths = torch.tensor([60, 50, 40])
    return Prepared(
        features, lengths, torch.randint(V, (3, 4)), torch.tensor([4, 3, 2]), 1.0
    )


def with_nan(prepared):
    prepared.features[1, 7, :5] = math.nan
    return prepared


def run_of(model, speech, out, **settings):
    config = replace(SHORT, steps=100, **settings)
    cpu = torch.device("cpu")
    return Run(model, TOKENIZER, speech, out, config, cpu, Processes())


def state(training):
    """Everything that a step changes."""
    parts = (training.model, training.average.module)
    states = [part.state_dict() for part in parts]
    return copy.deepcopy([*states, training.optimizer.state_dict()["state"]])


PRECISIONS = ["float32", "bfloat16", "float16"]
# Each model with each optimizer and each precision, and each pair of these for two models.
TRAINED = [
    (name, optimizer, PRECISIONS[(row + column) % 3])
    for row, name in enumerate(MODELS)
    for column, optimizer in enumerate(["adamw", "lamb", "novograd"])
]


@pytest.mark.parametrize("name, optimizer, precision", TRAINED)
def test_a_step_that_is_not_finite_changes_neither_weights_nor_averages_nor_buffers(
    name, optimizer, precision, tiny_speech, tmp_path, monkeypatch
):
    torch.manual_seed(0)
    monkeypatch.setattr("asrkit.training.optimizer.FIRST_SCALE", 1.0)
    training = run_of(
        MODELS[name], tiny_speech, tmp_path, optimizer=optimizer, precision=precision
    )
    training.take_step(iter([[batch()]]))
    before = state(training)
    bad = [with_nan(batch())]
    if name not in ("fastconformer", "lstm"):  # their first layers have no batch norm
        bad.append(batch(1e25))  # finite, and so is its loss: a variance overflows
    for corrupt in bad:
        training.take_step(iter([[corrupt]]))
        training.complete_log()
        line = training.history[-1]
        assert math.isnan(line["loss"]) and math.isnan(line["gradient_norm"])
        torch.testing.assert_close(state(training), before, rtol=0, atol=0)
    training.take_step(iter([[batch()]]))  # the next step counts
    after = state(training)
    for part in range(3):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)


def test_one_corrupt_batch_of_several_skips_the_step(tiny_speech, tmp_path):
    torch.manual_seed(0)
    training = run_of(TRANSDUCER, tiny_speech, tmp_path, accumulate=2)
    training.take_step(iter([[batch(), batch()]]))
    before = state(training)
    for pair in ([with_nan(batch()), batch()], [batch(), with_nan(batch())]):
        training.take_step(iter([pair]))
        torch.testing.assert_close(state(training), before, rtol=0, atol=0)


def test_statistics_of_a_step_are_the_mean_over_its_batches(tiny_speech, tmp_path):
    """A step of two batches updates them once, whichever batch comes first."""
    torch.manual_seed(0)
    pair = [batch(), batch(3.0)]
    statistics = []
    for batches in ([pair[0]], [pair[1]], pair, pair[::-1]):
        training = run_of(TRANSDUCER, tiny_speech, tmp_path, accumulate=len(batches))
        training.take_step(iter([batches]))
        statistics.append(training.statistics.read())
    first, second, both, reversed_ = statistics
    assert not torch.allclose(first, second)
    # the other layers follow dropout
    torch.testing.assert_close(both[:32], (first + second)[:32] / 2)
    torch.testing.assert_close(both[:32], reversed_[:32])


def with_corrupt_batches(speech, corrupt):
    """A run's batches of one utterance; those numbered in `corrupt` have 100 samples of NaN."""

    def supplied(first):
        for number in itertools.count(first):
            one = speech.batch([number % len(speech)], TOKENIZER)
            if number in corrupt:
                one.waveforms[0, 500:600] = math.nan
            yield one

    return supplied


def test_a_corrupt_batch_is_reported_once_and_logged_and_the_run_resumes(
    tiny_speech, tmp_path, capsys
):
    config = replace(SHORT, steps=6, checkpoint_s=0.0, augment=UNALTERED)
    supplied = with_corrupt_batches(tiny_speech, (2, 3))
    whole = run(tiny_speech, tmp_path / "a", config, batches=supplied)
    stderr = capsys.readouterr().err
    assert stderr.count("Step 3 was skipped") == stderr.count("was skipped") == 1
    assert [math.isnan(loss) for loss in losses(whole)] == [
        n in (2, 3) for n in range(6)
    ]
    saved = torch.load(whole.path.parent / "state.pt")
    for part in ("model", "ema"):
        assert all(value.isfinite().all() for value in saved[part].values())
    with pytest.raises(KeyboardInterrupt):
        run(
            tiny_speech, tmp_path / "b", config, batches=supplied, on_step=stop_after(5)
        )
    resumed = run(tiny_speech, tmp_path / "b", config, batches=supplied)
    assert losses(resumed) == pytest.approx(losses(whole), rel=0, nan_ok=True)


# --- utterances without an alignment


CASES = [(T, U) for T in range(1, 9) for U in range(6)]


@pytest.mark.parametrize(
    "durations", [(0, 1), (1, 2), (2,), (0, 2), (2, 3), (0, 3, 5), (4, 1)]
)
def test_tdt_aligns_utterances_of_finite_loss(durations):
    T, U = torch.tensor(CASES).unbind(1)
    logits = torch.zeros(len(CASES), 8, 6, 3 + len(durations))
    targets = torch.zeros(len(CASES), 5, dtype=torch.long)
    nats = tdt_loss(logits, targets, T, U, durations=durations, reduction="none")
    config = replace(TDT, durations=durations)
    fits, _ = alignable(config, 4 * T, targets, U)
    assert fits.tolist() == nats.isfinite().tolist()
    assert fits.sum() > 0


def test_ctc_aligns_utterances_of_a_loss_above_0():
    torch.manual_seed(0)
    B = 200
    T = torch.randint(1, 9, (B,))
    U = torch.randint(0, 7, (B,))
    targets = torch.randint(0, 2, (B, 6))
    log_probs = torch.zeros(B, 8, 4).log_softmax(-1)
    wanted = ctc_loss(log_probs, targets, T, U, 3) > 0
    padded = targets.masked_fill(torch.arange(6) >= U[:, None], -1)
    for labels in (targets, padded):
        fits, by_ctc = alignable(CTC, 4 * T, labels, U)
        assert fits.equal(wanted) and by_ctc.all()
        fits, by_ctc = alignable(TRANSDUCER, 4 * T, labels, U)
        assert fits.all() and by_ctc.equal(wanted)
    assert 0 < wanted.sum() < B
    empty = alignable(CTC, torch.tensor([1]), targets[:1, :0], torch.tensor([0]))
    assert empty.all()


ODD = replace(TDT, durations=(1, 2))  # a label takes a frame at least


@pytest.mark.parametrize("joint", ["full", "lean"])
@pytest.mark.parametrize(
    "model_config",
    [CTC, replace(CTC, encoder=ENCODERS["lstm"]), ODD, TRANSDUCER, ATTENTION],
)
def test_utterances_without_an_alignment_do_not_dilute_the_loss(model_config, joint):
    torch.manual_seed(0)
    model = make_model(model_config).eval()  # no dropout, no statistics of the batch
    config = replace(SHORT, joint=joint)
    whole = batch()._replace(
        targets=torch.arange(30).repeat(3, 1) % V,
        target_lengths=torch.tensor([4, 30, 2]),
    )
    alone = Prepared(*(part[::2] for part in whole[:4]), speech_s=1.0)
    loss = training_loss(model, whole, config).per_label
    if model_config in (
        TRANSDUCER,
        ATTENTION,
    ):  # they align any labels, but the CTC head does not
        config = replace(config, ctc_weight=0.0)
        loss = loss - training_loss(model, whole, config).per_label
        wanted = training_loss(model, alone, replace(config, ctc_weight=0.3)).per_label
        wanted = wanted - training_loss(model, alone, config).per_label
    else:
        wanted = training_loss(model, alone, config).per_label
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    unaligned = Prepared(*(part[1:2] for part in whole[:4]), speech_s=1.0)
    loss = training_loss(model, unaligned, config).per_label
    assert loss.isnan() == (model_config not in (TRANSDUCER, ATTENTION))


LONG = "seven " * 40


def with_texts(speech, rows):
    texts = [LONG if row in rows else "one" for row in range(len(speech))]
    return replace(speech, texts=texts)


def test_utterances_with_too_few_frames_are_counted_and_named(
    tiny_speech, tmp_path, capsys
):
    speech = with_texts(tiny_speech.select(range(12)), range(6))
    named = ", ".join(speech.ids[:5])
    own = "Left out for too few frames for their labels"
    auxiliary = "Left out by the auxiliary CTC loss alone, for too few frames"
    lines = {"ctc": (CTC, [own]), "tdt": (ODD, [own, auxiliary])}
    lines |= {"rnnt": (TRANSDUCER, [auxiliary]), "attention": (ATTENTION, [auxiliary])}
    for name, (model, wanted) in lines.items():
        run(speech, tmp_path / name, replace(SHORT, steps=4, augment=UNALTERED), model)
        stderr = capsys.readouterr().err
        for line in wanted:
            assert f"{line}: 6 of 12 utterances, {named}, ...\n" in stderr
        assert stderr.count("too few") == len(wanted)
    run(speech, tmp_path / "idle", replace(SHORT, ctc_weight=0.0), TRANSDUCER)
    assert "too few" not in capsys.readouterr().err
    run(with_texts(speech, ()), tmp_path / "whole", SHORT, CTC)
    assert "too few" not in capsys.readouterr().err


@pytest.mark.parametrize("model_config", [CTC, ODD])
def test_speech_without_any_alignment_is_refused(tiny_speech, tmp_path, model_config):
    message = (
        "^train_set: expected an utterance with enough frames for its labels, got none"
    )
    speech = with_texts(tiny_speech, range(len(tiny_speech)))
    with pytest.raises(ValueError, match=message):
        run(speech, tmp_path / "run", SHORT, model_config)
    assert not (tmp_path / "run").exists()


def test_a_step_without_an_alignment_is_skipped(tiny_speech, tmp_path, capsys):
    speech = with_texts(tiny_speech, range(1, len(tiny_speech), 2))

    def supplied(first):
        for number in itertools.count(first):
            yield speech.batch([number % 4, (number + 2) % 4], TOKENIZER)

    config = replace(SHORT, augment=UNALTERED)
    logged = losses(run(speech, tmp_path, config, CTC, batches=supplied))
    assert [math.isnan(loss) for loss in logged] == [False, True, False, True]
    assert capsys.readouterr().err.count("Step 2 was skipped") == 1
    assert min(logged[::2]) > 1


def test_texts_unknown_to_the_tokenizer_are_named_or_all_refused(
    tiny_speech, tmp_path, capsys
):
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four five six seven eight nine"] * 9),
        model_writer=model,
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=9,
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    speech = tiny_speech.select(range(12))
    config = replace(CTC, vocab_size=tokenizer.vocab_size)

    def start(texts):
        train(
            config,
            tokenizer,
            replace(speech, texts=texts),
            out=tmp_path,
            config=TrainConfig(steps=1, batch_seconds=20.0),
            resume=False,
            progress=False,
        )

    start(["one two"] * 11 + ["ONE TWO"])
    line = (
        "Text that the tokenizer has no pieces for, which the model learns as unknown: "
    )
    line += f"1 of 12 utterances, {speech.ids[11]}\n"
    assert line in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="^train_set: expected text that the tokenizer"
    ):
        start(["ONE TWO"] * 12)
