"""Readers of sound files, by libsndfile or FFmpeg's libraries. They detect truncated files."""

import io
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from asrkit.shapes import expect
from asrkit.sound_files import Sound
from asrkit.sound_headers import has_sound_after_data, last_page_is_truncated, mp3_frames

CONVERT = "Convert it first: ffmpeg -i IN OUT.wav."
# Bytes of a file or of its samples, by the header and in fact, in libsndfile's log.
PROMISED = re.compile(r"(?:data|SSND|Data Size|Riff size|riff) *: (\d+) \(should be (\d+)\)")
UNKNOWN_SIZES = (range(0x7FFF0000, 2**31 + 1), range(0xFFFF0000, 2**32 + 1))
UNKNOWN_FRAMES = 2**62
CLOCK = re.compile(r"(\d+):(\d+):([\d.]+)")
PIECE = 4096  # samples read at a time; as many are lost where a file breaks off
MIN_MISSING_S = 0.2  # smaller differences are common: wrong headers, silence that encoders add
# First bytes of files that libsndfile reads whole; it may read only a part of MP3, Ogg and FLAC.
EXACT = (b"RIFF", b"RIFX", b"RF64", b"riff", b"FORM", b".snd", b"dns.", b"caff", b"NIST")
# Formats that contain their samples. Files of others (HLS, concat) may name further files.
DEMUXERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dts,eac3,flac,flv,gsm,ircam,loas,matroska,mlp,mov,mp3,mpc,"
    "mpc8,mpeg,mpegts,mxf,nut,ogg,rm,sox,tak,truehd,tta,voc,w64,wav,wtv,wv"
)
MPEG1_HZ = 32_000  # the lowest rate of MP3 files whose frames have 1152 samples
OPTIONS = {"format_whitelist": DEMUXERS, "ignore_length": "1"}  # WAV files are read to their end
ADDED_FRAMES = 2  # MPEG frames that encoders may count in addition
SEEKABLE = ("flac", "mov", "matroska")  # formats in which each frame has a time
SEEK_MARGIN_S = 1.0  # decoders need some frames before their output is exact
MOST_GAP_S = 3600  # longer gaps of a live recording, which states no length, are wrong times


def bytes_of(sound: Sound) -> IO[bytes]:
    """The opened file of a recording."""
    return sound.path.open("rb") if sound.data is None else io.BytesIO(sound.data)


def stored(sound: Sound) -> str | bytes | io.BytesIO:
    """The name of a recording's file, or a stream of its bytes, for soundfile."""
    if sound.data is not None:
        return io.BytesIO(sound.data)
    if os.name == "posix":
        return os.fsencode(sound.path)  # soundfile cannot encode names that are not UTF-8
    return str(sound.path)


def seconds(sound: Sound) -> float:
    """Length by the header; 0 without one. For progress only: headers may be wrong."""
    if sound.duration_s is not None:
        return sound.duration_s
    try:
        with open_sound(sound) as file:
            return max(0.0, file.about_s - sound.start_s)
    except (ValueError, OSError):
        return 0.0


class BrokenOff(ValueError):
    """A recording that cannot be read to its end."""


class SoundReader(ABC):
    """An opened recording, at its first sample; a context manager.

    Attributes:
        rate_hz: Samples a second.
        channels: Number of channels.
        frames: Samples of a channel, if the file states them exactly; else infinity.
        about_s: Length by the header; 0 if it states none.
        tracks: Number of audio tracks in the file, of which one is read.
        missing_s: Seconds that the header states but the file lacks, if known on opening.
        gaps_s: Start and length of each gap between samples that silence filled.
        lost_s: Seconds in packets that could not be decoded so far.
    """

    rate_hz: int
    channels: int
    frames: float = math.inf
    about_s: float
    tracks = 1
    missing_s = 0.0

    def __init__(self) -> None:
        self.buffer: list[np.ndarray] = []
        self.gaps_s: list[tuple[float, float]] = []
        self.lost_s = 0.0
        self.next_pieces = self.pieces()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abstractmethod
    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the rest as short arrays (n, channels) float32.

        Raises:
            BrokenOff: The recording ends too early; the message has the reason.
        """

    def skip(self, frames: int) -> None:
        """Skip this number of frames."""
        while frames > 0 and len(skipped := self.read(min(frames, PIECE))):
            frames -= len(skipped)

    def read(self, frames: int) -> np.ndarray:
        """The next frames, at most this many: (n, channels) float32; none at the end.

        Raises:
            BrokenOff: The recording ends too early, and all before that has been read.
        """
        parts, self.buffer = self.buffer, []
        size = sum(map(len, parts))
        try:
            while size < frames and (piece := next(self.next_pieces, None)) is not None:
                parts.append(piece)
                size += len(piece)
        except BrokenOff as error:
            if not size:
                raise
            self.next_pieces = _raising(error)
        if not parts:
            return np.zeros((0, self.channels), np.float32)
        joined = np.concatenate(parts)
        if size > frames:
            self.buffer = [joined[frames:]]
        return joined[:frames]


def _raising(error: Exception) -> Iterator[np.ndarray]:
    raise error
    yield


class LibsndfileReader(SoundReader):
    """A file that libsndfile reads and whose header states its length.

    libsndfile corrects a length that the file lacks, and only its log shows the original. A header
    with a size near 2^31 or 2^32 is of a stream of unknown length, which is whole.
    """

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file
        self.rate_hz = file.samplerate
        self.channels = file.channels
        self.frames = file.frames
        sizes = PROMISED.search(file.extra_info)
        if sizes:
            stated, actual = int(sizes[1]), int(sizes[2])
            is_known = not any(stated in unknown for unknown in UNKNOWN_SIZES)
            if is_known and actual < stated < 2**40:
                self.frames = file.frames * stated / actual
        self.about_s = file.frames / file.samplerate
        missing_s = self.frames / file.samplerate - self.about_s
        self.missing_s = missing_s if missing_s >= MIN_MISSING_S else 0.0

    def close(self) -> None:
        self.file.close()

    def skip(self, frames: int) -> None:
        import soundfile

        if not frames or not self.file.seekable():
            super().skip(frames)
            return
        try:
            self.file.seek(frames, os.SEEK_CUR)
        except soundfile.LibsndfileError as error:
            raise BrokenOff(f"libsndfile: {error.error_string}") from None

    def pieces(self) -> Iterator[np.ndarray]:
        import soundfile

        try:
            while len(piece := self.file.read(PIECE, dtype="float32", always_2d=True)):
                yield piece
        except soundfile.LibsndfileError as error:
            raise BrokenOff(f"libsndfile: {error.error_string}") from None


class SeekableBytes(io.BytesIO):
    """Bytes for FFmpeg's libraries, which expect -1 instead of an exception from a wrong seek."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek, and return the new position; -1 for an invalid one."""
        try:
            return super().seek(offset, whence)
        except ValueError:
            return -1


class FFmpegReader(SoundReader):
    """Any other recording, decoded by FFmpeg's libraries until it ends.

    Where the container has times (MP4, Matroska), silence fills gaps. Packets that cannot be
    decoded are skipped, and may be headers and tags between two recordings in one file. The end
    raises if the last page of an Ogg file is truncated.
    """

    def __init__(self, sound: Sound) -> None:
        import av

        super().__init__()
        data = sound.data
        source: Any = str(sound.path.absolute()) if data is None else SeekableBytes(data)
        try:
            self.container = av.open(source, options=OPTIONS)
        except (av.error.FFmpegError, ValueError) as error:
            raise ValueError(getattr(error, "strerror", None) or str(error)) from None
        self.track = self.container.streams.best("audio")
        if self.track is None or not self.track.codec_context:
            self.container.close()
            raise ValueError("there is no sound in it, or none of a known codec")
        self.tracks = len(self.container.streams.audio)
        self.rate_hz = self.track.codec_context.sample_rate
        self.channels = self.track.codec_context.channels
        self.kind = self.container.format.name.partition(",")[0]
        self.about_s = (self.container.duration or 0) / av.time_base
        start = 0 if self.kind == "flac" else self.container.start_time or 0
        self.first_s = max(0, start) / av.time_base
        self.position: int | None = 0  # frames before the next one; None until its time is known
        self.first = 0  # the first frame to return
        self.resampler: Any = None
        # no threads: a forked process would wait for them
        self.track.codec_context.thread_count = 1
        self._find_length(sound)

    def _find_length(self, sound: Sound) -> None:
        length_s = math.inf
        alone = len(self.container.streams) == 1  # else the header states that of the longest track
        if self.kind == "mp3":
            with bytes_of(sound) as source:
                frames = mp3_frames(source) - ADDED_FRAMES
            length_s = frames * (1152 if self.rate_hz >= MPEG1_HZ else 576) / self.rate_hz
        elif self.kind == "ogg":
            length_s = float((self.track.duration or math.inf) * self.track.time_base)
            with bytes_of(sound) as source:
                self.missing_s = math.inf if last_page_is_truncated(source) else 0.0
        elif self.kind in ("mov", "avi"):
            length_s = float((self.track.duration or math.inf) * self.track.time_base)
        elif tag := CLOCK.fullmatch(self.track.metadata.get("DURATION", "")):  # of Matroska
            hours, minutes, seconds = map(float, tag.groups())
            length_s = 3600 * hours + 60 * minutes + seconds - self.first_s
        elif self.kind in ("flac", "asf", "flv") or (self.kind == "matroska" and alone):
            length_s = self.about_s - self.first_s if self.about_s else math.inf
        self.frames = length_s * self.rate_hz

    def close(self) -> None:
        self.resampler = None  # it has threads
        self.container.close()

    def skip(self, frames: int) -> None:
        import av

        at_s = frames / self.rate_hz
        if self.kind not in SEEKABLE or not SEEK_MARGIN_S < at_s < self.about_s:
            super().skip(frames)
            return
        try:
            first = next(self.container.decode(self.track))
            next(self._gap_before(first), None)  # sets the start of times
            self.container.seek(round((self.first_s + at_s - SEEK_MARGIN_S) * av.time_base))
        except (av.error.FFmpegError, IndexError, StopIteration) as error:
            raise BrokenOff(f"FFmpeg: {error}") from None
        self.position, self.first = None, frames

    def pieces(self) -> Iterator[np.ndarray]:
        import av

        form = (self.track.codec_context.layout.name, self.rate_hz)
        resampled: Any = None
        try:
            for packet in self.container.demux(self.track):
                try:
                    frames = packet.decode()
                except av.error.FFmpegError:  # FFmpeg has many errors for damage
                    self.lost_s += float((packet.duration or 0) * (packet.time_base or 0))
                    continue
                for frame in frames:
                    yield from self._gap_before(frame)
                    frame_form = (frame.layout.name, frame.sample_rate)
                    if frame_form == form and not frame.format.name.startswith("s64"):
                        yield from self._from_first(_samples(frame))
                        continue
                    if frame_form != resampled:  # recordings of two kinds were concatenated
                        resampled = frame_form
                        self.resampler = av.AudioResampler("fltp", *form)
                    frame.pts = None
                    for part in self.resampler.resample(frame):
                        yield from self._from_first(_samples(part))
        except av.error.FFmpegError as error:
            raise BrokenOff(f"FFmpeg: {error.strerror}") from None
        except IndexError:  # PyAV has no such track
            raise BrokenOff("a track appears that its header lacks") from None
        if self.missing_s:
            raise BrokenOff("its last page is truncated")

    def _gap_before(self, frame: Any) -> Iterator[np.ndarray]:
        """Yield silence up to the time of a frame, if the previous one ended before that."""
        if frame.pts is None or self.kind not in SEEKABLE:
            return
        time_s = float(frame.pts * frame.time_base)
        at = round((time_s - self.first_s) * self.rate_hz)
        if self.position is None:
            self.position = at
        gap = at - self.position
        if gap < MIN_MISSING_S * self.rate_hz:
            if self.position == 0:
                self.first_s = time_s
        elif at <= (self.about_s * self.rate_hz or self.position + MOST_GAP_S * self.rate_hz):
            if self.kind == "flac":  # it has no gaps of its own
                self.lost_s += gap / self.rate_hz
            elif self.position and at > self.first:
                self.gaps_s.append((self.position / self.rate_hz, gap / self.rate_hz))
            for start in range(0, gap, PIECE):
                silence = np.zeros((min(PIECE, gap - start), self.channels), np.float32)
                yield from self._from_first(silence)

    def _from_first(self, piece: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the next piece from the frame `first` on."""
        if self.position is None:
            return
        early = self.first - self.position
        self.position += len(piece)
        if early < len(piece):
            yield piece[max(early, 0) :]


def _samples(frame: Any) -> np.ndarray:
    """Samples of a frame of PyAV, (n, channels) float32."""
    values = frame.to_ndarray()
    values = values.T if frame.format.is_planar else values.reshape(-1, len(frame.layout.channels))
    if values.dtype.kind in "iu":
        full = 2.0 ** (8 * values.itemsize - 1)
        return (values / full - (values.dtype.kind == "u")).astype(np.float32)
    return values.astype(np.float32, copy=False)


def _reader(sound: Sound) -> SoundReader:
    """The first reader that can read a recording; ValueError if none can."""
    name = sound.path.name
    try:
        return _libsndfile_reader(sound, EXACT) or FFmpegReader(sound)
    except ImportError:
        raise ValueError(f"audio: {name} needs PyAV: pip install av.") from None
    except ValueError as error:
        other = _libsndfile_reader(sound, (b"",))  # e.g. WAV after a tag
        if other is not None:
            return other
        raise ValueError(f"audio: {name} cannot be read (FFmpeg: {error}).") from None


def open_sound(sound: Sound) -> SoundReader:
    """The opened recording, at its first sample even if only a part is wanted.

    Its content decides, not its name: libsndfile reads files whose header states their length,
    FFmpeg's libraries (PyAV) read everything else.

    Raises:
        ValueError: It is not a sound file; the message is one line.
    """
    path = sound.path
    if sound.error:
        raise ValueError(sound.error)
    if sound.data is None:
        _expect_file(path)
    else:
        expect(len(sound.data) > 0, "audio", "a sound file", f"0 bytes in {path.name}")
    reader = _reader(sound)
    usable = 100 <= reader.rate_hz <= 1_000_000
    if not usable:
        reader.close()
    expect(usable, "audio", "100 to 1,000,000 Hz", f"{reader.rate_hz} Hz in {path.name}")
    return reader


def _libsndfile_reader(sound: Sound, begins: tuple[bytes, ...]) -> SoundReader | None:
    """libsndfile's reader, for a file with these first bytes and a stated length; else None."""
    import soundfile

    with bytes_of(sound) as source:
        if not source.read(4).startswith(begins) or has_sound_after_data(source):
            return None
    try:
        file = soundfile.SoundFile(stored(sound))
    except (soundfile.LibsndfileError, TypeError):  # no codec; a name that ends in .raw
        return None
    # libsndfile misreads float32 in W64 as integers
    wrong = file.subtype.startswith("MPEG") or (file.format, file.subtype) == ("W64", "PCM_32")
    if 0 < file.frames < UNKNOWN_FRAMES and not wrong:
        return LibsndfileReader(file)
    file.close()
    return None


def expect_whole(path: Path) -> None:
    """ValueError, in one line, unless libsndfile, and so lhotse, reads the whole sound file.

    The last sample is read, since the header of a truncated FLAC file states its original length.
    Files that may hold several recordings are decoded to their end.
    """
    import soundfile

    try:
        with open_sound(Sound(path)) as file, soundfile.SoundFile(stored(Sound(path))) as theirs:
            stated, readable = file.frames, theirs.frames
            if isinstance(file, FFmpegReader) and file.kind != "flac":
                stated = 0
                while len(samples := file.read(2**20)):
                    stated += len(samples)
            theirs.seek(max(0, readable - 1))
            same = abs(readable - stated) < MIN_MISSING_S * file.rate_hz
            complete = file.missing_s == 0 and file.lost_s < MIN_MISSING_S
            whole = same and complete and len(theirs.read(1)) == min(1, readable)
    except (soundfile.LibsndfileError, BrokenOff):
        whole = False
    expect_not_cut(whole, path)


def expect_not_cut(whole: bool, path: Path) -> None:
    """ValueError for a truncated file."""
    remedy = f"The file is truncated, or its header is wrong. {CONVERT}"
    expect(whole, "audio", "a whole file", f"a part of {path.name}", remedy)


def _expect_file(path: Path) -> None:
    """ValueError unless `path` is a readable file that is not empty."""
    name = repr(str(path))
    try:
        if path.is_dir():
            os.scandir(path).close()
        elif path.is_file():
            path.open("rb").close()
    except OSError as error:
        why = f"{name}, which cannot be read ({error.strerror})"
        expect(False, "audio", "a file or folder with permission to read it", why)
    wanted = "a sound file, or a folder with some"
    expect(not path.is_dir(), "audio", wanted, name, "There is none in it.")
    expect(path.exists(), "audio", "a sound file", f"none at {name}", "Check the path.")
    expect(path.is_file(), "audio", "a sound file", name)
    expect(path.stat().st_size > 0, "audio", "a sound file", f"0 bytes in {path.name}")
