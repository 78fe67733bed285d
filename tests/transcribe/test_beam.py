"""Beam search in the recogniser and the command: on a trained model, with and without an n-gram model."""

import json

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from asrkit.decoders import NGram, WordNGram, ctc_beam
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    Recognizer,
    transcribe,
)
from asrkit.transcribe.plan import Plan


def arpa(words, unknown=True):
    """An ARPA file of these equally likely words and an unlikely unknown one."""
    lines = ["-99\t<s>", "-1\t</s>", *(f"-0.5\t{word}" for word in words)]
    lines += ["-6\t<unk>"] * unknown
    body = "\n".join(lines)
    return f"\\data\\\nngram 1={len(lines)}\n\n\\1-grams:\n{body}\n\n\\end\\\n"


@pytest.fixture
def words(tiny_speech, tmp_path):
    """An n-gram model of the words that `learned` knows."""
    texts = " ".join(tiny_speech.texts[:6]).split()
    path = tmp_path / "words.arpa"
    path.write_text(arpa(sorted({*texts})))
    return path


@pytest.fixture
def waveforms(tiny_speech):
    """All thirty utterances; `learned` was trained on few of them, and is unsure of the rest."""
    parts = [waveform.float() / 32768 for waveform in tiny_speech.waveforms]
    return pad_sequence(parts, batch_first=True), torch.tensor([*map(len, parts)])


def test_the_recogniser_decodes_by_the_beam_with_words_or_tokens(
    learned, waveforms, words
):
    letters = learned.tokenizer.alphabet
    recognizer = Recognizer.from_checkpoint(learned, PipelineConfig(encoder="eager"))
    encoded, lengths = recognizer.encode(*recognizer.features(*waveforms))
    with torch.inference_mode():
        log_probs = learned.model.output(encoded).log_softmax(-1)
    tokens = words.with_name("tokens.arpa")
    tokens.write_text(arpa(["<space>", *letters[1:]]))
    cases = {
        BeamOptions(beam=4, label_bonus=0.5): {"label_bonus": 0.5},
        BeamOptions(beam=4, lm=words, lm_weight=0.8, word_bonus=2.0): {
            "lm": WordNGram.read(words, [*letters, ""], word_bonus=2.0),
            "lm_weight": 0.8,
        },
        BeamOptions(beam=4, lm=tokens, lm_units="tokens", top_tokens=5): {
            "lm": NGram.read(tokens, ["<space>", *letters[1:], "<blank>"]),
            "top_tokens": 5,
        },
    }
    texts = set()
    for search, options in cases.items():
        config = PipelineConfig(encoder="eager", search=search)
        found = Recognizer.from_checkpoint(learned, config)(*waveforms, confidence=True)
        wanted = ctc_beam(log_probs, lengths, width=4, **options)
        assert found.tokens() == wanted.tokens()
        torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-3)
        assert found.confidence[found.labels >= 0].min() > 0
        texts.add(str(found.tokens()))
    assert len(texts) == 3


def test_the_command_takes_a_beam_and_an_n_gram_model(
    speech, tiny_speech, words, typed
):
    def text(options):
        """The command's text; any option of a beam turns it on."""
        _, out, _ = typed(speech[0], options)
        return out.split("\t")[-1].strip()

    known = {*" ".join(tiny_speech.texts[:6]).split()}
    plain = text("--beam 4")
    assert {*text(f"--beam 8 --lm {words} --word-bonus 1.5").split()} <= known
    assert text("--label-bonus -1000") == "" != plain
    found = json.loads(text("--beam 4 --json --timestamps"))["words"]
    assert " ".join(word["word"] for word in found) == plain
    assert all(0 < word["confidence"] <= 1 for word in found)


def test_settings_have_the_contents_of_an_n_gram_model_and_not_its_name(words):
    def settings(**options):
        config = PipelineConfig(search=BeamOptions(**options))
        return Plan(model=words, config=config).settings()

    before = settings(lm=words)
    copy = words.with_name("copy.arpa")
    copy.write_bytes(words.read_bytes())
    others = settings(lm=words, lm_weight=0.5), settings()
    assert settings(lm=copy) == before
    assert before not in others
    words.write_text(arpa(["other"]))
    assert settings(lm=words) != before


def test_an_n_gram_model_that_excludes_every_text_is_an_error_of_the_file(
    learned, speech, words
):
    words.write_text(arpa(["zzz"], unknown=False))
    config = PipelineConfig(search=BeamOptions(beam=1, lm=words))
    recognizer = Recognizer.from_checkpoint(learned, config)
    [one] = transcribe(learned, speech[0], recognizer=recognizer)
    message = "model: expected finite scores, got NaN or infinity in torch.float32. "
    assert one.error.startswith(message)
    assert "<unk>" in one.error
