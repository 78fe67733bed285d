import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from asrkit.sound_files import Sound, left_out
from asrkit.transcribe import audio
from asrkit.transcribe.audio import OPEN, Reading, find, read_ahead, read_audio


def noise(duration_s, rate, channels=1):
    """Low noise (samples, channels)."""
    shape = (round(duration_s * rate), channels)
    return 0.1 * np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def save(path, wave, rate=16_000, subtype="FLOAT"):
    soundfile.write(str(path), wave, rate, subtype=subtype)
    return path


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 64)


def names_in(*paths):
    return [str(name) for _, name in find(paths)]


def refused(source):
    """The error of reading it, in one line."""
    with pytest.raises(ValueError, match=r"^audio: [^\n]*$") as error:
        read_audio(source, 16_000)
    return str(error.value)


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 192_000])
def test_blocks_are_those_of_the_whole_resampled_at_once(tmp_path, rate, monkeypatch):
    monkeypatch.setattr(audio, "READ_SAMPLES", 99_991)
    wave = noise(25.3, rate)
    path = save(tmp_path / "a.wav", wave, rate)
    assert max(map(len, Reading(path, 16_000).blocks())) <= 11 * 16_000
    whole = resample(torch.from_numpy(wave[:, 0]).double(), rate, 16_000).float()
    torch.testing.assert_close(read_audio(path, 16_000), whole, rtol=0, atol=1e-6)


def test_channels_are_averaged_or_one_of_them_is_read(tmp_path):
    wave = noise(0.5, 16_000, channels=6)
    path = save(tmp_path / "a.wav", wave)
    mean = torch.from_numpy(wave.mean(1))
    torch.testing.assert_close(read_audio(path, 16_000), mean, rtol=0, atol=1e-7)
    third = read_audio(Sound(path, channel=2), 16_000)
    assert torch.equal(third, torch.from_numpy(wave[:, 2]))
    assert "a channel below 6 of a.wav, got 6" in refused(Sound(path, channel=6))


def test_a_folder_stands_for_the_sound_files_under_it_sorted_and_a_file_for_itself(
    tmp_path,
):
    touch(tmp_path, "b/7.wav", "b/3.wav", "b/2.FLAC", "a.ogg", "notes.txt")
    touch(tmp_path, ".hidden/x.wav", "._a.wav")
    assert names_in(tmp_path) == ["a.ogg", "b/2.FLAC", "b/3.wav", "b/7.wav"]
    both = names_in(tmp_path / "notes.txt", tmp_path / "b")
    assert both == ["notes.txt", "2.FLAC", "3.wav", "7.wav"]


def test_a_folder_is_followed_through_links_once_and_what_it_leaves_out_is_counted(
    tmp_path,
):
    touch(
        tmp_path, "in/a.wav", "in/b.M4A", "in/c.webm", "in/d.txt", "in/e", "in/.f.pdf"
    )
    touch(tmp_path, "out/g.3gp", "out/h.TXT", "out/loop.wave")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "out")
    (tmp_path / "out" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "out" / "again").symlink_to(tmp_path / "out")
    names = ["a.wav", "b.M4A", "c.webm", "linked/g.3gp", "linked/loop.wave"]
    assert names_in(tmp_path / "in") == names
    assert left_out([tmp_path / "in", tmp_path / "none"]) == {".txt": 2, "": 1}


def test_a_subfolder_without_permission_is_reported_in_its_place(ordinary_folder):
    save(ordinary_folder / "a.wav", noise(1, 16_000))
    closed = ordinary_folder / "closed"
    closed.mkdir(mode=0)
    assert names_in(ordinary_folder) == ["a.wav", "closed"]
    assert "closed', which cannot be read (Permission denied" in refused(closed)


WAVE = noise(3, 16_000)
BROKEN = np.where(np.arange(48_000) == 12_000, np.nan, WAVE[:, 0])
REFUSED = {  # name, its bytes or (samples, rate), and the error message
    "nan.wav": (
        (BROKEN, 16_000),
        "nan.wav cannot be read beyond 0.75 s (NaN or infinity)",
    ),
    "empty.wav": ((WAVE[:0], 16_000), "none in empty.wav"),
    "slow.wav": ((WAVE, 50), "got 50 Hz in slow.wav"),
    "odd.wav": ((WAVE, 22_051), "to 16000 Hz, got 22051 Hz in odd.wav. Convert it"),
    "zero.wav": (b"", "0 bytes in zero.wav"),
    "text.wav": (b"hello", "text.wav cannot be read (FFmpeg: Invalid data"),
    "foreign.raw": (b"0" * 1000, "foreign.raw cannot be read"),
    "none.wav": (None, "none.wav'. Check the path."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_sound_or_with_wrong_samples_is_one_line_that_names_it(
    tmp_path, name
):
    path, (held, message) = tmp_path / name, REFUSED[name]
    if isinstance(held, tuple):
        save(path, *held)
    elif held is not None:
        path.write_bytes(held)
    assert message in refused(path)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_whose_header_has_no_length_is_read(tmp_path, size):
    path = save(tmp_path / "a.wav", noise(1, 16_000), subtype="PCM_16")
    data = path.read_bytes()
    at = data.index(b"data") + 4
    path.write_bytes(data[:at] + size.to_bytes(4, "little") + data[at + 4 :])
    assert len(read_audio(path, 16_000)) == 16_000


@pytest.mark.parametrize(
    ("start_s", "duration_s", "end_s"),
    [(0.5, 1.25, 1.75), (2, None, 3), (2.5, 9, 3), (0, 2.995, 3)],
)
def test_a_part_of_a_recording_is_its_samples_and_ends_where_the_recording_does(
    tmp_path, start_s, duration_s, end_s
):
    rate = 44_100
    wave = noise(3, rate)
    path = save(tmp_path / "a.wav", wave, rate)
    wanted = wave[round(start_s * rate) : round(end_s * rate), 0]
    for data in (None, path.read_bytes()):
        sound = Sound(path, data, start_s, duration_s)
        assert torch.equal(read_audio(sound, rate), torch.from_numpy(wanted))
        assert len(read_audio(sound, 16_000)) == -(-len(wanted) * 16_000 // rate)
    assert "begins before 3.00 s, where a.wav" in refused(Sound(path, start_s=3.5))


@pytest.mark.parametrize("readers", [1, 7])
def test_items_read_ahead_are_those_of_a_plain_loop_up_to_an_error(readers):
    sizes = [3, 0, 1, 40, 2, 4] * 9

    def read(size):
        yield from range(size)
        if size < 0:
            raise RuntimeError("torn")

    before, seen = threading.active_count(), []
    wanted = [item for size in sizes for item in range(size)]
    assert [*read_ahead(iter(sizes), read, readers)] == wanted
    with pytest.raises(RuntimeError, match="torn"):
        seen.extend(read_ahead([*sizes, -1, 3], read, readers))
    assert seen == wanted
    assert threading.active_count() == before


def test_no_more_is_read_ahead_than_promised_and_no_thread_remains():
    read_items = Counter()
    sources = itertools.count()
    before = threading.active_count()

    def read(source):
        for item in range(1000):
            read_items[source] += 1
            yield item

    items = read_ahead(sources, read, 2, ahead=4)
    for _ in range(500):
        next(items)
    assert next(sources) == 2 * OPEN
    end = time.monotonic() + 60
    while threading.active_count() > before:  # nothing is left to read for now
        assert time.monotonic() < end
        time.sleep(0.01)
    assert 500 <= read_items.pop(0) <= 504
    assert max(read_items.values()) <= 4
    items.close()
    assert threading.active_count() == before
