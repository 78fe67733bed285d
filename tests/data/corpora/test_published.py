import fcntl
import functools
import gc
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import CutSet

from asrkit.data import Utterances, corpora
from asrkit.data.corpora import synthetic
from asrkit.data.corpora.published import prepare_corpora

ROOT = Path(corpora.__file__).resolve().parents[3]


def quiet(corpus, **how):
    """`prepare_corpora` without bars; what it says is in `said`."""
    said = []
    return prepare_corpora(corpus, progress=False, say=said.append, **how), said


@pytest.fixture(autouse=True)
def sockets_of_lhotse():
    """lhotse leaves the socket of a failed download open: it is collected here."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def mini(mirror, libri):
    """`mirror` with a small mini_librispeech on it."""
    for part in ("dev-clean-2", "train-clean-5"):
        mirror.files[f"/31/{part}.tar.gz"] = libri(part)[1]
    return mirror


def test_a_damaged_archive_is_refused_and_leaves_nothing_that_looks_whole(
    mini, tmp_path
):
    whole = mini.files["/31/dev-clean-2.tar.gz"]
    mini.files["/31/dev-clean-2.tar.gz"] = whole[: len(whole) // 2]
    with pytest.raises(
        ValueError, match=r"mirror: expected whole archives in .* Remove the dam"
    ):
        quiet("mini_librispeech", out=tmp_path / "out", mirror=mini.url)
    assert not list((tmp_path / "out").rglob(".completed"))
    assert not list((tmp_path / "out").rglob("cuts*"))


def test_a_mirror_that_does_not_answer_is_an_error_of_one_line(mirror, tmp_path):
    with pytest.raises(
        ConnectionError, match=r"^mirror: expected an answer from .*404"
    ) as error:
        quiet("mini_librispeech", out=tmp_path / "out", mirror=mirror.url)
    assert "\n" not in str(error.value)


def test_a_published_corpus_is_loaded_once_and_becomes_cuts_that_train_takes(
    mini, tmp_path
):
    summary, said = quiet("mini_librispeech", out=tmp_path / "out", mirror=mini.url)
    assert said == []
    assert (
        summary["parts"] == {"dev-clean-2": 4, "train-clean-5": 4}
        and summary["utterances"] == 8
    )
    assert (
        summary["hours"] == pytest.approx(2 * 1.8 / 3600, abs=1e-3)
        and summary["left_out"] == 0
    )
    sets = corpora.load(summary["manifests"], progress=False)
    assert {split: len(cuts) for split, cuts in sets.items()} == {
        "train": 4,
        "dev": 4,
        "test": 0,
    }
    held = Utterances.load(sets["dev"], progress=False)
    assert (
        list(held.ids) == ["19-7-0000", "19-7-0001", "84-7-0000", "84-7-0001"]
        and held.speakers[3] == "84"
    )
    assert held.texts[:2] == ["hello world", "hello world again"] and held.durations[
        :2
    ] == pytest.approx([0.3, 0.4])
    theirs = CutSet.from_file(
        summary["manifests"][0]
    )  # paths are absolute: lhotse reads them from anywhere
    assert sum(cut.load_audio().shape[1] for cut in theirs) == pytest.approx(
        1.8 * 16_000
    )
    asked = len(mini.asked)
    mini.close()
    assert (
        quiet("mini_librispeech", out=tmp_path / "out", mirror=mini.url)
        == (summary, [])
        and len(mini.asked) == asked == 2
    )


def test_only_the_parts_asked_for_are_loaded_and_unknown_ones_refused_before_anything_is(
    mini, tmp_path
):
    with pytest.raises(
        ValueError,
        match="parts: expected some of dev-clean-2, train-clean-5, got dev-clean.",
    ):
        quiet(
            "mini_librispeech",
            out=tmp_path / "out",
            mirror=mini.url,
            parts=["dev-clean"],
        )
    assert not (tmp_path / "out").exists() and not mini.asked
    summary, _ = quiet(
        "mini_librispeech", out=tmp_path / "out", mirror=mini.url, parts=["dev-clean-2"]
    )
    assert summary["parts"] == {"dev-clean-2": 4} and len(mini.asked) == 1


def test_two_at_once_are_kept_apart(mini, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            ValueError, match="expected a folder that nobody else writes to now"
        ):
            quiet("mini_librispeech", out=tmp_path, mirror=mini.url)
    assert (
        quiet("mini_librispeech", out=tmp_path, mirror=mini.url)[0]["utterances"] == 8
    )


def test_digits_are_spoken_here_without_a_network(a_home, monkeypatch):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    small = functools.partial(synthetic.spoken_commands, train=6, dev=3, test=3)
    monkeypatch.setattr(synthetic, "spoken_commands", small)
    summary, _ = quiet("digits")
    assert summary["parts"] == {"train": 2, "dev": 1, "test": 1} and summary[
        "out"
    ] == str(a_home / "corpora" / "digits")
    sets = corpora.load(summary["manifests"], progress=False)
    assert {split: len(cuts) for split, cuts in sets.items()} == {
        "train": 2,
        "dev": 1,
        "test": 1,
    }
    assert {cut.supervisions[0].custom["kind"] for cut in sets["train"]} == {"digits"}
    assert quiet("spoken_commands")[0]["utterances"] == 12


def test_a_folder_in_librispeechs_layout_needs_no_official_part_names_and_lines_without_sound_are_counted(
    libri, tmp_path
):
    part, _ = libri("my-train")
    libri("dev-x")
    (part / "19" / "7" / "19-7-0001.flac").unlink()
    for folder in (part.parent, part.parent.parent):
        summary, said = quiet(folder, out=tmp_path / "out")
        assert (
            summary["parts"] == {"dev-x": 4, "my-train": 3} and summary["left_out"] == 1
        )
        assert said == ["1 left out: no sound of 19-7-0001"]
    alone, _ = quiet(part, out=tmp_path / "alone")
    assert alone["parts"] == {"my-train": 3}
    with pytest.raises(
        ValueError,
        match="corpus: expected parts of different names, each speaker/chapter",
    ):
        quiet(part / "84", out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_sound_files_with_a_text_beside_them_are_a_corpus_and_those_without_are_counted(
    tmp_path, speak, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    texts = {
        "train/a.wav": "one",
        "train/deep/b.flac": " two\n three ",
        "test-x/c.ogg": "four",
        "d.wav": "",
        "e.wav": None,
    }
    texts |= {"test-1.wav": "five", "other/f.wav": "six"}
    for name, text in texts.items():
        speak(tmp_path / "in" / name, 0.3, 22_050)
        if text is not None:
            (tmp_path / "in" / name).with_suffix(".txt").write_text(text)
    summary, said = quiet("in", out="out")
    assert (
        summary["parts"] == {"test-x": 1, "all": 2, "train": 2}
        and summary["left_out"] == 2
    )
    assert summary["out"] == str(tmp_path / "out")
    monkeypatch.chdir("/")
    assert said == [
        f"2 left out: no text of {tmp_path}/in/d.wav; no text of {tmp_path}/in/e.wav"
    ]
    held = Utterances.load(
        corpora.from_manifest(summary["manifests"][-1]), progress=False
    )
    assert dict(zip(held.ids, held.texts, strict=True)) == {
        "train/a": "one",
        "train/deep/b": "two three",
    }
    assert held.durations == pytest.approx([0.3, 0.3], abs=1e-3)
    (tmp_path / "in" / "train" / "a.wav").write_bytes(b"RIFF not really")
    with pytest.raises(ValueError, match=r"corpus: .*train/a\.wav cannot be read"):
        quiet(tmp_path / "in", out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


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
    no_permission = f"no permission to read {corpus}/closed"
    no_decoder = f"no decoder for {corpus}/talk.m4a: convert it first"
    assert said == [f"2 left out: {no_permission}; {no_decoder}"]


@pytest.mark.parametrize(("files", "said"), [
    ({"a.wav": 0.1, "a.flac": 0.1, "a.txt": b"x"}, r"corpus: expected one sound file of each name, got several of .*a\. Keep one"),
    ({"a.wav": 0, "a.txt": b"x"}, r"corpus: .*a\.wav cannot be read \(sound: expected samples, got none"),
    ({"a.wav": 0.1, "a.txt": b"\xff"}, r"corpus: .*a\.wav cannot be read \('utf-8' codec"),
    ({"a.wav": 0.1, "a.txt": b" "}, r"corpus: expected \*\.trans\.txt, or sound files .* got none of them in .*\. Left out: no text of .*a\.wav\."),
    ({"p/1/2/1-2.trans.txt": b"1-2-0 A", "p/1/2/1-2-0.flac": b"x"}, r"corpus: .*p cannot be read \(.*1-2-0"),
    ({"p/1/2/1-2.trans.txt": b"1-2-0", "p/1/2/1-2-0.flac": b"x"}, r"corpus: .*p cannot be read \(not enough .*\)\. Mend or"),
])  # fmt: skip
def test_a_damaged_folder_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, speak, files, said
):
    for name, content in files.items():
        file = tmp_path / "in" / name
        if isinstance(content, bytes):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        else:
            speak(file, content)
    with pytest.raises(ValueError, match=said) as error:
        quiet(tmp_path / "in", out=tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_sound_that_is_cut_short_is_refused_before_anything_is_written(
    libri, tmp_path
):
    folder, _ = libri("some")
    (cut_short, *_) = sorted(folder.rglob("*.flac"))
    cut_short.write_bytes(cut_short.read_bytes()[: cut_short.stat().st_size * 9 // 10])
    with pytest.raises(
        ValueError,
        match=rf"audio: .* a part of {cut_short.name}\. The file is truncated",
    ):
        quiet(folder.parent, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_none_of_these_is_refused_and_so_is_what_is_no_folder(
    tmp_path,
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("hello")
    with pytest.raises(
        ValueError,
        match=r"corpus: expected \*\.trans\.txt, or sound files .* got none of them in ",
    ):
        quiet(tmp_path / "in", out=tmp_path / "out")
    with pytest.raises(
        ValueError, match="corpus: expected digits, .* or a folder, got 'nowhere'"
    ):
        quiet("nowhere", out=tmp_path / "out")
    with pytest.raises(ValueError, match="out: expected a folder"):
        quiet(tmp_path / "in", out=tmp_path / "in" / "notes.txt")
    assert not (tmp_path / "out").exists()


def test_real_recordings_become_cuts(shared_speech, tmp_path):
    rows = [
        json.loads(line)
        for line in (shared_speech / "manifests/librispeech.jsonl")
        .read_text()
        .splitlines()
    ][:5]
    (tmp_path / "in").mkdir()
    for row in rows:
        (tmp_path / "in" / f"{row['id']}.flac").symlink_to(shared_speech / row["audio"])
        (tmp_path / "in" / f"{row['id']}.txt").write_text(row["text"])
    summary, _ = quiet(tmp_path / "in", out=tmp_path / "out", jobs=1)
    held = Utterances.load(
        corpora.from_manifest(summary["manifests"][0]), progress=False
    )
    assert sorted(zip(held.ids, held.texts, strict=True)) == sorted(
        (row["id"], row["text"]) for row in rows
    )
    assert sum(held.durations) == pytest.approx(
        sum(row["duration"] for row in rows), abs=0.01
    )
