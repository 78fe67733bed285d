import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from asrkit.sound_files import Sound
from asrkit.transcribe import audio
from asrkit.transcribe.audio import blocks, find, read_audio
from asrkit.transcribe.windows import plan_batches, windows

RATES = [8_000, 11_025, 44_100, 48_000, 192_000]


def noise(duration_s, rate, channels=1, seed=0):
    """Low noise (samples, channels)."""
    return 0.1 * np.random.default_rng(seed).standard_normal(
        (round(duration_s * rate), channels)
    ).astype(np.float32)


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_keeps_its_frequency_and_phase_at_any_rate_over_all_blocks(
    tmp_path, rate
):
    time = np.arange(21 * rate + 7) / rate
    soundfile.write(
        str(tmp_path / "a.wav"),
        0.5 * np.sin(2 * np.pi * 440 * time),
        rate,
        subtype="FLOAT",
    )
    heard = read_audio(tmp_path / "a.wav", 16_000)
    wanted = 0.5 * torch.sin(
        2 * torch.pi * 440 * torch.arange(len(heard), dtype=torch.float64) / 16_000
    )
    assert len(heard) == -(-(21 * rate + 7) * 16_000 // rate)
    assert (heard - wanted)[4_000:-4_000].abs().max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_blocks_have_no_seams(tmp_path, rate, monkeypatch):
    monkeypatch.setattr(audio, "READ_SAMPLES", 99_991)
    wave = noise(25.3, rate)
    soundfile.write(str(tmp_path / "a.wav"), wave, rate, subtype="FLOAT")
    assert max(map(len, blocks(tmp_path / "a.wav", 16_000))) <= 11 * 16_000
    whole = resample(torch.from_numpy(wave[:, 0]), rate, 16_000)
    torch.testing.assert_close(
        read_audio(tmp_path / "a.wav", 16_000), whole, rtol=0, atol=1e-6
    )


def test_channels_are_averaged(tmp_path):
    wave = noise(0.5, 16_000, channels=6)
    soundfile.write(str(tmp_path / "a.wav"), wave, 16_000, subtype="FLOAT")
    torch.testing.assert_close(
        read_audio(tmp_path / "a.wav", 16_000),
        torch.from_numpy(wave.mean(1)),
        rtol=0,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    ("total", "size", "overlap"),
    [(1, 10, 4), (10, 10, 4), (11, 10, 4), (16, 10, 4), (100, 10, 5), (95, 10, 0)],
)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_windows_cover_every_sample_share_the_overlap_and_say_which_is_last(
    total, size, overlap, chunk
):
    signal = torch.arange(float(total))
    found = [*windows(signal.split(chunk), size, overlap)]
    assert [last for _, _, last in found] == [False] * (len(found) - 1) + [True]
    assert all(
        torch.equal(part, signal[start : start + len(part)]) for start, part, _ in found
    )
    assert [start for start, _, _ in found] == [
        n * (size - overlap) for n in range(len(found))
    ]
    assert (
        all(len(part) == size for _, part, _ in found[:-1])
        and found[-1][0] + len(found[-1][1]) == total
    )
    assert len(found) == 1 or overlap < len(found[-1][1]) <= size


def test_batches_hold_the_budget_with_padding_counted_and_every_piece_once():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (200,), generator=generator).tolist()
    plan = plan_batches(dict(enumerate(lengths)), 250)
    padded = [len(batch) * max(lengths[row] for row in batch) for batch in plan]
    assert sorted(row for batch in plan for row in batch) == [*range(200)]
    assert max(padded) <= 250 and sum(padded) < 1.1 * sum(lengths)
    assert (
        plan_batches({7: 300, 2: 10}, 250) == [[2], [7]] and plan_batches({}, 9) == []
    )


@pytest.mark.parametrize(("budget", "most_padding", "plan"), [
    (250, 4, [[1, 5, 2, 3], [0, 4]]), (250, 3, [[1, 5, 2], [3], [0, 4]]),
    (250, 0, [[1, 5], [2], [3], [0], [4]]), (60, 4, [[1, 5], [2, 3], [0, 4]]),
])  # fmt: skip
def test_a_batch_ends_where_another_utterance_would_bring_too_much_padding(
    budget, most_padding, plan
):
    lengths = dict(enumerate([10, 30, 29, 27, 9, 30]))
    assert plan_batches(lengths, budget, most_padding) == sorted(plan, key=min)


def test_a_folder_stands_for_the_sound_files_under_it_sorted_and_a_file_for_itself(
    tmp_path,
):
    for name in (
        *(f"b/{n}.wav" for n in (7, 3, 9, 4, 1, 8)),
        "b/2.FLAC",
        "a.ogg",
        "notes.txt",
        ".hidden/x.wav",
        "._a.wav",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(name) for _, name in find([tmp_path])]
    assert names == [
        "a.ogg",
        "b/1.wav",
        "b/2.FLAC",
        *(f"b/{n}.wav" for n in (3, 4, 7, 8, 9)),
    ]
    assert [str(name) for _, name in find([tmp_path / "notes.txt", tmp_path / "b"])][
        :3
    ] == [
        "notes.txt",
        "1.wav",
        "2.FLAC",
    ]


def bad_files(folder):
    """What is wrong with a file -> (the file, part of what is said about it)."""
    wave = noise(3, 16_000)
    for name in ("cut.flac", "cut.mp3"):
        soundfile.write(str(folder / name), wave, 16_000)
        (folder / name).write_bytes(
            (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
        )
    wave[12_000] = np.nan
    soundfile.write(str(folder / "nan.wav"), wave, 16_000, subtype="FLOAT")
    soundfile.write(str(folder / "empty.wav"), wave[:0], 16_000)
    soundfile.write(str(folder / "slow.wav"), noise(1, 1000)[:50], 50)
    soundfile.write(str(folder / "odd.wav"), noise(0.1, 22_051), 22_051)
    for name, data in (
        ("zero.wav", b""),
        ("text.wav", b"hello there"),
        ("foreign.raw", b"0" * 1000),
    ):
        (folder / name).write_bytes(data)
    (folder / "folder.wav").mkdir()
    said = {
        "cut.flac": "cut.flac breaks off after", "cut.mp3": "The file is truncated.",
        "nan.wav": "NaN or infinity at 0.750 s of nan.wav",
        "empty.wav": "none in empty.wav", "slow.wav": "got 50 Hz in slow.wav",
        "odd.wav": "expected a rate in proportion to 16000 Hz, got 22051 Hz in odd.wav. Convert it first", "zero.wav": "0 bytes in zero.wav",
        "text.wav": "text.wav cannot be read (libsndfile: Format not recognised.)", "foreign.raw": "foreign.raw cannot be read",
        "folder.wav": "folder.wav'. There is none in it.", "none.wav": "none.wav'. Check the path.",
    }  # fmt: skip
    return {folder / name: what for name, what in said.items()}


def test_what_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path):
    for path, what in bad_files(tmp_path).items():
        with pytest.raises(ValueError, match="^audio: ") as error:
            read_audio(path, 16_000)
        assert what in str(error.value) and "\n" not in str(error.value), path


@pytest.mark.parametrize(("suffix", "subtype"), [
    ("wav", "PCM_16"), ("wav", "FLOAT"), ("aiff", "PCM_16"), ("au", "PCM_16"), ("ogg", "VORBIS"), ("ogg", "OPUS"),
])  # fmt: skip
def test_a_file_that_is_cut_short_is_refused_and_a_whole_one_read(
    tmp_path, suffix, subtype
):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(str(path), noise(3, 16_000), 16_000, subtype=subtype)
    assert len(read_audio(path, 16_000)) == 48_000
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        ValueError, match="^audio: .* a part of a.* The file is truncated"
    ):
        read_audio(path, 16_000)


def test_a_format_that_libsndfile_lacks_comes_with_a_remedy(tmp_path):
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(64))
    with pytest.raises(
        ValueError, match=r"a.m4a cannot be read .* Convert it first: ffmpeg"
    ):
        read_audio(tmp_path / "a.m4a", 16_000)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_whose_writer_did_not_know_its_length_is_read(tmp_path, size):
    path = tmp_path / "a.wav"
    soundfile.write(str(path), noise(1, 16_000), 16_000)
    data = path.read_bytes()
    at = data.index(b"data") + 4
    path.write_bytes(data[:at] + size.to_bytes(4, "little") + data[at + 4 :])
    assert len(read_audio(path, 16_000)) == 16_000


def test_a_folder_reports_what_cannot_be_read_unless_a_copy_that_can_lies_beside_it(
    tmp_path,
):
    for name in ("a.wav", "b.m4a", "sub/c.webm", "d.m4a", "d.wav", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 64)
    assert [str(name) for _, name in find(tmp_path)] == [
        "a.wav",
        "b.m4a",
        "d.wav",
        "sub/c.webm",
    ]


def test_a_subfolder_without_permission_is_reported_in_its_place(ordinary_folder):
    closed = ordinary_folder / "closed"
    soundfile.write(str(ordinary_folder / "a.wav"), noise(1, 16_000), 16_000)
    closed.mkdir(mode=0)
    found = find(ordinary_folder)
    with pytest.raises(
        ValueError, match="closed', which cannot be read .Permission denied"
    ):
        read_audio(found[1][0], 16_000)
    assert [str(name) for _, name in found] == ["a.wav", "closed"]


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize(
    ("start_s", "duration_s", "wanted_s"),
    [
        (0.5, 1.25, (0.5, 1.75)),
        (2, None, (2, 3)),
        (2.5, 9, (2.5, 3)),
        (0, 2.995, (0, 3)),
    ],
)
def test_a_part_of_a_recording_is_its_samples_and_ends_where_the_recording_does(
    tmp_path, data, start_s, duration_s, wanted_s
):
    rate = 44_100
    path = tmp_path / "a.wav"
    wave = noise(3, rate)
    soundfile.write(str(path), wave, rate, subtype="FLOAT")
    sound = Sound(path, path.read_bytes() if data else None, start_s, duration_s)
    first, last = (round(one * rate) for one in wanted_s)
    heard = read_audio(sound, rate)
    assert torch.equal(heard, torch.from_numpy(wave[first:last, 0]))
    assert len(read_audio(sound, 16_000)) == -(-(last - first) * 16_000 // rate)


@pytest.mark.parametrize(
    ("name", "read", "said"),
    [
        (
            "cut.wav",
            lambda path: Sound(path, path.read_bytes()[:4000]),
            "The file is truncated.",
        ),
        (
            "none.wav",
            lambda path: Sound(path, b""),
            "expected a sound file, got 0 bytes in none.",
        ),
        (
            "late.wav",
            lambda path: Sound(path, start_s=3.5),
            "begins before 3.00 s, where late.wav",
        ),
    ],
)
def test_what_is_wrong_with_bytes_or_a_part_is_one_line(tmp_path, name, read, said):
    soundfile.write(str(tmp_path / name), noise(3, 16_000), 16_000)
    with pytest.raises(ValueError, match="^audio: ") as error:
        read_audio(read(tmp_path / name), 16_000)
    assert said in str(error.value) and "\n" not in str(error.value)
