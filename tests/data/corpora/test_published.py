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


def quiet(corpus, **how):
    """`prepare_corpora` without bars; what it says is in `said`."""
    said = []
    return prepare_corpora(corpus, progress=False, say=said.append, **how), said


def loaded(manifest):
    return Utterances.load(corpora.from_manifest(manifest), progress=False)


@pytest.fixture(autouse=True)
def sockets_of_lhotse():
    """lhotse leaves the socket of a failed download open: it is collected here."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def mini(mirror, libri):
    """`mirror` with a small mini_librispeech on it; `prepare` loads from there."""
    for part in ("dev-clean-2", "train-clean-5"):
        source = libri(part).parents[1]
        name = str(mirror.folder / "31" / part)
        shutil.make_archive(name, "gztar", source, f"LibriSpeech/{part}")
    mirror.prepare = functools.partial(quiet, "mini_librispeech", mirror=mirror.url)
    return mirror


def test_a_damaged_archive_is_refused_and_leaves_nothing_that_looks_whole(
    mini, tmp_path
):
    archive = mini.folder / "31/dev-clean-2.tar.gz"
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    said = r"mirror: expected whole archives in .* Remove the dam"
    with pytest.raises(ValueError, match=said):
        mini.prepare(out=tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {".lock", "dev-clean-2.tar.gz"}


def test_a_published_corpus_is_loaded_once_and_becomes_cuts_that_train_takes(
    mini, tmp_path
):
    summary, said = mini.prepare(out=tmp_path / "out")
    assert summary["parts"] == {"dev-clean-2": 4, "train-clean-5": 4}
    assert said == []
    assert summary["hours"] == pytest.approx(2 * 1.8 / 3600, abs=1e-3)
    sets = corpora.load(summary["manifests"], progress=False)
    assert [len(cuts) for cuts in sets.values()] == [4, 4, 0]
    held = Utterances.load(sets["dev"], progress=False)
    assert held.ids == ["19-7-0000", "19-7-0001", "84-7-0000", "84-7-0001"]
    assert held.speakers == ["19", "19", "84", "84"]
    assert held.texts == ["hello world", "hello world again"] * 2
    assert held.durations == pytest.approx([0.3, 0.4, 0.5, 0.6])
    # paths are absolute: lhotse reads them from anywhere
    theirs = CutSet.from_file(summary["manifests"][0])
    assert [cut.load_audio().shape[1] for cut in theirs] == [4800, 6400, 8000, 9600]
    mini.close()
    assert mini.prepare(out=tmp_path / "out") == (summary, [])
    assert len(mini.asked) == 2


def test_only_the_parts_asked_for_are_loaded_and_unknown_ones_refused_before_anything_is(
    mini, tmp_path
):
    out = tmp_path / "out"
    said = "parts: expected some of dev-clean-2, train-clean-5, got dev-clean."
    with pytest.raises(ValueError, match=said):
        mini.prepare(out=out, parts=["dev-clean"])
    assert not out.exists()
    assert not mini.asked
    summary, _ = mini.prepare(out=out, parts=["dev-clean-2"])
    assert summary["parts"] == {"dev-clean-2": 4}
    assert len(mini.asked) == 1


def test_two_at_once_are_kept_apart(mini, tmp_path):
    said = "expected a folder that no other process writes to"
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=said):
            mini.prepare(out=tmp_path)
    assert mini.prepare(out=tmp_path)[0]["utterances"] == 8


def test_digits_are_spoken_here_without_a_network(a_home, monkeypatch):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    small = functools.partial(synthetic.spoken_commands, train=6, dev=3, test=3)
    monkeypatch.setattr(synthetic, "spoken_commands", small)
    summary, _ = quiet("digits")
    assert summary["out"] == str(a_home / "corpora/digits")
    assert summary["parts"] == {"train": 2, "dev": 1, "test": 1}
    for cut in itertools.chain(*corpora.load(summary["manifests"]).values()):
        assert cut.supervisions[0].custom["kind"] == "digits"


def test_a_folder_in_librispeechs_layout_needs_no_official_part_names_and_lines_without_sound_are_counted(
    libri, tmp_path
):
    part = libri("my-train")
    libri("dev-x")
    (part / "19" / "7" / "19-7-0001.flac").unlink()
    for folder in (part.parent, part.parent.parent):
        summary, said = quiet(folder, out=tmp_path / "out")
        assert summary["parts"] == {"dev-x": 4, "my-train": 3}
        assert said == ["1 left out: no sound of 19-7-0001"]
    alone, _ = quiet(part, out=tmp_path / "alone")
    assert alone["parts"] == {"my-train": 3}


def test_sound_files_with_a_text_beside_them_are_a_corpus_and_those_without_are_counted(
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
    summary, said = quiet("in", out="out")
    monkeypatch.chdir("/")
    assert summary["parts"] == {"test-x": 1, "all": 2, "train": 2}
    assert summary["out"] == str(tmp_path / "out")
    assert summary["left_out"] == 2
    left = [f"no text of {tmp_path}/in/{name}.wav" for name in "de"]
    assert said == ["2 left out: " + "; ".join(left)]
    held = loaded(summary["manifests"][-1])
    wanted = {"train/a": "one", "train/deep/b": "two three"}
    assert dict(zip(held.ids, held.texts, strict=True)) == wanted
    assert held.durations == pytest.approx([0.3, 0.3], abs=1e-3)


def test_what_a_folder_holds_and_cannot_be_read_is_listed_among_what_is_left_out(
    ordinary_folder,
):
    corpus = ordinary_folder / "in"
    corpus.mkdir()
    soundfile.write(corpus / "a.wav", np.ones(4000) / 2, 16_000)
    (corpus / "a.txt").write_text("one")
    (corpus / "talk.m4a").write_bytes(b"x")
    (corpus / "closed").mkdir(mode=0)
    summary, said = quiet(corpus, out=ordinary_folder / "out")
    assert (summary["utterances"], summary["left_out"]) == (1, 2)
    closed = f"no permission to read {corpus}/closed"
    unknown = f"no decoder for {corpus}/talk.m4a: convert it first"
    assert said == [f"2 left out: {closed}; {unknown}"]


@pytest.mark.parametrize(
    ("files", "said"),
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
            r"corpus: .*p cannot be read \(not enough .*\)\. Mend or",
        ),
        (
            {"7/84-7.trans.txt": b"84-7-0 A"},
            "corpus: expected parts of different names, each speaker/chapter",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, speak, files, said
):
    for name, content in files.items():
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            speak(file, content)
    with pytest.raises(ValueError, match=said) as error:
        quiet(tmp_path / "in", out=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_sound_that_is_cut_short_is_refused_before_anything_is_written(
    libri, tmp_path
):
    folder = libri("some")
    (cut_short, *_) = sorted(folder.rglob("*.flac"))
    cut_short.write_bytes(cut_short.read_bytes()[: cut_short.stat().st_size * 9 // 10])
    said = rf"audio: .* a part of {cut_short.name}\. The file is truncated"
    with pytest.raises(ValueError, match=said):
        quiet(folder.parent, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="out: expected a folder"):
        quiet(tmp_path, out=tmp_path / "notes.txt")
