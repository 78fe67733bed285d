import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asrkit.data import Utterances, corpora
from asrkit.data.batching.statistics import read_lengths
from asrkit.data.corpora import synthetic
from asrkit.data.corpora.folders import read_folder

SIZES = {"train": 18, "dev": 6, "test": 6}
ROOT = Path(corpora.__file__).resolve().parents[3]


def corpus_in(home):
    """The folder of the only corpus that is whole."""
    (folder,) = (home / "corpora").glob("[!.]*")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A small corpus, the folder it lies in, and the folder's home."""
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("ASRKIT_HOME", str(home))
        cuts = corpora.spoken_commands(**SIZES, progress=False)
        yield cuts, corpus_in(home)


def python(code, home, *, wait=True):
    """A Python process with `code`, in its own session (so that it can be killed with its children)."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "ASRKIT_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return (*process.communicate(timeout=120), process.returncode) if wait else process


def speak(jobs, folder):
    """Hash of each job's WAV, by id."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run(
        [sys.executable, synthetic.WORKER, folder / "jobs.json", folder], check=True
    )
    return {
        job["id"]: hashlib.sha256(
            (folder / f"{job['id']}.wav").read_bytes()
        ).hexdigest()
        for job in jobs
    }


def test_an_utterance_depends_on_its_job_alone_whatever_came_before_and_in_which_process(
    tmp_path,
):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    jobs = synthetic._jobs({"train": 12})
    there = speak(jobs, tmp_path / "there")
    assert there == speak(jobs[::-1], tmp_path / "back")
    assert {jobs[5]["id"]: there[jobs[5]["id"]]} == speak([jobs[5]], tmp_path / "alone")
    assert len(set(there.values())) == 12
    other = speak(
        [{**job, "seed": job["seed"] + 1} for job in jobs], tmp_path / "other"
    )
    assert any(
        other[name] != there[name] for name in there
    )  # not all: a voice without breath draws nothing at random


def test_every_voice_exists_and_has_a_sound_of_its_own(tmp_path):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    voices = [
        (accent, variant)
        for accent in synthetic.ACCENTS
        for variant in synthetic.VARIANTS
    ]
    jobs = [
        {
            "id": f"{n}",
            "text": "turn on the kitchen light",
            "voice": v,
            "variant": w,
            "seed": 1,
        }
        for n, (v, w) in enumerate(voices)
    ]
    assert len(set(speak(jobs, tmp_path / "voices").values())) == len(voices) == 112


def test_voices_and_long_texts_are_in_one_split_only():
    jobs = synthetic._jobs({"train": 1500, "dev": 300, "test": 300})

    def of(split, *keys):
        rows = [job for job in jobs if job["id"].startswith(split)]
        if keys == ("text",):
            rows = [
                job
                for job in rows
                if "digits" not in job["id"] or job["text"].count(" ") > 2
            ]
        return {tuple(job[key] for key in keys) for job in rows}

    for keys in (("voice", "variant"), ("text",)):
        train, dev, test = (of(split, *keys) for split in ("train", "dev", "test"))
        assert (
            train and dev and test and not (train & dev or train & test or dev & test)
        )
    assert len(of("train", "voice", "variant")) >= 60
    assert len({job["id"] for job in jobs}) == len(jobs) and len(
        {job["seed"] for job in jobs}
    ) > 0.99 * len(jobs)
    assert 70 <= len({word for job in jobs for word in job["text"].split()}) <= 80


def test_a_larger_corpus_begins_with_the_smaller_one():
    assert synthetic._jobs({"train": 30})[:10] == synthetic._jobs({"train": 10})


def test_cuts_are_16_khz_with_text_speaker_and_kind_and_can_be_heard(built):
    cuts, _ = built
    assert {split: len(some) for split, some in cuts.items()} == SIZES
    for cut in (cut for some in cuts.values() for cut in some):
        (said,) = cut.supervisions
        assert (
            cut.sampling_rate == 16_000
            and said.text
            and said.custom["kind"] in corpora.KINDS
        )
        assert said.speaker.partition("+")[0] in synthetic.ACCENTS
        audio = cut.load_audio()
        assert audio.shape == (1, cut.num_samples) and np.sqrt(np.mean(audio**2)) > 0.01
        assert 0.2 < cut.duration < 12


def test_a_second_call_reads_what_the_first_one_built_and_two_builds_are_equal(
    built, a_home
):
    _, folder = built
    corpora.spoken_commands(**SIZES, workers=1, progress=False)
    again = corpus_in(a_home)
    assert audio_of(again) == audio_of(folder)
    assert again.name == folder.name
    before = (again / "cuts_test.jsonl.gz").stat().st_mtime_ns
    corpora.spoken_commands(**SIZES, progress=False)
    assert (again / "cuts_test.jsonl.gz").stat().st_mtime_ns == before


def audio_of(folder):
    """Bytes of each sound file of a corpus, by name."""
    return {path.name: path.read_bytes() for path in (folder / "audio").iterdir()}


def test_one_kind_is_what_the_whole_corpus_has_of_it_and_nothing_else_is_synthesised(
    built, a_home
):
    cuts, folder = built
    digits = corpora.spoken_commands(**SIZES, kinds=["digits"], progress=False)
    for split, some in digits.items():
        wanted = [
            cut for cut in cuts[split] if cut.supervisions[0].custom["kind"] == "digits"
        ]
        assert [cut.id for cut in some] == [cut.id for cut in wanted] and len(
            wanted
        ) > 0
        assert [cut.supervisions for cut in some] == [
            cut.supervisions for cut in wanted
        ]
    alone = corpus_in(a_home)
    whole = audio_of(folder)
    assert audio_of(alone) == {
        name: whole[name] for name in whole if "-digits-" in name
    }


def test_a_corpus_can_be_moved_and_read_from_its_own_manifest(built, tmp_path):
    _, folder = built
    moved = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", folder, moved], check=True)
    cuts = corpora.from_manifest(moved / "cuts_test.jsonl.gz")
    assert [cut.supervisions[0].text for cut in cuts] == [
        cut.supervisions[0].text for cut in built[0]["test"]
    ]
    assert all(
        str(cut.recording.sources[0].source).startswith(str(moved)) for cut in cuts
    )
    assert Utterances.load(cuts, progress=False).total_seconds == pytest.approx(
        sum(cut.duration for cut in cuts)
    )


def test_two_processes_that_build_at_once_both_end_right_and_kill_9_leaves_nothing_that_counts(
    tmp_path,
):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    sizes = "train=200, dev=3, test=3, progress=False"
    code = f"from asrkit.data import corpora; print(len(corpora.spoken_commands({sizes})['train']))"
    killed = python(code, tmp_path, wait=False)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("corpora/.*/*/*.wav")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    left = list((tmp_path / "corpora").iterdir())
    assert left and all(path.name.startswith(".") for path in left)
    for process in [python(code, tmp_path, wait=False) for _ in range(2)]:
        out, error = process.communicate(timeout=120)
        assert (out.strip(), process.returncode) == ("200", 0), error
    assert len(audio_of(corpus_in(tmp_path))) == 206


def test_without_espeak_the_package_imports_and_the_corpus_says_in_one_line_what_to_do(
    tmp_path,
):
    block = (
        "import sys, importlib.metadata as m; version = m.version\n"
        "def none(name):\n"
        "    if name.replace('_', '-') == 'espeakng-loader': raise m.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "m.version = none; sys.modules['espeakng_loader'] = None\n"
        "import asrkit.data; from asrkit.data import corpora\n"
        "try: corpora.spoken_commands(progress=False)\n"
        "except RuntimeError as error: print(error)\n"
    )
    out, error, status = python(block, tmp_path)
    assert status == 0, error
    assert re.fullmatch(
        r'spoken_commands: .* not installed\. Run pip install -e "\.\[synth\]" in the checkout, or make report\.\n',
        out,
    )


@pytest.mark.parametrize("name", ["fsdd", "librispeech", "librivox"])
def test_real_recordings_load_at_16_khz_with_their_texts_and_durations(
    shared_speech, name
):
    lines = [
        json.loads(line)
        for line in (shared_speech / f"manifests/{name}.jsonl").read_text().splitlines()
    ][:40]
    cuts = corpora.from_manifest(shared_speech / f"manifests/{name}.jsonl").subset(
        first=40
    )
    held = Utterances.load(cuts, progress=False)
    assert list(held.texts) == [line["text"] for line in lines] and list(held.ids) == [
        line["id"] for line in lines
    ]
    assert list(held.speakers) == [line["speaker"] for line in lines]
    assert held.durations == pytest.approx(
        [line["duration"] for line in lines], abs=0.01
    )
    assert all(waveform.abs().max() > 100 for waveform in held.waveforms)


def tone(path, rate_hz=8000, channels=1, seconds=0.5):
    """A WAV file of a loud 440 Hz tone."""
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.stack([wave] * channels, axis=1), rate_hz)


def manifest(folder, *rows):
    """A manifest with `rows` in a folder of its own beside the audio."""
    (folder / "manifests").mkdir()
    path = folder / "manifests/m.jsonl"
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


@pytest.mark.parametrize(
    "rate_hz, channels", [(8000, 1), (16_000, 1), (44_100, 2), (22_050, 2)]
)
def test_any_rate_and_channel_count_becomes_16_khz_mono(tmp_path, rate_hz, channels):
    tone(tmp_path / "audio/a.wav", rate_hz, channels)
    cuts = corpora.from_manifest(
        manifest(tmp_path, {"audio": "audio/a.wav", "text": "hello"})
    )
    held = Utterances.load(cuts, progress=False)
    audio = held.waveforms[0].numpy() / 32768
    assert (
        list(held.texts) == ["hello"]
        and audio.shape == (8000,)
        and cuts[0].sampling_rate == 16_000
    )
    assert np.argmax(np.abs(np.fft.rfft(audio))) == 220 and np.abs(
        audio[2000:6000]
    ).max() == pytest.approx(0.5, abs=0.02)


def test_a_folder_of_recordings_and_supervisions_is_cut_at_its_supervisions(tmp_path):
    from lhotse import (
        AudioSource,
        Recording,
        RecordingSet,
        SupervisionSegment,
        SupervisionSet,
    )

    tone(tmp_path / "a.wav", 16_000, seconds=2.0)
    recording = Recording("r", [AudioSource("file", [0], "a.wav")], 16_000, 32_000, 2.0)
    RecordingSet.from_recordings([recording]).to_file(
        tmp_path / "x_recordings.jsonl.gz"
    )
    said = [
        SupervisionSegment(f"s{n}", "r", n, 0.5, text=f"text {n}", speaker="me")
        for n in range(2)
    ]
    SupervisionSet.from_segments(said).to_file(tmp_path / "x_supervisions.jsonl.gz")
    held = Utterances.load(corpora.from_manifest(tmp_path), progress=False)
    assert list(held.texts) == ["text 0", "text 1"] and held.durations == [0.5, 0.5]


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"audio": "audio/none.wav", "text": "a"},
            r"expected audio in .* got no file 'audio/none.wav'",
        ),
        (
            {"audio": "audio/a.wav", "text": ""},
            "expected text for each utterance, got none for 'audio/a.wav'",
        ),
        ({"audio": "audio/a.wav", "text": 5}, "expected str instance, int found"),
        (
            {"audio": "audio/a.wav"},
            "lines with audio or duration, and text, got KeyError",
        ),
        ({"text": "a"}, "lines with audio or duration, and text, got KeyError"),
        ("{broken\n", "lines with audio or duration, and text, got"),
        ("3\n", "lines with audio or duration, and text, got"),
        ({"audio": "audio/not.wav", "text": "a"}, "audio"),
        ("", "expected at least one utterance, got none"),
    ],
)
def test_a_manifest_that_cannot_serve_is_refused_in_one_line(tmp_path, row, message):
    tone(tmp_path / "audio/a.wav")
    (tmp_path / "audio/not.wav").write_text("not audio")
    with pytest.raises(ValueError, match=message) as raised:
        corpora.from_manifest(manifest(tmp_path, row))
    assert str(raised.value).startswith("manifest: expected") and "\n" not in str(
        raised.value
    )


def test_a_missing_manifest_and_an_empty_folder_are_refused_in_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"manifest: expected a file or a folder, got .*none\.jsonl"
    ):
        corpora.from_manifest(tmp_path / "none.jsonl")
    with pytest.raises(
        ValueError, match="manifest: expected at least one utterance, got none"
    ):
        corpora.from_manifest(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"kinds": ["numbers"]},
            r"kinds: expected some of digits, commands, sentences, got \['nu",
        ),
    ],
)
def test_wrong_arguments_of_the_synthetic_corpus_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        corpora.spoken_commands(**wrong, progress=False)


def test_resampling_to_flac_keeps_pitch_loudness_and_length(tmp_path):
    tone(tmp_path / "a.wav", 22_050, seconds=1.0)
    samples = synthetic._to_flac(tmp_path / "a.wav", tmp_path / "a.flac")
    audio, rate_hz = soundfile.read(tmp_path / "a.flac")
    assert (
        rate_hz == 16_000
        and len(audio) == samples
        and 16_000 <= samples < 16_000 + 8 * 320
    )
    seconds = np.arange(1000, 15_000) / 16_000
    assert (
        np.abs(audio[1000:15_000] - 0.5 * np.sin(2 * np.pi * 440 * seconds)).max()
        < 2e-3
    )


def test_several_corpora_mix_and_one_speaker_can_be_held_out(tmp_path):
    rows = []
    for n, speaker in enumerate(["ann", "bob", "ann", "bob"]):
        tone(tmp_path / f"audio/{n}.wav")
        rows.append(
            {
                "audio": f"audio/{n}.wav",
                "text": "one",
                "speaker": speaker,
                "split": "test-other" if n == 2 else "train",
            }
        )
    path = manifest(tmp_path, *rows)
    assert {split: len(cuts) for split, cuts in corpora.load([path]).items()} == {
        "train": 3,
        "dev": 0,
        "test": 1,
    }
    held_out = corpora.load([path, path], hold_out="bob")
    assert {split: {cut.supervisions[0].speaker for cut in cuts} for split, cuts in held_out.items()} == {
        "train": {"ann"}, "dev": set(), "test": {"bob"},
    }  # fmt: skip
    with pytest.raises(
        ValueError,
        match="hold_out: expected a speaker of a manifest, such as ann, bob, got 'eve'",
    ):
        corpora.load([path], hold_out="eve")


def test_a_worker_that_fails_stops_the_build_with_its_reason_and_leaves_nothing(a_home):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    job = {**synthetic._jobs({"train": 1})[0], "voice": "en-gb"}
    with pytest.raises(
        RuntimeError,
        match=r"exit status 1: RuntimeError: espeak-ng has no voice 'en-gb",
    ):
        synthetic._build(a_home / "corpora/x", [job], 2, False)
    assert not list((a_home / "corpora").iterdir())


@pytest.mark.parametrize("damage", ["cut short", "nan"])
def test_sound_that_cannot_be_read_is_refused_by_its_id(tmp_path, damage):
    noise = np.random.default_rng(0).normal(size=64_000) * 0.1
    noise[5] = np.nan if damage == "nan" else 0
    path = tmp_path / ("a.wav" if damage == "nan" else "a.flac")
    soundfile.write(
        path, noise, 16_000, **({"subtype": "FLOAT"} if damage == "nan" else {})
    )
    path.write_bytes(path.read_bytes()[: None if damage == "nan" else 30_000])
    cuts = corpora.from_manifest(
        manifest(tmp_path, {"audio": path.name, "text": "x", "id": "mine"})
    )
    with pytest.raises(ValueError, match="^cuts: .*'mine'") as caught:
        Utterances.load(cuts, progress=False)
    assert "\n" not in str(caught.value)


def test_speakers_and_splits_may_be_numbers_null_or_capitalised(tmp_path):
    rows = [
        {"speaker": 3},
        {"speaker": "x", "split": None},
        {"speaker": None, "split": "Test"},
    ]
    for n in range(3):
        tone(tmp_path / f"{n}.wav")
    path = manifest(
        tmp_path,
        *({"audio": f"{n}.wav", "text": "a"} | row for n, row in enumerate(rows)),
    )
    assert {split: len(cuts) for split, cuts in corpora.load([path]).items()} == {
        "train": 2,
        "dev": 0,
        "test": 1,
    }
    assert [
        cut.supervisions[0].speaker
        for cut in corpora.load([path], hold_out="3")["test"]
    ] == ["3"]


@pytest.mark.parametrize("dot", ["", "./"])
def test_lhotse_cuts_with_relative_audio_are_read_from_beside_their_manifest(
    tmp_path, dot
):
    from lhotse import CutSet, Recording, SupervisionSegment

    tone(tmp_path / "wav/1.wav")
    recording = Recording.from_file(tmp_path / "wav/1.wav", recording_id="r")
    recording.sources[0].source = f"{dot}wav/1.wav"
    cut = recording.to_cut()
    cut.supervisions = [
        SupervisionSegment("s", "r", 0, cut.duration, text="one", speaker="ann")
    ]
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    (found,) = corpora.from_manifest(tmp_path / "cuts.jsonl")
    assert found.load_audio().shape[1] == found.num_samples


@pytest.mark.parametrize("suffix, subtype", [
    ("wav", "PCM_16"), ("aiff", "PCM_16"), ("au", "PCM_16"), ("ogg", "VORBIS"), ("ogg", "OPUS"), ("flac", "PCM_16"), ("mp3", "MPEG_LAYER_III"),
])  # fmt: skip
def test_training_refuses_a_sound_that_is_cut_short_with_its_whole_text(
    tmp_path, suffix, subtype
):
    path = tmp_path / f"a.{suffix}"
    noise = np.random.default_rng(0).normal(size=64_000) * 0.1
    soundfile.write(path, noise, 16_000, subtype=subtype)
    (tmp_path / "a.txt").write_text("a whole text")
    listed = manifest(
        tmp_path, {"audio": path.name, "text": "a whole text", "id": "mine"}
    )
    assert len(Utterances.load(corpora.from_manifest(listed), progress=False)) == 1
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="cuts: 'mine' cannot be read"):
        Utterances.load(corpora.from_manifest(listed), progress=False)
    with pytest.raises(ValueError, match="corpus: .* cannot be read .*truncated"):
        read_folder(tmp_path, 1, False)


def test_manifests_of_nemo_are_read_with_blank_lines_and_a_byte_order_mark(tmp_path):
    tone(tmp_path / "a.wav", 16_000, seconds=2.0)
    rows = [
        {"audio_filepath": "a.wav", "duration": 2.0, "text": "one"},
        {"audio_filepath": "a.wav", "duration": 0.5, "offset": 1.0, "text": "two"},
        {"audio_filepath": str(tmp_path / "a.wav"), "text": "three"},
    ]
    path = tmp_path / "m.jsonl"
    lines = ["", *(json.dumps(row) for row in rows), "  ", ""]
    path.write_text("\r\n\n".join(lines), encoding="utf-8-sig")
    cuts = corpora.from_manifest(path)
    assert [cut.start for cut in cuts] == [0, 1.0, 0]
    held = Utterances.load(cuts, progress=False)
    assert list(held.texts) == ["one", "two", "three"] and held.durations == [
        2.0,
        0.5,
        2.0,
    ]
    assert read_lengths(path).seconds.tolist() == [2.0, 0.5, 2.0]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken", r"got JSONDecodeError: Expecting .* at .*m.jsonl:3\."),
        ('{"text": "x"}', r"KeyError: 'audio' at .*m.jsonl:3\."),
        ('{"audio": "b.wav", "text": "x"}', r"no file 'b.wav'.* See .*m.jsonl:3\."),
        (
            '{"audio_filepath": "a.wav", "text": "x", "offset": 9}',
            r"got 9.0 and None for .* See .*:3\.",
        ),
        (
            '{"audio_filepath": "a.wav", "text": "x", "duration": -1}',
            r"got 0.0 and -1 for .* See .*:3\.",
        ),
    ],
)
def test_an_error_in_a_manifest_names_its_line(tmp_path, line, message):
    tone(tmp_path / "a.wav")
    path = tmp_path / "m.jsonl"
    path.write_text('{"audio": "a.wav", "text": "x"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"^manifest: expected .*{message}"):
        corpora.from_manifest(path)
