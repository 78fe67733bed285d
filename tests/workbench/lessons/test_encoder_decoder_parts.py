"""Whisper's parts: a stopwatch that changes no text and misses no part, drafts, bytes of a step."""

import pytest
import torch

from asrkit.decoders import Hypotheses, aed_greedy
from asrkit.models import (
    AEDConfig,
    AEDModel,
    Checkpoint,
    WhisperEncoderConfig,
    optimize,
)
from asrkit.models.inference import cast_copy
from asrkit.workbench.lessons.encoder_decoder import whisper_parts as lesson

CONFIG = AEDConfig(
    vocab_size=30,
    pad=27,
    bos=28,
    eos=27,
    encoder=WhisperEncoderConfig(bins=8, width=64, layers=1, heads=1, most=40),
    width=64,
    layers=2,
    heads=1,
    most=14,
    activation="gelu",
    positions="learned",
    embedding_norm=False,
    output_bias=False,
)
PARTS = {"prefill", "self-attention", "cross-attention", "feed-forward", "output layer", lesson.CHOICE}  # fmt: skip


class Letters:
    """Tokens are the space and small letters."""

    vocab_size = 27

    def encode(self, text):
        return [" abcdefghijklmnopqrstuvwxyz".index(letter) for letter in text]


def draft_of(tokens):
    """A draft of these tokens."""
    labels = [(token, -1, 0) for token in tokens]
    return Hypotheses.from_lists([labels], [torch.zeros(())], "by hand")


@pytest.fixture(scope="module")
def whisper():
    """Random weights with Whisper's settings: a model that writes as many letters as it may."""
    torch.manual_seed(0)
    model = AEDModel(CONFIG).eval()
    with torch.no_grad():
        model.embedding.weight[:27] *= 3
        model.layers[-1].cross_attention.out.weight *= 20
    prompt = {
        "template": ("<|startoftranscript|>", "<|notimestamps|>"),
        "ids": {"<|startoftranscript|>": 28, "<|notimestamps|>": 29},
        "languages": ("en",),
    }
    suppressed = {"always": [27, 28, 29], "first": [0]}
    notes = {"prompt": prompt, "suppressed": suppressed}
    checkpoint = Checkpoint(model, Letters(), {"bins": 8, "fill_s": 0.5}, notes)
    return lesson.Whisper(model=model, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def speech():
    """Noise of two lengths."""
    return [torch.randn(samples) / 10 for samples in (4000, 6000)]


@pytest.mark.parametrize("form", ["eager", "packed"])
def test_the_stopwatch_changes_no_text_misses_no_part_and_goes(whisper, speech, form):
    model = whisper.model
    if form == "packed":
        model = optimize(cast_copy(model, torch.float32))
        whisper = lesson.Whisper(model=model, checkpoint=whisper.checkpoint)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    watch = lesson.Stopwatch()
    frames, lengths = whisper.encode(speech[0], watch)
    assert {*watch.ms} == {"features", "encoder"}
    assert lengths.tolist() == [25]  # half a second
    found = whisper.decode((frames, lengths), watch)
    assert {*watch.ms} == PARTS | {"features", "encoder"}
    assert all(ms > 0 for ms in watch.ms.values())
    assert (watch.calls, watch.steps) == (
        13,
        12,
    )  # 12 letters, and where the end would be
    wanted = aed_greedy(whisper.decoder, frames, lengths, prompt=[28, 29])
    assert found.tokens() == wanted.tokens() and len(wanted.tokens()[0]) == 12
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert "score" not in vars(model)


def test_parts_are_those_of_the_fastest_pass_over_all_recordings(whisper, speech):
    parts, times = lesson.time_parts({"a": whisper, "b": whisper}, speech, passes=3)
    for name, watch in parts.items():
        assert len(times[name].samples_ms) == 3
        assert watch.total_ms <= min(times[name].samples_ms)
        assert watch.calls == 2 * 13 and watch.steps == 2 * 12


def test_drafts_leave_texts_as_they_are_and_say_how_much_of_them_was_right(whisper, speech):  # fmt: skip
    frames = [whisper.encode(waveform, lesson.Stopwatch()) for waveform in speech]
    right = [whisper.decode(one, lesson.Stopwatch()) for one in frames]
    texts = [text for one in right for text in one.tokens()]
    wrong = [(text[5] + 1) % 27 for text in texts]
    half_right = [[*text[:5], other] for text, other in zip(texts, wrong, strict=True)]
    half = [draft_of(row) for row in half_right]
    arms = {"none": (whisper, [None, None]), "right": (whisper, right), "half": (whisper, half)}  # fmt: skip
    found = lesson.time_drafts(arms, frames, passes=2)
    assert all(one.texts == texts for one in found.values())
    assert found["none"].kept == 0 and found["none"].watch.calls == 2 * 13
    assert found["right"].kept == 1 and found["right"].watch.calls == 2
    assert found["half"].kept == 5 / 12


def test_a_written_text_is_a_draft_of_its_tokens(whisper):
    assert whisper.as_draft("ab").tokens() == [[0, 1, 2]]


def test_bytes_of_a_step_are_those_of_weights_and_of_what_is_remembered(whisper):
    model = whisper.model
    T = 25
    memory = model.prefill(torch.zeros(1, T, 64), torch.tensor([T]))
    kept = sum(part.nbytes for part in (*memory.keys, *memory.values))
    products = [
        weight.nbytes
        for name, weight in model.named_parameters()
        if name.startswith("layers.") and weight.dim() == 2 and "key_value" not in name
    ]
    found = lesson.bytes_a_step(CONFIG, T)
    assert sum(found.values()) == sum(products) + kept + model.embedding.weight.nbytes
    assert found["output layer"] == 30 * 64 * 4
    assert found["cross-attention"] == kept + 2 * (2 * 64 * 64 * 4)


def test_memory_is_read_at_some_rate():
    assert lesson.read_rate(MiB=1) > 0
