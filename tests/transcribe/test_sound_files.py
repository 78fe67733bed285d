"""Sound files as recorders, browsers and streams write them: read as a whole, or a line names what is missing."""

import io
import os
import re
import sys
import threading
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from encoded import RATE, SECONDS, WAVE, encode

from asrkit.sound_files import Sound
from asrkit.sound_readers import expect_whole
from asrkit.transcribe.audio import Reading, read_audio


def noise(size):
    return np.random.default_rng(17).bytes(size)  # in AAC FFmpeg finds EPERM too


VBR = {"flags": "+qscale", "global_quality": str(7 * 118)}


def wav(path, size=None):
    """A WAV file whose header states too many bytes of samples, or 0."""
    soundfile.write(str(path), WAVE, RATE, subtype="PCM_16")
    data = bytearray(path.read_bytes())
    at = data.index(b"data") + 4
    stated = 0 if size is None else int.from_bytes(data[at : at + 4], "little") + size
    data[at : at + 4] = stated.to_bytes(4, "little")
    path.write_bytes(data)
    return path


def cut_size(path, subtype):
    """A WAV file whose header states half of the bytes."""
    soundfile.write(str(path), WAVE, RATE, subtype=subtype)
    data = bytearray(path.read_bytes())
    at = data.index(b"data") + 4
    stated = int.from_bytes(data[at : at + 4], "little") // 2
    data[at : at + 4] = stated.to_bytes(4, "little")
    path.write_bytes(data)
    return path


def joined(path, *codec):
    encode(path, *codec)
    path.write_bytes(2 * path.read_bytes())
    return path


def without_end(path, codec):
    """An Ogg file whose last page is not marked as the last."""
    encode(path, None, codec)
    data = bytearray(path.read_bytes())
    page = data.rindex(b"OggS")
    data[page + 5] &= ~4
    data[page + 22 : page + 26] = bytes(4)
    checksum = 0
    for byte in data[page:]:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (
                checksum << 1 ^ (0x104C11DB7 if checksum >> 31 else 0)
            ) & 0xFFFFFFFF
    data[page + 22 : page + 26] = checksum.to_bytes(4, "little")
    path.write_bytes(data)
    return path


WHOLE = {  # name, how it is made, and how often it holds the recording
    "vbr.mp3": (lambda path: encode(path, None, "libmp3lame", write_xing="0", more=VBR), 1),
    "piped.mp3": (lambda path: encode(path, "mp3", "libmp3lame", piped=True), 1),
    "mono.mp3": (lambda path: encode(path, None, "libmp3lame"), 1),
    "joined.mp3": (lambda path: joined(path, None, "libmp3lame"), 2),
    "joined.ogg": (lambda path: joined(path, None, "vorbis"), 2),
    "joined.flac": (lambda path: joined(path, None, "flac"), 2),
    "joined.opus": (lambda path: joined(path, None, "libopus"), 2),
    "piped.flac": (lambda path: encode(path, "flac", "flac", piped=True), 1),
    "plus_u8.wav": (lambda path: cut_size(path, "PCM_U8"), 1),
    "plus2.wav": (lambda path: wav(path, 2), 1),
    "plus320.wav": (lambda path: wav(path, 320), 1),
    "zero.wav": (wav, 1),
    "half.wav": (lambda path: wav(path, -RATE * SECONDS), 1),
    "joined.wav": (lambda path: joined(path, None, "pcm_s16le"), 2),
    "wav.m4a": (lambda path: encode(path, "wav", "pcm_s24le"), 1),
    "endless.ogg": (lambda path: without_end(path, "vorbis"), 1),
    "endless.opus": (lambda path: without_end(path, "libopus"), 1),
    "m4a.mp3": (lambda path: encode(path, "ipod", "aac"), 1),
    "aac.3gp": (lambda path: encode(path, None, "aac"), 1),
    "aac.mp4": (lambda path: encode(path, None, "aac", movflags="frag_keyframe+empty_moov"), 1),
    "opus.webm": (lambda path: encode(path, None, "libopus"), 1),
    "aac.aac": (lambda path: encode(path, "adts", "aac"), 1),
    "wav.raw": (lambda path: encode(path, "wav", "pcm_s16le"), 1),
    "mp2": (lambda path: encode(path, "mp2", "mp2"), 1),
    "pcm.avi": (lambda path: encode(path, None, "pcm_s16le"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_all_of_a_file_is_read_whatever_its_header_and_its_name_say(tmp_path, name):
    make, times = WHOLE[name]
    reading = Reading(make(tmp_path / name), RATE)
    found = torch.cat([*reading.blocks()]).numpy()
    assert (reading.error, reading.notes) == ("", [])
    assert abs(len(found) / RATE - times * SECONDS) < 0.15
    for n in range(times):  # at its place, but for what encoders add in front
        part = found[n * len(found) // times :][: len(WAVE)]
        spectrum = (
            np.fft.rfft(part, 2 * len(WAVE)) * np.fft.rfft(WAVE, 2 * len(WAVE)).conj()
        )
        match = np.fft.irfft(spectrum)[:3000].max() / np.square(WAVE).sum()
        assert match > 0.9, n


CUT_SHORT = {  # codec and container; whether the file states how long it is
    "a.wav": ("pcm_s16le", True), "a.aiff": ("pcm_s16be", True), "a.au": ("pcm_s16be", True), "a.flac": ("flac", True),
    "a.w64": ("pcm_s16le", True), "a.ogg": ("vorbis", True), "a.opus": ("libopus", True), "a.mp3": ("libmp3lame", True), "a.mka": ("aac", True),
    "a.m4a": ("aac", True), "a.aac": ("aac", False),
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.ogg", "a.opus"])
def test_a_recording_with_a_damaged_middle_is_not_taken_for_a_shorter_one(
    tmp_path, name
):
    path = tmp_path / name
    encode(path, None, CUT_SHORT[name][0])
    data = path.read_bytes()
    third = len(data) // 3
    path.write_bytes(data[:third] + bytes(third) + data[2 * third :])
    with pytest.raises(ValueError, match=r"^audio: a\..* cannot be read beyond"):
        read_audio(path, RATE)


@pytest.mark.parametrize("fill", [bytes, noise])
@pytest.mark.parametrize("name, codec", [("a.m4a", "aac"), ("a.flac", "flac")])
def test_a_file_is_read_beyond_its_damage_which_the_error_counts(
    tmp_path, name, codec, fill
):
    whole = read_audio(encode(tmp_path / name, None, codec), RATE)
    data = (tmp_path / name).read_bytes()
    begin, size = (2000 if codec == "flac" else len(data) // 2), len(data) // 10
    (tmp_path / name).write_bytes(data[:begin] + fill(size) + data[begin + size :])
    reading = Reading(tmp_path / name, RATE)
    found = torch.cat([*reading.blocks()])
    assert abs(len(found) - len(whole)) < 0.1 * RATE
    assert re.fullmatch(
        rf"audio: \d\.\d s of {name} cannot be decoded\.", reading.error
    )
    assert agree(found[10 * RATE : 11 * RATE], whole, 10 * RATE)


def test_a_damaged_flv_breaks_off_where_a_track_appears(tmp_path):
    path = encode(tmp_path / "a.flv", None, "aac")
    data = bytearray(path.read_bytes())
    at = 13  # after the header
    while at < len(data) // 2:  # a tag: kind, size, time, track, bytes, size
        at += 15 + int.from_bytes(data[at + 1 : at + 4])
    data[at : at + 12] = b"\x09" + data[at + 1 : at + 11] + b"\x12"  # a picture
    path.write_bytes(data)
    reading = Reading(path, RATE)
    assert len(torch.cat([*reading.blocks()])) > 4 * RATE
    assert "a.flv cannot be read beyond" in reading.error
    assert "a track appears that its header lacks" in reading.error


@pytest.mark.parametrize("name", CUT_SHORT)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_file_that_is_cut_short_is_read_up_to_there_and_the_error_says_where(
    tmp_path, name, in_memory
):
    codec, states = CUT_SHORT[name]
    path = tmp_path / name
    encode(
        path,
        "adts" if name == "a.aac" else None,
        codec,
        **({"movflags": "faststart"} if name == "a.m4a" else {}),
    )
    whole = read_audio(path, RATE)
    data = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(data)
    for rate in (RATE, 24_000):  # as it is, and resampled in blocks
        reading = Reading(Sound(path, data if in_memory else None), rate)
        found = torch.cat([*reading.blocks()])
        assert 0.3 < len(found) / rate / SECONDS < 0.6
        if states:
            at_s = float(reading.error.split(" beyond ")[1].split(" s ")[0])
            assert abs(at_s - len(found) / rate) < 0.01
        else:
            assert not reading.error
        if rate == RATE:
            start = found[: len(found) - RATE]
            torch.testing.assert_close(start, whole[: len(start)], rtol=0, atol=1e-3)
    if states:
        with pytest.raises(ValueError, match=r"^audio: a\..* cannot be read beyond"):
            read_audio(path, RATE)
        with pytest.raises(ValueError, match="truncated"):
            expect_whole(path)


def test_what_libsndfile_would_read_a_part_of_is_not_trained_on(tmp_path):
    for name in ("joined.ogg", "joined.mp3"):
        path = WHOLE[name][0](tmp_path / name)
        with pytest.raises(ValueError, match=rf"a part of {name}.* ffmpeg -i IN"):
            expect_whole(path)
    expect_whole(encode(tmp_path / "a.mp3", None, "libmp3lame"))
    expect_whole(wav(tmp_path / "a.wav", 2))


def test_a_playlist_opens_no_other_file(tmp_path):
    wav(tmp_path / "other.wav", 0)
    path = tmp_path / "list.wav"
    path.write_text("ffconcat version 1.0\nfile other.wav\n")
    with pytest.raises(ValueError, match="list.wav cannot be read"):
        read_audio(path, RATE)


@pytest.mark.parametrize(
    "weaker, cancel",
    [(1.0, True), (0.7, True), (0.3, False), (-1.0, False), (0.0, False)],
)
def test_where_channels_cancel_each_other_the_louder_one_is_read(
    tmp_path, weaker, cancel
):
    path = tmp_path / "a.wav"
    both = np.stack([-weaker * WAVE, WAVE], 1) / 2
    soundfile.write(str(path), both, RATE, subtype="FLOAT")
    reading = Reading(path, RATE)
    found = torch.cat([*reading.blocks()])
    wanted = both[:, 0 if weaker == 1 else 1] if cancel else both.mean(1)
    torch.testing.assert_close(
        found, torch.from_numpy(wanted.astype(np.float32)), rtol=0, atol=1e-6
    )
    assert [note.split(" from ")[0] for note in reading.notes] == [
        "channels cancel each other"
    ] * cancel
    if weaker == 1:  # a part of the file, and loud sound after it in the same chunk
        both[len(both) // 2 :, 0] *= -4
        soundfile.write(str(path), both, RATE, subtype="FLOAT")
        assert float(read_audio(path, RATE)[: len(both) // 2].square().mean()) > 0.1
    left = read_audio(Sound(path, channel=0), RATE)
    torch.testing.assert_close(
        left, torch.from_numpy(both[:, 0].astype(np.float32)), rtol=0, atol=1e-6
    )


def test_standard_input_and_pipes_are_read(tmp_path, monkeypatch):
    path = wav(tmp_path / "a.wav", 0)
    wanted = read_audio(path, RATE)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert torch.equal(read_audio(Path("-"), RATE), wanted)
    pipe = tmp_path / "pipe.wav"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    assert torch.equal(read_audio(pipe, RATE), wanted)
    writer.join()


def test_without_pyav_the_line_names_it(tmp_path, monkeypatch):
    mp3 = encode(tmp_path / "a.mp3", None, "libmp3lame")
    monkeypatch.setitem(sys.modules, "av", None)
    assert len(read_audio(wav(tmp_path / "a.wav", 0), RATE)) == len(WAVE)
    with pytest.raises(
        ValueError, match=r"^audio: a.mp3 needs PyAV: pip install av\.$"
    ):
        read_audio(mp3, RATE)


@pytest.mark.parametrize("seconds", [1.0, 1.1, 1.23, 1.37, 1.5, 1.71, 2.03])
def test_a_short_mp3_of_a_telephone_is_whole(tmp_path, seconds):
    path = encode(
        tmp_path / "a.mp3",
        None,
        "libmp3lame",
        wave=WAVE[: round(8000 * seconds)],
        rate=8000,
    )
    reading = Reading(path, 8000)
    assert abs(sum(map(len, reading.blocks())) / 8000 - seconds) < 0.15
    assert not reading.error


def agree(part, whole, start):
    """Whether a part of a recording begins at this sample, up to Matroska's milliseconds."""
    shifted = (whole[start + shift :][: len(part)] for shift in range(-9, 10))
    return min(float((one - part).abs().max()) for one in shifted) < 0.05


@pytest.mark.parametrize(
    "name, codec, options",
    [
        ("a.m4a", "aac", {}),
        ("a.webm", "libopus", {}),
        ("a.webm", "libopus", {"live": "1"}),
        ("a.mka", "libopus", {}),
        ("a.flac", "flac", {}),
    ],
)
def test_a_part_is_read_from_its_place_and_gaps_of_time_are_silence(
    tmp_path, name, codec, options
):
    whole = read_audio(encode(tmp_path / name, None, codec), RATE)
    part = read_audio(Sound(tmp_path / name, None, 7.25, 2.0), RATE)
    assert len(part) == 2 * RATE
    assert agree(part[800:-800], whole, int(7.25 * RATE) + 800)
    if codec == "flac":
        return
    path = tmp_path / f"gap{name[1:]}"
    with (
        av.open(str(tmp_path / name)) as given,
        av.open(str(path), "w", options=options) as out,
    ):
        track = given.streams.audio[0]
        stream = out.add_stream_from_template(track)
        for packet in given.demux(track):
            at_s = -1 if packet.pts is None else packet.pts * packet.time_base
            if at_s >= 0 and not 4 <= at_s < 6.5 and not 11.2 <= at_s < 11.7:
                packet.stream = stream
                out.mux(packet)
    reading = Reading(path, RATE)
    found = torch.cat([*reading.blocks()])
    assert not reading.error
    line = r"(2\.9|3\.[01]) s of it have no sound, the first at (3\.9|4\.0) s; they are read as silence"
    assert re.fullmatch(line, *reading.notes)
    assert abs(len(found) - len(whole)) < 0.1 * RATE
    assert float(found[int(4.2 * RATE) : int(6.3 * RATE)].abs().max()) == 0
    assert agree(found[7 * RATE : 11 * RATE], whole, 7 * RATE)
