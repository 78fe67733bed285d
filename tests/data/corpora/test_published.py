import fcntl
import functools
import gc
import itertools
import shutil
import warnings

import numpy as np
import pytest
import soundfile
from lhotse import CutSet

from asrkit.data import Utterances, corpora
from asrkit.data.corpora import synthetic
from asrkit.data.corpora.published import prepare_corpora


def quiet(corpus, **options):
    """Result of `prepare_corpora` without bars, and its messages."""
    messages = []
    return prepare_corpora(
        corpus, progress=False, log=messages.append, **options
    ), messages


def loaded(manifest):
    return Utterances.load(corpora.from_manifest(manifest), progress=False)


@pytest.fixture(autouse=True)
def sockets_of_lhotse():
    """Collects the socket of a failed download, which lhotse leaves open."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def mini(mirror, libri):
    """`mirror` with a small mini_librispeech; `prepare` downloads from there."""
    for part in ("dev-clean-2", "train-clean-5"):
        source = libri(part).parents[1]
        name = str(mirror.folder / "31" / part)
        shutil.make_archive(name, "gztar", source, f"LibriSpeech/{part}")
    mirror.prepare = functools.partial(quiet, "mini_librispeech", mirror=mirror.url)
    return mirror


def test_a_damaged_archive_is_refused_and_leaves_no_corpus(mini, tmp_path):
    archive = mini.folder / "31/dev-clean-2.tar.gz"
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    message = r"mirror: expected whole archives in .* Remove the dam"
    with pytest.raises(ValueError, match=message):
        mini.prepare(out=tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {".lock", "dev-clean-2.tar.gz"}


def test_a_published_corpus_is_downloaded_once_and_can_be_trained_on(mini, tmp_path):
    summary, messages = mini.prepare(out=tmp_path / "out")
    assert summary["parts"] == {"dev-clean-2": 4, "train-clean-5": 4}
    assert messages == []
    assert summary["hours"] == pytest.approx(2 * 1.8 / 3600, abs=1e-3)
    sets = corpora.load(summary["manifests"], progress=False)
    assert [len(cuts) for cuts in sets.values()] == [4, 4, 0]
    loaded_speech = Utterances.load(sets["dev"], progress=False)
    assert loaded_speech.ids == ["19-7-0000", "19-7-0001", "84-7-0000", "84-7-0001"]
    assert loaded_speech.speakers == ["19", "19", "84", "84"]
    assert loaded_speech.texts == ["hello world", "hello world again"] * 2
    assert loaded_speech.durations == pytest.approx([0.3, 0.4, 0.5, 0.6])
    # paths are absolute: lhotse reads them from anywhere
    theirs = CutSet.from_file(summary["manifests"][0])
    assert [cut.load_audio().shape[1] for cut in theirs] == [4800, 6400, 8000, 9600]
    mini.close()
    assert mini.prepare(out=tmp_path / "out") == (summary, [])
    assert len(mini.requests) == 2


def test_only_selected_parts_are_downloaded_and_unknown_ones_refused_first(
    mini, tmp_path
):
    out = tmp_path / "out"
    message = "parts: expected some of dev-clean-2, train-clean-5, got dev-clean."
    with pytest.raises(ValueError, match=message):
        mini.prepare(out=out, parts=["dev-clean"])
    assert not out.exists()
    assert not mini.requests
    summary, _ = mini.prepare(out=out, parts=["dev-clean-2"])
    assert summary["parts"] == {"dev-clean-2": 4}
    assert len(mini.requests) == 1


def test_two_runs_at_once_are_refused(mini, tmp_path):
    message = "expected a folder that no other process writes to"
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=message):
            mini.prepare(out=tmp_path)
    assert mini.prepare(out=tmp_path)[0]["utterances"] == 8


def test_digits_are_synthesised_without_a_network(a_home, monkeypatch):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    small = functools.partial(synthetic.spoken_commands, train=6, dev=3, test=3)
    monkeypatch.setattr(synthetic, "spoken_commands", small)
    summary, _ = quiet("digits")
    assert summary["out"] == str(a_home / "corpora/digits")
    assert summary["parts"] == {"train": 2, "dev": 1, "test": 1}
    for cut in itertools.chain(*corpora.load(summary["manifests"]).values()):
        assert cut.supervisions[0].custom["kind"] == "digits"


def test_a_folder_in_librispeechs_layout_may_have_any_part_names_and_missing_sounds_are_counted(
    libri, tmp_path
):
    part = libri("my-train")
    libri("dev-x")
    (part / "19" / "7" / "19-7-0001.flac").unlink()
    for folder in (part.parent, part.parent.parent):
        summary, messages = quiet(folder, out=tmp_path / "out")
        assert summary["parts"] == {"dev-x": 4, "my-train": 3}
        assert messages == ["1 left out: no sound of 19-7-0001"]
    alone, _ = quiet(part, out=tmp_path / "alone")
    assert alone["parts"] == {"my-train": 3}


def test_sound_files_with_texts_are_a_corpus_and_those_without_are_counted(
    tmp_path, speak, monkeypatch
):
    texts = {
        "train/a.wav": "one",
        "train/deep/b.flac": " two\n three ",
        "test-x/c.ogg": "four",
        "d.wav": "",
        "e.wav": None,
        "test-1.wav": "five",
        "other/f.wav": "six",
    }
    for name, text in texts.items():
        file = tmp_path / "in" / name
        speak(file, 0.3, 22_050)
        if text is not None:
            file.with_suffix(".txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    summary, messages = quiet("in", out="out")
    monkeypatch.chdir("/")
    assert summary["parts"] == {"test-x": 1, "all": 2, "train": 2}
    assert summary["out"] == str(tmp_path / "out")
    assert summary["left_out"] == 2
    omitted = [f"no text of {tmp_path}/in/{name}.wav" for name in "de"]
    assert messages == ["2 left out: " + "; ".join(omitted)]
    loaded_speech = loaded(summary["manifests"][-1])
    wanted = {"train/a": "one", "train/deep/b": "two three"}
    assert dict(zip(loaded_speech.ids, loaded_speech.texts, strict=True)) == wanted
    assert loaded_speech.durations == pytest.approx([0.3, 0.3], abs=1e-3)


def test_unreadable_files_are_listed_as_left_out(
    ordinary_folder,
):
    corpus = ordinary_folder / "in"
    corpus.mkdir()
    soundfile.write(corpus / "a.wav", np.ones(4000) / 2, 16_000)
    (corpus / "a.txt").write_text("one")
    (corpus / "talk.m4a").write_bytes(b"x")
    (corpus / "closed").mkdir(mode=0)
    summary, messages = quiet(corpus, out=ordinary_folder / "out")
    assert (summary["utterances"], summary["left_out"]) == (1, 2)
    closed = f"no permission to read {corpus}/closed"
    unknown = f"no decoder for {corpus}/talk.m4a: convert it first"
    assert messages == [f"2 left out: {closed}; {unknown}"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.wav": 0.1, "a.flac": 0.1, "a.txt": b"x"},
            r"corpus: expected one sound file of each name, got several of .*a\. Keep one",
        ),
        (
            {"a.wav": 0, "a.txt": b"x"},
            r"corpus: .*a\.wav cannot be read \(sound: expected samples, got none",
        ),
        (
            {"a.wav": b"RIFF not really", "a.txt": b"x"},
            r"corpus: .*a\.wav cannot be read",
        ),
        (
            {"a.wav": 0.1, "a.txt": b"\xff"},
            r"corpus: .*a\.wav cannot be read \('utf-8' codec",
        ),
        (
            {"a.wav": 0.1, "a.txt": b" "},
            r"corpus: expected \*\.trans\.txt, or sound files .* got none of them in .*\. Left out: no text of .*a\.wav\.",
        ),
        (
            {"p/1/2/1-2.trans.txt": b"1-2-0 A", "p/1/2/1-2-0.flac": b"x"},
            r"corpus: .*p cannot be read \(.*1-2-0",
        ),
        (
            {"p/1/2/1-2.trans.txt": b"1-2-0", "p/1/2/1-2-0.flac": b"x"},
            r"corpus: .*p cannot be read \(not enough .*\)\. Repair or",
        ),
        (
            {"7/84-7.trans.txt": b"84-7-0 A"},
            "corpus: expected parts of different names, each speaker/chapter",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, speak, files, message
):
    for name, content in files.items():
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            speak(file, content)
    with pytest.raises(ValueError, match=message) as error:
        quiet(tmp_path / "in", out=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_truncated_sound_is_refused_before_anything_is_written(libri, tmp_path):
    folder = libri("some")
    (cut_short, *_) = sorted(folder.rglob("*.flac"))
    cut_short.write_bytes(cut_short.read_bytes()[: cut_short.stat().st_size * 9 // 10])
    message = rf"audio: .* a part of {cut_short.name}\. The file is truncated"
    with pytest.raises(ValueError, match=message):
        quiet(folder.parent, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_is_not_a_corpus(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="out: expected a folder"):
        quiet(tmp_path, out=tmp_path / "notes.txt")
