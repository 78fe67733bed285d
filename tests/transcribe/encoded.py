"""Sound files of the codecs and containers of FFmpeg's libraries."""

import io

import av
import numpy as np
import soundfile
import torch

RATE, SECONDS = 16_000, 12
WAVE = torch.sin(torch.arange(RATE * SECONDS) ** 2 / 1e6).numpy()  # ever higher


class Pipe(io.RawIOBase):
    """A stream that cannot seek, so that no header is corrected at the end."""

    def __init__(self, path):
        self.file = path.open("wb")

    def writable(self):
        return True

    def write(self, data):
        return self.file.write(data)


def encode(path, kind, codec, wave=WAVE, rate=RATE, piped=False, more=None, **options):
    """A file of this container and codec; kind None: that of its suffix."""
    if codec == "vorbis":
        soundfile.write(str(path), wave, rate, format="OGG", subtype="VORBIS")
        return path
    into = Pipe(path) if piped else str(path)
    layout = "mono" if wave.ndim == 1 else "stereo"
    with av.open(into, "w", format=kind, options=options) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout, options=more or {})
        frame = av.AudioFrame.from_ndarray(
            np.atleast_2d(wave.T).astype(np.float32).copy(), "fltp", layout
        )
        frame.rate = rate
        context = stream.codec_context
        context.open()
        resampler = av.AudioResampler(context.format, layout, rate, context.frame_size)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            for packet in stream.encode(part):
                file.mux(packet)
    if piped:
        into.file.close()
    return path
