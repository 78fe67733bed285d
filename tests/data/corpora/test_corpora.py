import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import (
    AudioSource,
    CutSet,
    Recording,
    RecordingSet,
    SupervisionSegment,
    SupervisionSet,
)

from asrkit.data import Utterances, corpora
from asrkit.data.corpora import synthetic
from asrkit.data.corpora.folders import read_folder
from asrkit.data.stats import read_lengths
from asrkit.transcribe.bulk import manifests

SIZES = {"train": 18, "dev": 6, "test": 6}
ROOT = Path(corpora.__file__).resolve().parents[3]


def corpus_in(home):
    """The folder of the only complete corpus."""
    (folder,) = (home / "corpora").glob("[!.]*")
    return folder


def sizes_of(sets):
    return tuple(len(cuts) for cuts in sets.values())


@pytest.fixture(scope="session")
def espeak():
    """Skips tests of synthesis without espeak-ng."""
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")


@pytest.fixture(scope="module")
def built(tmp_path_factory, espeak):
    """A small corpus, its folder, and the folder's home."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("ASRKIT_HOME", str(home))
        cuts = corpora.spoken_commands(**SIZES, progress=False)
        yield cuts, corpus_in(home)


def spoken(jobs, folder):
    """Hash of each job's WAV, by id."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    worker = [sys.executable, synthetic.WORKER, folder / "jobs.json", folder]
    subprocess.run(worker, check=True)
    return {
        path.stem: hashlib.sha256(path.read_bytes()).digest()
        for path in folder.glob("*.wav")
    }


def test_an_utterance_depends_on_its_job_alone_in_any_order_and_process(
    tmp_path, espeak
):
    jobs = synthetic._jobs({"train": 12})
    there = spoken(jobs, tmp_path / "there")
    assert len(set(there.values())) == 12
    assert there == spoken(jobs[::-1], tmp_path / "back")
    alone = spoken([jobs[5]], tmp_path / "alone")
    assert alone.items() <= there.items()
    others = [job | {"seed": job["seed"] + 1} for job in jobs]
    assert spoken(others, tmp_path / "other") != there


def test_every_voice_exists_and_sounds_different(tmp_path, espeak):
    job = {"text": "turn on the kitchen light", "seed": 1}
    jobs = [
        job | {"id": f"{voice} {variant}", "voice": voice, "variant": variant}
        for voice in synthetic.ACCENTS
        for variant in synthetic.VARIANTS
    ]
    sounds = spoken(jobs, tmp_path / "voices").values()
    assert len(set(sounds)) == len(jobs) == 112


def test_voices_and_long_texts_are_in_one_split_only():
    jobs = synthetic._jobs({"train": 1500, "dev": 300, "test": 300})
    voices, texts = ({"train": set(), "dev": set(), "test": set()} for _ in range(2))
    for job in jobs:
        split = job["id"].partition("-")[0]
        voices[split].add((job["voice"], job["variant"]))
        if "digits" not in job["id"] or job["text"].count(" ") > 2:
            texts[split].add(job["text"])
    for sets in (voices, texts):
        assert all(sets.values())
        assert sum(map(len, sets.values())) == len(set.union(*sets.values()))
    assert len(voices["train"]) >= 60
    assert 70 <= len({word for job in jobs for word in job["text"].split()}) <= 80


def test_a_larger_corpus_begins_with_the_smaller_one():
    assert synthetic._jobs({"train": 30})[:10] == synthetic._jobs({"train": 10})


def test_cuts_are_16_khz_with_text_speaker_and_kind_and_audible(built):
    cuts, _ = built
    assert sizes_of(cuts) == (18, 6, 6)
    for cut in (cut for some in cuts.values() for cut in some):
        (supervision,) = cut.supervisions
        assert cut.sampling_rate == 16_000
        assert supervision.text
        assert supervision.custom["kind"] in corpora.KINDS
        assert supervision.speaker.partition("+")[0] in synthetic.ACCENTS
        audio = cut.load_audio()
        assert audio.shape == (1, cut.num_samples)
        assert np.sqrt(np.mean(audio**2)) > 0.01
        assert 0.2 < cut.duration < 12


def audio_of(folder):
    """Bytes of each sound file of a corpus, by name."""
    return {path.name: path.read_bytes() for path in (folder / "audio").iterdir()}


def test_a_second_call_reads_what_the_first_one_built_and_two_builds_are_equal(
    built, a_home
):
    _, folder = built
    corpora.spoken_commands(**SIZES, workers=1, progress=False)
    again = corpus_in(a_home)
    assert again.name == folder.name
    assert audio_of(again) == audio_of(folder)
    before = (again / "cuts_test.jsonl.gz").stat().st_mtime_ns
    corpora.spoken_commands(**SIZES, progress=False)
    assert (again / "cuts_test.jsonl.gz").stat().st_mtime_ns == before


def test_one_kind_equals_its_part_of_the_whole_corpus_and_no_other_is_synthesised(
    built, a_home
):
    cuts, folder = built
    digits = corpora.spoken_commands(**SIZES, kinds=["digits"], progress=False)
    for split, some in digits.items():
        supervisions = [cut.supervisions for cut in cuts[split]]
        wanted = [
            parts for parts in supervisions if parts[0].custom["kind"] == "digits"
        ]
        assert [cut.supervisions for cut in some] == wanted != []
    whole = audio_of(folder)
    wanted = {name: whole[name] for name in whole if "-digits-" in name}
    assert audio_of(corpus_in(a_home)) == wanted


def test_a_corpus_can_be_moved_and_read_from_its_own_manifest(built, tmp_path):
    sets, folder = built
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    cuts = corpora.from_manifest(moved / "cuts_test.jsonl.gz")
    sources = [cut.recording.sources[0].source for cut in cuts]
    assert all(str(source).startswith(str(moved)) for source in sources)
    here, there = (
        Utterances.load(some, progress=False) for some in (cuts, sets["test"])
    )
    assert here.texts == there.texts
    assert here.durations == there.durations


@pytest.mark.live
def test_two_processes_build_at_once_and_kill_9_leaves_no_corpus(tmp_path, espeak):
    sizes = "train=200, dev=3, test=3, progress=False"
    code = f"from asrkit.data import corpora; print(len(corpora.spoken_commands({sizes})['train']))"
    environment = {**os.environ, "ASRKIT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start():
        """In its own session, so that it can be killed with its children."""
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    killed = start()
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("corpora/.*/*/*.wav")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    left = list((tmp_path / "corpora").iterdir())
    assert left
    assert all(path.name.startswith(".") for path in left)
    for process in [start(), start()]:
        out, _ = process.communicate(timeout=600)
        assert (out.strip(), process.returncode) == ("200", 0)
    assert len(audio_of(corpus_in(tmp_path))) == 206


def test_without_espeak_the_error_names_the_remedy(a_home, monkeypatch):
    version = metadata.version

    def none(name):
        if name.replace("_", "-") == "espeakng-loader":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", none)
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    message = r'^spoken_commands: .* not installed\. Run pip install -e "\.\[synth\]" in the checkout, or make report\.$'
    with pytest.raises(RuntimeError, match=message):
        corpora.spoken_commands(progress=False)


def tone(path, rate_hz=8000, channels=1, seconds=0.5):
    """A WAV file of a loud 440 Hz tone."""
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.stack([wave] * channels, axis=1), rate_hz)


def manifest(folder, *rows):
    """A manifest with `rows` in its own folder, next to the audio."""
    (folder / "manifests").mkdir()
    path = folder / "manifests/m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "rate_hz, channels", [(8000, 1), (16_000, 1), (44_100, 2), (22_050, 2)]
)
def test_any_rate_and_channel_count_becomes_16_khz_mono(tmp_path, rate_hz, channels):
    tone(tmp_path / "audio/a.wav", rate_hz, channels)
    row = {"audio": "audio/a.wav", "text": "hello"}
    cuts = corpora.from_manifest(manifest(tmp_path, row))
    held = Utterances.load(cuts, progress=False)
    audio = held.waveforms[0].numpy() / 32768
    assert list(held.texts) == ["hello"]
    assert cuts[0].sampling_rate == 16_000
    assert audio.shape == (8000,)
    assert np.argmax(np.abs(np.fft.rfft(audio))) == 220
    assert np.abs(audio[2000:6000]).max() == pytest.approx(0.5, abs=0.02)


def test_a_folder_of_recordings_and_supervisions_is_cut_at_its_supervisions(tmp_path):
    tone(tmp_path / "a.wav", 16_000, seconds=2.0)
    sounds = [Recording("r", [AudioSource("file", [0], "a.wav")], 16_000, 32_000, 2.0)]
    parts = [SupervisionSegment(f"s{n}", "r", n, 0.5, text=f"text {n}") for n in (0, 1)]
    RecordingSet.from_recordings(sounds).to_file(tmp_path / "x_recordings.jsonl.gz")
    SupervisionSet.from_segments(parts).to_file(tmp_path / "x_supervisions.jsonl.gz")
    held = Utterances.load(corpora.from_manifest(tmp_path), progress=False)
    assert list(held.texts) == ["text 0", "text 1"]
    assert held.durations == [0.5, 0.5]
    assert len(corpora.load([tmp_path])["train"]) == 2


def test_the_published_test_set_of_a_folder_of_tables_is_not_trained_on(tmp_path):
    for part in ("train", "dev-clean", "test"):
        tone(tmp_path / f"{part}.wav", 16_000, seconds=1.0)
        source = AudioSource("file", [0], f"{part}.wav")
        sound = Recording(part, [source], 16_000, 16_000, 1.0)
        supervision = SupervisionSegment(part, part, 0, 0.5, text="text")
        of_part = f"{part}.jsonl.gz"
        RecordingSet.from_recordings([sound]).to_file(
            tmp_path / f"x_recordings_{of_part}"
        )
        SupervisionSet.from_segments([supervision]).to_file(
            tmp_path / f"x_supervisions_{of_part}"
        )
    cuts = corpora.load([tmp_path])
    for split, part in (("train", "train"), ("dev", "dev-clean"), ("test", "test")):
        (cut,) = cuts[split]
        assert cut.supervisions[0].id == part


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "{broken",
            "cuts, or lines with audio or duration, and text, got JSONDecodeError: Expecting .*",
        ),
        (
            '{"text": "x"}',
            "cuts, or lines with audio or duration, and text, got KeyError: 'audio'.*",
        ),
        (
            '{"audio": "a.wav", "text": ""}',
            "text for each utterance, got none for 'a.wav'.*",
        ),
        ('{"audio": "a.wav", "text": 5}', ".*expected str instance, int found.*"),
        ('{"audio": "b.wav", "text": "x"}', "audio in .* got no file 'b.wav'.*"),
        ('{"audio": "not.wav", "text": "x"}', ".*audio.*"),
        (
            '{"audio_filepath": "a.wav", "text": "x", "offset": 9}',
            "offset and .* got 9.0 and None for .*",
        ),
        (
            '{"audio_filepath": "a.wav", "text": "x", "duration": -1}',
            "offset and .* got 0.0 and -1 for .*",
        ),
        *(
            (
                f'{{"audio_filepath": "a.wav", "text": "x", "duration": {stated}}}',
                r"offset and duration in 0..0.5 s, got 0.0 and .* for 'a.wav'. See .*",
            )
            for stated in ("31", "0.71", "NaN", "0", "Infinity")
        ),
    ],
)
def test_an_error_in_a_manifest_names_its_line(tmp_path, line, message):
    tone(tmp_path / "a.wav")
    (tmp_path / "not.wav").write_text("not audio")
    path = tmp_path / "m.jsonl"
    path.write_text('{"audio": "a.wav", "text": "x"}\n\n' + line + "\n")
    wanted = rf"^manifest: expected {message}m.jsonl:3\.$"
    with pytest.raises(ValueError, match=wanted):
        corpora.from_manifest(path)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda folder: corpora.from_manifest(folder / "none.jsonl"),
            r"manifest: expected a file or a folder, got .*none\.jsonl",
        ),
        (
            lambda folder: corpora.from_manifest(folder),
            "manifest: expected at least one utterance, got none",
        ),
        (
            lambda folder: corpora.from_manifest(manifest(folder)),
            "manifest: expected at least one utterance, got none",
        ),
        (
            lambda folder: corpora.spoken_commands(kinds=["numbers"]),
            r"kinds: expected some of digits, commands, sentences, got \['nu",
        ),
    ],
)
def test_invalid_corpora_are_refused_in_one_line(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_resampling_to_flac_keeps_pitch_loudness_and_length(tmp_path):
    tone(tmp_path / "a.wav", 22_050, seconds=1.0)
    samples = synthetic._to_flac(tmp_path / "a.wav", tmp_path / "a.flac")
    audio, rate_hz = soundfile.read(tmp_path / "a.flac")
    assert rate_hz == 16_000
    assert 16_000 <= samples == len(audio) < 16_000 + 8 * 320
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(1000, 15_000) / 16_000)
    assert np.abs(audio[1000:15_000] - wanted).max() < 2e-3


def test_several_corpora_mix_and_one_speaker_can_be_held_out(tmp_path):
    rows = [
        {"speaker": "ann", "split": None},
        {"speaker": 3, "split": "train"},
        {"speaker": "ann", "split": "test-other"},
        {"speaker": None, "split": "Test"},
    ]
    tone(tmp_path / "a.wav")
    rows = [
        {"audio": "a.wav", "text": "a", "id": f"{n}"} | row
        for n, row in enumerate(rows)
    ]
    path = manifest(tmp_path, *rows)
    assert sizes_of(corpora.load([path])) == (2, 0, 2)
    held_out = corpora.load([path, path], hold_out="3")
    assert sizes_of(held_out) == (6, 0, 2)
    assert {cut.supervisions[0].speaker for cut in held_out["test"]} == {"3"}
    message = (
        "hold_out: expected a speaker of a manifest, such as 3, None, ann, got 'eve'"
    )
    with pytest.raises(ValueError, match=message):
        corpora.load([path], hold_out="eve")


@pytest.mark.parametrize(
    "name, split",
    [("validation", "dev"), ("val_seen", "dev"), ("Eval2", None), ("eval-2", "test"),
     ("evaluation", "test"), ("train.clean", "train"), ("all", "train"), ("unseen", None)],
)  # fmt: skip
def test_splits_of_usual_names_are_known_and_others_are_refused(tmp_path, name, split):
    tone(tmp_path / "a.wav")
    path = manifest(tmp_path, {"audio": "a.wav", "text": "a", "split": name})
    if split is None:
        message = f"^manifest: expected a split that begins with one of train, .*got '{name}' of "
        with pytest.raises(ValueError, match=message):
            corpora.load([path])
    else:
        assert [part for part, cuts in corpora.load([path]).items() if cuts] == [split]


@pytest.mark.parametrize(
    "name, split",
    [("v1.0_supervisions_test", "test"), ("a_supervisions_dev_clean", "dev"), ("test_supervisions", "test"),
     ("x_supervisions_validation", "dev"), ("test-set_supervisions_train", "train"), ("supervisions", "train")],
)  # fmt: skip
def test_names_of_tables_state_their_split(tmp_path, name, split):
    tone(tmp_path / "a.wav", 16_000, seconds=1.0)
    sound = Recording("a", [AudioSource("file", [0], "a.wav")], 16_000, 16_000, 1.0)
    supervision = SupervisionSegment("a", "a", 0, 0.5, text="text")
    RecordingSet.from_recordings([sound]).to_file(tmp_path / "recordings.jsonl")
    SupervisionSet.from_segments([supervision]).to_file(tmp_path / f"{name}.jsonl.gz")
    assert [part for part, cuts in corpora.load([tmp_path]).items() if cuts] == [split]


def stereo(path, left, right, **options):
    soundfile.write(path, np.stack([left, right], 1), 16_000, **options)


def test_a_line_may_name_the_channel_of_its_text(tmp_path):
    left, right = np.random.default_rng(0).normal(size=(2, 16_000)) * 0.1
    stereo(tmp_path / "tel.wav", left, right)
    rows = [{"audio_filepath": "tel.wav", "text": f"{n}", "channel": n} for n in (0, 1)]
    mean = {"audio_filepath": "tel.wav", "text": "both", "channel": None}
    path = manifest(tmp_path, *rows, mean)
    held = Utterances.load(corpora.from_manifest(path), progress=False)
    for waveform, wanted in zip(held.waveforms, (left, right, (left + right) / 2), strict=True):  # fmt: skip
        assert np.abs(waveform.numpy() / 32768 - wanted).max() < 1e-4
    to_transcribe = [*manifests.read([path])]
    assert [row.sound.channel for row in to_transcribe] == [0, 1, None]
    assert [row.id for row in to_transcribe] == list(held.ids)
    message = "manifest: expected a channel below 2 of 'tel.wav', got 2"
    path.write_text(json.dumps(rows[0] | {"channel": 2}))
    with pytest.raises(ValueError, match=message):
        corpora.from_manifest(path)


def test_channels_that_cancel_each_other_are_not_averaged_to_silence(tmp_path):
    wave = np.random.default_rng(0).normal(size=16_000) * 0.1
    stereo(tmp_path / "a.wav", wave, -wave)
    cuts = corpora.from_manifest(manifest(tmp_path, {"audio": "a.wav", "text": "a"}))
    (waveform,) = Utterances.load(cuts, progress=False).waveforms
    assert np.abs(waveform.numpy() / 32768 - wave).max() < 1e-4


@pytest.mark.parametrize(
    "factor, message",
    [(32768, "samples in -1..1, got .* in 'a.wav'. Divide"), (0, "sound, got only zeros in 'a.wav'")],
)  # fmt: skip
def test_sound_of_another_scale_and_silence_are_refused(tmp_path, factor, message):
    wave = np.random.default_rng(0).normal(size=16_000) * 0.1
    stereo(tmp_path / "a.wav", wave * factor, wave * factor, subtype="FLOAT")
    cuts = corpora.from_manifest(manifest(tmp_path, {"audio": "a.wav", "text": "a"}))
    with pytest.raises(ValueError, match=f"^cuts: expected {message}"):
        Utterances.load(cuts, progress=False)


def test_a_failed_worker_stops_the_build_with_its_reason_and_leaves_nothing(
    a_home, espeak
):
    (job,) = synthetic._jobs({"train": 1})
    message = r"exit status 1: RuntimeError: espeak-ng has no voice 'en-gb"
    with pytest.raises(RuntimeError, match=message):
        synthetic._build(a_home / "corpora/x", [job | {"voice": "en-gb"}], 2, False)
    assert not list((a_home / "corpora").iterdir())


def spoken_in(path, start, seconds, stated_s=2.0):
    """A cut of a file of 2 s whose stated length is `stated_s`, with one text."""
    tone(path, 16_000, seconds=2.0)
    samples = round(stated_s * 16_000)
    source = AudioSource("file", [0], str(path))
    cut = Recording("r", [source], 16_000, samples, stated_s).to_cut()
    cut.supervisions = [SupervisionSegment("s", "r", start, seconds, text="two nine")]
    return cut


@pytest.mark.parametrize(
    ("start", "seconds", "inside"),
    [
        (0.0, 2.004, True),
        (-0.004, 1.0, True),
        (1.5, 0.51, True),
        (30.0, 0.5, False),
        (-30.0, 0.5, False),
        (-0.5, 1.0, False),
        (0.0, 2.1, False),
        (0.0, float("nan"), False),
    ],
)
def test_text_outside_its_cut_is_refused_by_the_cuts_id(
    tmp_path, start, seconds, inside
):
    cut = spoken_in(tmp_path / "a.wav", start, seconds)
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    RecordingSet.from_recordings([cut.recording]).to_file(
        tmp_path / "x_recordings.jsonl"
    )
    SupervisionSet.from_segments(cut.supervisions).to_file(
        tmp_path / "x_supervisions.jsonl"
    )
    for call in (
        lambda: Utterances.load([cut], progress=False),
        lambda: corpora.from_manifest(tmp_path / "cuts.jsonl"),
        lambda: read_lengths(tmp_path / "cuts.jsonl"),
        lambda: corpora.from_manifest(tmp_path),
    ):
        if inside:
            assert len(call()) == 1
            continue
        with pytest.raises(ValueError, match="'r|Supervision s:"):
            call()


def test_a_window_with_text_outside_of_its_sound_is_refused(tmp_path):
    cut = spoken_in(tmp_path / "a.wav", 0.0, 2.0)
    windows = CutSet.from_cuts([cut]).cut_into_windows(1.81)
    for window in windows:
        message = f"'{window.id}' cannot be read .*supervisions within the {window.duration} s"
        with pytest.raises(ValueError, match=message):
            Utterances.load([window], progress=False)


def test_a_text_of_another_channel_is_refused(tmp_path):
    cut = spoken_in(tmp_path / "a.wav", 0.0, 2.0)
    cut.supervisions[0].channel = 1
    with pytest.raises(
        ValueError,
        match="'r' cannot be read .*recording and channels of 'r', got 'r', channel 1",
    ):
        Utterances.load([cut], progress=False)


@pytest.mark.parametrize("speed", [1.0, 0.9, 1.1])
@pytest.mark.parametrize("beyond_s", [0.01, 0.45])
@pytest.mark.parametrize("whose", ["recording", "cut"])
def test_a_cut_beyond_the_end_of_its_file_is_not_filled_with_mirrored_speech(
    tmp_path, whose, beyond_s, speed
):
    longer = 2.0 + beyond_s
    cut = spoken_in(
        tmp_path / "a.wav", 0.0, 1.0, longer if whose == "recording" else 2.0
    )
    cut.duration = longer
    cuts = CutSet.from_cuts([cut.perturb_speed(speed) if speed != 1 else cut])
    if beyond_s < 0.2:  # a usual error of headers
        assert len(Utterances.load(cuts, progress=False)) == 1
        return
    with pytest.raises(ValueError, match=r"'r.*' cannot be read .*within the 2.0 s of"):
        Utterances.load(cuts, progress=False)


def test_repeated_cuts_are_refused_with_a_remedy(tmp_path):
    cuts = CutSet.from_cuts([spoken_in(tmp_path / "a.wav", 0.0, 2.0)])
    message = (
        r"ids: expected all different, got \['r'\] several times. .*preserve_id=False"
    )
    with pytest.raises(ValueError, match=message):
        Utterances.load(cuts.repeat(2, preserve_id=True), progress=False)
    twice = cuts.repeat(2, preserve_id=False)
    assert len(Utterances.load(twice, progress=False)) == 2


def noise_in(path, **options):
    """A sound file of 4 s, and its manifest."""
    noise = np.random.default_rng(0).normal(size=64_000) * 0.1
    noise[5] = np.nan if options.get("subtype") == "FLOAT" else 0
    soundfile.write(path, noise, 16_000, **options)
    row = {"audio": path.name, "text": "a whole text", "id": "mine"}
    return corpora.from_manifest(manifest(path.parent, row))


def test_sound_that_is_not_finite_is_refused_by_its_id(tmp_path):
    cuts = noise_in(tmp_path / "a.wav", subtype="FLOAT")
    message = "^cuts: expected finite samples, got NaN or infinity in 'mine'"
    with pytest.raises(ValueError, match=message):
        Utterances.load(cuts, progress=False)


@pytest.mark.parametrize(
    "suffix, subtype",
    [
        ("wav", "PCM_16"),
        ("aiff", "PCM_16"),
        ("au", "PCM_16"),
        ("ogg", "VORBIS"),
        ("ogg", "OPUS"),
        ("flac", "PCM_16"),
        ("mp3", "MPEG_LAYER_III"),
    ],
)
def test_training_refuses_a_truncated_sound_with_its_whole_text(
    tmp_path, suffix, subtype
):
    path = tmp_path / f"a.{suffix}"
    cuts = noise_in(path, subtype=subtype)
    (tmp_path / "a.txt").write_text("a whole text")
    assert len(Utterances.load(cuts, progress=False)) == 1
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="^cuts: 'mine' cannot be read") as caught:
        Utterances.load(cuts, progress=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="corpus: .* cannot be read .*truncated"):
        read_folder(tmp_path, 1, False)


@pytest.mark.parametrize("dot", ["", "./"])
def test_relative_audio_of_lhotse_cuts_is_found_next_to_their_manifest(tmp_path, dot):
    tone(tmp_path / "wav/1.wav")
    cut = Recording.from_file(tmp_path / "wav/1.wav", recording_id="r").to_cut()
    cut.recording.sources[0].source = f"{dot}wav/1.wav"
    texts = ((0.25, "two"), (0.0, "one"))  # in any order
    cut.supervisions = [SupervisionSegment(w, "r", at, 0.25, text=w) for at, w in texts]
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    (cut,) = corpora.from_manifest(tmp_path / "cuts.jsonl")
    assert cut.load_audio().shape[1] == cut.num_samples
    assert Utterances.load([cut], progress=False).texts == ["one two"]


def test_manifests_of_nemo_are_read_with_blank_lines_and_a_byte_order_mark(tmp_path):
    tone(tmp_path / "a.wav", 16_000, seconds=2.0)
    rows = [
        {"audio_filepath": "a.wav", "duration": 2.0, "text": "one"},
        {"audio_filepath": "a.wav", "duration": 0.5, "offset": 1.0, "text": "two"},
        {"audio_filepath": str(tmp_path / "a.wav"), "text": "three"},
    ]
    path = tmp_path / "m.jsonl"
    lines = ["", *map(json.dumps, rows), "  ", ""]
    path.write_text("\r\n\n".join(lines), encoding="utf-8-sig")
    cuts = corpora.from_manifest(path)
    assert [cut.start for cut in cuts] == [0, 1.0, 0]
    held = Utterances.load(cuts, progress=False)
    assert list(held.texts) == ["one", "two", "three"]
    assert held.durations == read_lengths(path).seconds.tolist() == [2.0, 0.5, 2.0]
