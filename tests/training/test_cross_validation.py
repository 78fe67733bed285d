"""Cross-validation over speakers: whom each model hears, what a kill leaves, and what is refused."""

import json
import math
from dataclasses import asdict, replace

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.data import AugmentConfig, corpora
from asrkit.features import FeatureConfig
from asrkit.models import ConvConfig, StatelessConfig, TransducerConfig, load_checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import (
    CrossValidation,
    TrainConfig,
    cross_validate,
    evaluate,
    isolated_words,
    train,
)
from asrkit.training.cross_validation import RESULTS, fold_folder

TOKENIZER = CharTokenizer()
SMALL = TransducerConfig(
    vocab_size=TOKENIZER.vocab_size,
    encoder=ConvConfig(width=16, layers=1),
    predictor=StatelessConfig(width=16),
    joint_width=16,
)
SHORT = TrainConfig(steps=2, seconds=math.inf, batch_seconds=3.0, threads=1)


@pytest.fixture
def speech(tiny_speech):
    """Six utterances of three speakers, one with a name that no file could have."""
    few = tiny_speech.select(range(6))
    return replace(few, speakers=["ann", "../bob", "eve"] * 2)


def run(speech, out, added=None, **options):
    """A cross-validation of two steps a fold."""
    return cross_validate(
        SMALL, TOKENIZER, speech, added, out=out, config=SHORT, progress=False, **options
    )


def test_each_model_is_trained_on_all_speakers_but_the_one_it_is_scored_on(
    speech, tiny_speech, tmp_path
):
    # ann also says one of the added utterances: her model must not hear that one either
    added = replace(tiny_speech.select(range(6, 9)), speakers=["ann", "robot", "robot"])
    result = run(speech, tmp_path / "folds", added)
    assert [fold.speaker for fold in result.folds] == ["../bob", "ann", "eve"]
    assert [fold.trained_on for fold in result.folds] == [7, 6, 7]
    by_hand = train(
        SMALL,
        TOKENIZER,
        speech.joined(added).select([1, 2, 4, 5, 7, 8]),
        out=tmp_path / "hand",
        config=SHORT,
        progress=False,
    )
    ann = result.folds[1]
    trained, expected = (
        load_checkpoint(path).model.state_dict() for path in (ann.path, by_hand.path)
    )
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    own, _, _ = evaluate(load_checkpoint(ann.path), speech.select([0, 3]))
    assert ann.wer == own and ann.utterances == 2 and ann.steps == 2
    folders = sorted(path.name for path in (tmp_path / "folds").iterdir() if path.is_dir())
    assert folders == ["without-..%2Fbob", "without-ann", "without-eve"]


def test_mean_and_worst_count_each_speaker_once(speech, tmp_path):
    folds = run(speech, tmp_path, speakers=["eve", "ann"]).folds
    rates = [0.2, 0.5]
    folds = [
        replace(fold, wer=replace(fold.wer, rate=rate))
        for fold, rate in zip(folds, rates, strict=True)
    ]
    result = CrossValidation(folds)
    assert result.mean_wer == pytest.approx(0.35) and result.worst.speaker == "ann"


class Killed(Exception):
    pass


def test_a_run_that_was_killed_goes_on_where_it_stopped(speech, tmp_path):
    whole = run(speech, tmp_path / "whole")

    def die(fold):
        raise Killed

    with pytest.raises(Killed):
        run(speech, tmp_path / "broken", on_fold=die)
    first = json.loads((tmp_path / "broken" / RESULTS).read_text())
    assert [fold["speaker"] for fold in first["folds"]] == ["../bob"]
    model = fold_folder(tmp_path / "broken", "../bob") / "model.safetensors"
    trained_at = model.stat().st_mtime_ns
    resumed = run(speech, tmp_path / "broken")
    assert model.stat().st_mtime_ns == trained_at
    assert [fold.wer for fold in resumed.folds] == [fold.wer for fold in whole.folds]
    saved = json.loads((tmp_path / "broken" / RESULTS).read_text())
    assert saved.pop("settings").startswith("sha256:")
    assert saved == resumed.to_json() and len(saved["folds"]) == 3


def saved_speakers(out):
    """The speakers in the results of `out`."""
    return [fold["speaker"] for fold in json.loads((out / RESULTS).read_text())["folds"]]


def test_the_results_keep_the_speakers_of_earlier_calls_with_the_same_settings(speech, tmp_path):
    run(speech, tmp_path, speakers=["eve"])
    alone = run(speech, tmp_path, speakers=["ann"])
    assert [fold.speaker for fold in alone.folds] == ["ann"]
    assert saved_speakers(tmp_path) == ["ann", "eve"]
    whole = run(speech, tmp_path)
    saved = json.loads((tmp_path / RESULTS).read_text())
    assert CrossValidation.from_json(saved) == whole

    def die(fold):
        raise Killed

    with pytest.raises(Killed):  # a call that is killed forgets nobody
        run(speech, tmp_path, on_fold=die)
    assert saved_speakers(tmp_path) == ["../bob", "ann", "eve"]


@pytest.mark.parametrize("what", ["steps", "texts", "fresh", "damaged"])
def test_the_results_drop_what_is_not_comparable(speech, tmp_path, what, monkeypatch):
    run(speech, tmp_path, speakers=["eve"])
    options = {}
    if what == "steps":
        monkeypatch.setattr(f"{__name__}.SHORT", replace(SHORT, steps=1))
    elif what == "texts":
        speech = replace(speech, texts=["one", *speech.texts[1:]])
    elif what == "fresh":
        options["resume"] = False
    else:
        (tmp_path / RESULTS).write_text("{")
    run(speech, tmp_path, speakers=["ann"], **options)
    assert saved_speakers(tmp_path) == ["ann"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speakers": ["ann"] * 6}, "speech: expected utterances of others than 'ann' to train on"),
        (
            {"speakers": ["ann"] * 5 + [""]},
            "speech: expected a speaker for each utterance, got none",
        ),
        ({"texts": ["one"] * 5 + [" "]}, "speech: expected words in each utterance, got none in"),
        ({"texts": ["one"] * 5 + ["5"]}, r"text: expected characters .* got \['5'\]"),
    ],
)
def test_speech_that_no_speaker_can_be_held_out_of_is_refused_before_any_training(
    speech, tmp_path, change, message
):
    with pytest.raises(ValueError, match=message):
        run(replace(speech, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_speaker_who_says_nothing_is_refused(speech, tmp_path):
    with pytest.raises(ValueError, match=r"speakers: expected those of \['../bob', 'ann', 'eve'\]"):
        run(speech, tmp_path / "out", speakers=["ann", "mallory"])
    with pytest.raises(ValueError, match="speakers: expected at least one, got none"):
        run(speech, tmp_path / "out", speakers=[])
    assert not (tmp_path / "out").exists()


def write_manifest(folder, speech):
    """A manifest of sound files, whose `split` would put two of them into a test set."""
    lines = []
    for row, id_ in enumerate(speech.ids):
        soundfile.write(folder / f"{id_}.wav", speech.waveforms[row].numpy(), 16_000)
        line = {
            "audio": f"{id_}.wav",
            "text": speech.texts[row],
            "speaker": speech.speakers[row],
            "split": ["train", "test"][row % 2],
        }
        lines.append(json.dumps(line) + "\n")
    path = folder / "cuts.jsonl"
    path.write_text("".join(lines))
    return path


def test_the_command_trains_for_each_speaker_and_tells_mean_and_worst(speech, tmp_path, capsys):
    manifest = write_manifest(tmp_path, speech)
    command = ["train", "--hold-out", "each", "--manifest", str(manifest), "--steps", "1"]
    command += ["--out", str(tmp_path / "out"), "--no-progress"]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [fold["speaker"] for fold in answer["folds"]] == ["../bob", "ann", "eve"]
    rates = [fold["wer"]["rate"] for fold in answer["folds"]]
    assert answer["mean_wer"] == pytest.approx(sum(rates) / 3)
    assert answer["worst_wer"] == max(rates)
    assert all(fold["utterances"] == 2 and fold["trained_on"] == 4 for fold in answer["folds"])
    assert main(command) == 0  # again, for people: nothing is left to train
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-5].split() == "speaker WER 95 % interval words utterances trained on steps".split()
    )
    assert lines[-1].startswith(
        f"mean WER {100 * answer['mean_wer']:.1f} %, worst {100 * max(rates):.1f} % ("
    )
    assert lines[-1].endswith(f"): {tmp_path / 'out'}")


def test_the_option_for_isolated_words_sets_features_and_augmentation(speech, tmp_path, capsys):
    manifest = write_manifest(tmp_path, speech)
    command = ["train", "--hold-out", "ann", "--manifest", str(manifest), "--steps", "1"]
    command += ["--out", str(tmp_path / "out"), "--no-progress", "--isolated-words"]
    assert main(command) == 0
    config = isolated_words(TrainConfig())
    assert load_checkpoint(tmp_path / "out").features == asdict(config.features)
    saved = json.loads(torch.load(tmp_path / "out" / "state.pt")["config"])
    assert saved["augment"] == json.loads(json.dumps(asdict(config.augment)))
    assert config.augment.trim > 0 and config.features.normalization == "all_features"


def test_for_isolated_words_all_other_settings_stay():
    ours = replace(
        SHORT, features=FeatureConfig(window_s=0.02), augment=AugmentConfig(gain_db=(-3.0, 3.0))
    )
    config = isolated_words(ours)
    assert config.features.window_s == 0.02 and config.augment.gain_db == (-3.0, 3.0)
    assert replace(config, features=ours.features, augment=ours.augment) == ours


def test_the_command_needs_named_speakers_of_a_manifest(speech, tmp_path, capsys):
    with pytest.raises(ValueError, match="manifest: expected a manifest with the speakers"):
        corpora.load_by_speaker(["spoken_commands"])
    unnamed = write_manifest(tmp_path, replace(speech, speakers=["unknown", "ann", "eve"] * 2))
    with pytest.raises(ValueError, match="manifest: expected a speaker for each utterance"):
        corpora.load_by_speaker([unnamed])


def test_several_processes_are_refused(speech, tmp_path, capsys, monkeypatch):
    command = ["train", "--hold-out", "each", "--ranks", "2", "--out", str(tmp_path / "out")]
    assert main([*command, "--manifest", str(write_manifest(tmp_path, speech))]) == 2
    assert "ranks: expected none with --hold-out each, got 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="processes: expected one, got several"):
        run(speech, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_digit_strings_are_to_train_on_only(speech, tmp_path):
    words = replace(speech, texts=["one"] * 6)
    cuts, added = corpora.load_by_speaker([write_manifest(tmp_path, words)], join_digits=4)
    assert len(cuts) == 6 and len(added) == 4
    assert {cut.supervisions[0].speaker for cut in added} <= set(words.speakers)
