"""Beam search in the recogniser and the command: on a model that was really trained, with and without an n-gram."""

import json

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from asrkit.cli import main
from asrkit.decoders import NGram, WordNGram, ctc_beam
from asrkit.models import save_checkpoint
from asrkit.text import token_texts
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
)
from asrkit.transcribe.decoding import read_lm
from asrkit.transcribe.folder import text_settings


def arpa(words, unknown=True):
    """An ARPA file of these words, equally likely, and of an unlikely unknown one."""
    lines = ["-99\t<s>", "-1\t</s>", *(f"-0.5\t{word}" for word in words)]
    lines += ["-6\t<unk>"] * unknown
    body = "\n".join(lines)
    return f"\\data\\\nngram 1={len(lines)}\n\n\\1-grams:\n{body}\n\n\\end\\\n"


@pytest.fixture
def words(tiny_speech, tmp_path):
    """An n-gram over the words of what `learned` knows."""
    texts = " ".join(tiny_speech.texts[:6]).split()
    path = tmp_path / "words.arpa"
    path.write_text(arpa(sorted({*texts})))
    return path


@pytest.fixture
def waveforms(tiny_speech):
    """All thirty utterances: of the most part `learned` has heard nothing, and is unsure."""
    parts = [waveform.float() / 32768 for waveform in tiny_speech.waveforms]
    return pad_sequence(parts, batch_first=True), torch.tensor([*map(len, parts)])


def test_the_recogniser_decodes_by_the_beam_with_words_or_tokens(
    learned, waveforms, words
):
    tokenizer = learned.tokenizer
    recognizer = Recognizer.from_checkpoint(learned, PipelineConfig(encoder="eager"))
    encoded, lengths = recognizer.encode(*recognizer.features(*waveforms))
    with torch.inference_mode():
        log_probs = learned.model.output(encoded).log_softmax(-1)
    tokens = words.with_name("tokens.arpa")
    tokens.write_text(arpa(["<space>", *"abcdefghijklmnopqrstuvwxyz'"]))
    cases = {
        BeamOptions(beam=4, label_bonus=0.5): {"label_bonus": 0.5},
        BeamOptions(beam=4, lm=words, lm_weight=0.8, word_bonus=2.0): {
            "lm": WordNGram.read(words, [*tokenizer.alphabet, ""], word_bonus=2.0),
            "lm_weight": 0.8,
        },
        BeamOptions(beam=4, lm=tokens, lm_units="tokens", top_tokens=5): {
            "lm": NGram.read(tokens, ["<space>", *tokenizer.alphabet[1:], "<blank>"]),
            "top_tokens": 5,
        },
    }
    heard = set()
    for search, options in cases.items():
        config = PipelineConfig(encoder="eager", search=search)
        found = Recognizer.from_checkpoint(learned, config)(*waveforms, confidence=True)
        wanted = ctc_beam(log_probs, lengths, width=4, **options)
        assert found.tokens() == wanted.tokens()
        torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-3)
        assert found.confidence[found.labels >= 0].min() > 0
        heard.add(str(found.tokens()))
    assert len(heard) == 3


def test_the_command_takes_a_beam_and_a_model_of_words(
    learned, speech, tiny_speech, words, tmp_path, capsys
):
    save_checkpoint(tmp_path / "model.safetensors", learned)
    command = [
        "transcribe",
        "--dtype",
        "float32",
        str(speech[0]),
        "--model",
        str(tmp_path / "model.safetensors"),
    ]
    said = {}
    for name, options in {
        "plain": ["--beam", "4"],
        "words": ["--beam", "8", "--lm", str(words), "--word-bonus", "1.5"],
        "cut": ["--beam", "8", "--lm", str(words), "--label-bonus", "-1000"],
    }.items():
        assert main([*command, *options]) == 0
        said[name] = capsys.readouterr().out.split("\t")[1]
    known = {*" ".join(tiny_speech.texts[:6]).split()}
    assert said["words"].strip() and {*said["words"].split()} <= known
    assert said["cut"] == "\n"
    assert main([*command, "--beam", "4", "--json", "--timestamps"]) == 0
    timed = json.loads(capsys.readouterr().out)["words"]
    assert " ".join(word["word"] for word in timed) == said["plain"].strip()
    assert all(0 < word["confidence"] <= 1 for word in timed)


def test_settings_tell_the_contents_of_a_model_of_words_and_not_its_name(words):
    def settings(**options):
        return text_settings(
            WindowOptions(), PipelineConfig(search=BeamOptions(**options))
        )

    before = settings(lm=words)
    copy = words.with_name("copy.arpa")
    copy.write_bytes(words.read_bytes())
    assert (
        before == settings(lm=copy) != settings(lm=words, lm_weight=0.5) != settings()
    )
    words.write_text(arpa(["other"]))
    assert settings(lm=words) != before


def test_what_excludes_every_text_is_an_error_of_the_file(learned, speech, words):
    words.write_text(arpa(["zzz"], unknown=False))
    config = PipelineConfig(search=BeamOptions(beam=1, lm=words))
    recognizer = Recognizer.from_checkpoint(learned, config)
    [one] = transcribe(learned, speech[0], recognizer=recognizer)
    assert one.error.startswith(
        "model: expected finite scores, got NaN or infinity in torch.float32. "
    )
    assert "<unk>" in one.error


def test_pieces_of_sentencepiece_spell_the_words_of_a_model(tmp_path, train_pieces):
    text = ["the cat sat on the mat", "a cat and a hat", "that is the hat"]
    tokenizer = train_pieces(text, vocab_size=24)
    assert "▁" in "".join(token_texts(tokenizer))
    (tmp_path / "lm.arpa").write_text(arpa(["the", "cat", "hat"]))
    search = BeamOptions(lm=tmp_path / "lm.arpa")
    lm = read_lm(search, tokenizer, torch.device("cpu"))

    def cost(said):
        states, total = lm.start(1), 0.0
        for token in tokenizer.encode(said):
            total += lm.scores(states)[0, token].item()
            states = lm.advance(states, torch.tensor([token]))
        return total + lm.final(states).item()

    assert tokenizer.vocab_size + 1 == len(lm.starts_word)
    nat = 2.302585
    assert cost("the cat") == pytest.approx(-(0.5 + 0.5 + 1) * nat, abs=1e-4)
    assert cost("the mat") == pytest.approx(-(0.5 + 6 + 1) * nat, abs=1e-4)
    with pytest.raises(
        ValueError, match="^tokenizer: expected one of asrkit.text, got object"
    ):
        token_texts(object())
