"""Whole programs that transcribe files, each as its users call it, in a process of its own.

    $ python peer_programs.py sherpa_onnx_ctc_float32
    {"model": "onnx", "threads": 2, "do": "prepare", "first": "a.wav"}
    {"version": "sherpa-onnx 2.0.1"}
    {"model": "onnx", "threads": 2, "do": "observe", "files": ["a.wav", "b.wav"]}
    {"wall_ms": ..., "cpu_ms": ..., "texts": ["..."], "peak_B": ...}

The tables PROGRAMS, here and in whisper_programs.py, have by name a package, the form of the model
that it reads, and a function that loads that and returns what transcribes a list of files. To
"prepare" loads the model and transcribes one file, which does not count. `peak_B` is the most
memory that the process held since it began, Python and engine included. A program imports no more
than it needs: sherpa-onnx, ONNX Runtime, faster-whisper, OpenVINO GenAI and whisper.cpp do without
torch.

    $ python peer_programs.py NAME MODEL THREADS FILE     # loads, and prints the text of one file
    $ python peer_programs.py --write FORM SOURCE TARGET  # a model in another form
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

CHECKOUT = Path(__file__).resolve().parents[4]
MOST_ON_A_FRAME = 10  # labels of an RNN-T, which is what sherpa-onnx and NeMo have too
BATCH = 8  # files at once, where a program takes several
Texts = list[str]
Transcribe = Callable[[Sequence[str]], Texts]


def samples_of(file: str) -> np.ndarray:
    """Samples (S,) float32 of a WAV file."""
    import wave

    with wave.open(file) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768


def asrkit(model: str, threads: int, precision: str) -> Transcribe:
    """asrkit's own recogniser, by the function that its users call."""
    import torch

    from asrkit.memory import share_memory_pool
    from asrkit.models import load_checkpoint
    from asrkit.transcribe import PipelineConfig, Recognizer, transcribe

    torch.set_num_threads(threads)
    share_memory_pool()  # as the command does
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32  # int8 casts the rest
    checkpoint = load_checkpoint(model, dtype=dtype)
    config = PipelineConfig(precision=precision)  # type: ignore[arg-type]
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)

    def call(files: Sequence[str]) -> Texts:
        found = [*transcribe(checkpoint, [*map(Path, files)], recognizer=recognizer)]
        errors = [one.error for one in found if one.error]
        assert not errors, errors[0]
        return [one.text for one in found]

    return call


def sherpa_onnx(model: str, threads: int, head: str) -> Transcribe:
    """sherpa-onnx's offline recogniser, file by file."""
    import sherpa_onnx as package

    graphs = {path.name.partition(".")[0]: str(path) for path in Path(model).glob("*.onnx")}
    settings = {"tokens": f"{model}/tokens.txt", "num_threads": threads}
    if head == "ctc":
        recognizer = package.OfflineRecognizer.from_nemo_ctc(model=graphs["model"], **settings)
    else:
        recognizer = package.OfflineRecognizer.from_transducer(
            **graphs, model_type="nemo_transducer", **settings
        )

    def text(file: str) -> str:
        stream = recognizer.create_stream()
        stream.accept_waveform(16_000, samples_of(file))
        recognizer.decode_stream(stream)
        return stream.result.text

    return lambda files: [*map(text, files)]


class Features:
    """Log-mel features in NumPy, as NeMo defines them: (1, F, T) and their length (1,).

    Args:
        bands: the mel filters (257, F).
    """

    def __init__(self, bands: np.ndarray) -> None:
        self.bands = bands
        self.window = np.pad(np.hanning(400), 56).astype(np.float32)

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features of samples (S,)."""
        T = len(samples) // 160
        loud = np.append(samples[:1], samples[1:] - 0.97 * samples[:-1])
        framed = np.lib.stride_tricks.sliding_window_view(np.pad(loud, 256), 512)[::160][:T]
        power = np.abs(np.fft.rfft(framed * self.window)) ** 2
        mel = np.log(power.astype(np.float32) @ self.bands + 2.0**-24)
        normal = (mel - mel.mean(0)) / (mel.std(0, ddof=1) + 1e-5)
        return normal.T[None].astype(np.float32), np.array([T])


def onnxruntime(model: str, threads: int, head: str) -> Transcribe:
    """A plain script with ONNX Runtime: features in NumPy, then argmax, or a loop over labels."""
    import onnxruntime as package

    options = package.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    graphs = {
        path.name.partition(".")[0]: package.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        for path in Path(model).glob("*.onnx")
    }
    lines = Path(model, "tokens.txt").read_text(encoding="utf-8").splitlines()
    pieces = [line.rpartition(" ")[0] for line in lines]
    features = Features(np.load(f"{model}/bands.npy"))
    labels_of = _ctc_labels if head == "ctc" else _transducer_labels

    def text(file: str) -> str:
        signal, length = features(samples_of(file))
        labels = labels_of(graphs, {"audio_signal": signal, "length": length}, len(pieces) - 1)
        return "".join(pieces[label] for label in labels).replace("▁", " ").strip()

    return lambda files: [*map(text, files)]


def _ctc_labels(graphs: dict[str, Any], inputs: dict[str, Any], blank: int) -> list[int]:
    """Greedy labels: repeats become one, blanks go."""
    scores, lengths = graphs["model"].run(None, inputs)
    best = scores[0, : lengths[0]].argmax(-1)
    kept = best[np.append(True, best[1:] != best[:-1])]
    return kept[kept != blank].tolist()


def _transducer_labels(graphs: dict[str, Any], inputs: dict[str, Any], blank: int) -> list[int]:
    """Greedy labels, frame by frame; the predictor runs behind each label."""
    encoded, lengths = graphs["encoder"].run(None, inputs)
    decoder, joiner = graphs["decoder"], graphs["joiner"]
    names = [one.name for one in decoder.get_inputs()]
    zeros = np.zeros((decoder.get_inputs()[2].shape[0], 1, decoder.get_inputs()[2].shape[2]))
    state = [zeros.astype(np.float32)] * 2

    def follow(label: int, state: list[np.ndarray]) -> list[np.ndarray]:
        target = np.array([[label]], np.int32)
        fed = dict(zip(names, [target, np.ones(1, np.int32), *state], strict=True))
        predicted, _, *states = decoder.run(None, fed)
        return [predicted, *states]

    predicted, *state = follow(blank, state)
    labels: list[int] = []
    for t in range(lengths[0]):
        frame = np.ascontiguousarray(encoded[:, :, t : t + 1])
        for _ in range(MOST_ON_A_FRAME):
            given = {"encoder_outputs": frame, "decoder_outputs": predicted}
            best = int(joiner.run(None, given)[0].argmax())
            if best == blank:
                break
            labels.append(best)
            predicted, *state = follow(best, state)
    return labels


def transformers(model: str, threads: int, batch: int) -> Transcribe:
    """transformers' pipeline, which takes arrays where there is no ffmpeg."""
    import torch
    from transformers import pipeline

    torch.set_num_threads(threads)
    recognizer = pipeline("automatic-speech-recognition", model=model, batch_size=batch)

    def call(files: Sequence[str]) -> Texts:
        sounds = [{"raw": samples_of(file), "sampling_rate": 16_000} for file in files]
        return [" ".join(one["text"].split()) for one in recognizer(sounds)]

    return call


def nemo(model: str, threads: int, batch: int) -> Transcribe:
    """NeMo's `transcribe`."""
    import torch
    from nemo.collections.asr.models import ASRModel
    from nemo.utils import logging

    torch.set_num_threads(threads)
    logging.setLevel(logging.ERROR)
    recognizer = ASRModel.restore_from(model, map_location="cpu").eval()

    def call(files: Sequence[str]) -> Texts:
        found = recognizer.transcribe([*files], batch_size=batch, num_workers=0, verbose=False)
        return [one.text for one in found]

    return call


def write_onnx(source: str, target: str, int8: bool) -> None:
    """A checkpoint as `asrkit export` writes it, and the mel filters for a plain script."""
    from asrkit.export import export
    from asrkit.features import FeatureConfig, mel_bands
    from asrkit.models import load_checkpoint

    checkpoint = load_checkpoint(source)
    export(checkpoint, target, format="onnx", int8=int8)
    np.save(f"{target}/bands.npy", mel_bands(FeatureConfig(**checkpoint.features)).numpy())


def write_transformers(source: str, target: str) -> None:
    """A CTC checkpoint as a folder of transformers' Parakeet."""
    from peer_encoders import load, transformers_settings
    from tokenizers import Tokenizer, decoders, models
    from transformers import (
        ParakeetCTCConfig,
        ParakeetFeatureExtractor,
        ParakeetForCTC,
        ParakeetTokenizer,
    )

    from asrkit.models import load_checkpoint
    from asrkit.models.checkpoints.huggingface import our_name

    checkpoint: Any = load_checkpoint(source)
    sizes = vars(checkpoint.model.config.encoder)
    blank = checkpoint.model.blank
    encoder = transformers_settings(sizes)
    config = ParakeetCTCConfig(vocab_size=blank + 1, pad_token_id=blank, encoder_config=encoder)
    model = ParakeetForCTC(config)
    load(model, "", our_name, checkpoint.model.state_dict())
    model.save_pretrained(target)
    ParakeetFeatureExtractor(feature_size=sizes["bins"]).save_pretrained(target)
    scores = [(piece, -float(n)) for n, piece in enumerate(checkpoint.tokenizer.pieces())]
    words = Tokenizer(models.Unigram([*scores, ("<pad>", 0.0)], unk_id=0))
    words.decoder = decoders.Metaspace()
    tokenizer = ParakeetTokenizer(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(target)


def write_nemo(source: str, target: str) -> None:
    """A CTC or RNN-T checkpoint as NeMo's archive."""
    import tempfile

    from nemo.collections.asr.models import EncDecCTCModelBPE, EncDecRNNTBPEModel
    from omegaconf import OmegaConf, open_dict
    from peer_encoders import load, nemo_settings

    from asrkit.models import CTCModel, load_checkpoint
    from asrkit.models.checkpoints.nemo import our_name

    checkpoint: Any = load_checkpoint(source)
    model = checkpoint.model
    sizes = vars(model.config.encoder)
    modules = "nemo.collections.asr.modules."
    V = model.blank
    features = {"window_size": 0.025, "features": sizes["bins"], "n_fft": 512, "dither": 0.0}
    config = {
        "sample_rate": 16_000,
        "preprocessor": {"_target_": f"{modules}AudioToMelSpectrogramPreprocessor", **features},
        "encoder": {"_target_": f"{modules}ConformerEncoder", **nemo_settings(sizes)},
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": MOST_ON_A_FRAME}},
    }
    kind = EncDecCTCModelBPE
    if isinstance(model, CTCModel):
        width = sizes["width"]
        config["decoder"] = {
            "_target_": f"{modules}ConvASRDecoder",
            "feat_in": width,
            "num_classes": V,
            "vocabulary": [],
        }
    else:
        kind = EncDecRNNTBPEModel
        width = model.config.predictor.width
        net = {"pred_hidden": width, "pred_rnn_layers": model.config.predictor.layers}
        joint = {"joint_hidden": model.config.joint_width, "activation": "relu"}
        joint |= {"encoder_hidden": sizes["width"], "pred_hidden": width}
        config["model_defaults"] = {"enc_hidden": sizes["width"], **net}
        config["decoder"] = {"_target_": f"{modules}RNNTDecoder", "prednet": net, "vocab_size": V}
        config["joint"] = {
            "_target_": f"{modules}RNNTJoint",
            "jointnet": joint,
            "num_classes": V,
            "vocabulary": [],
        }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(checkpoint.tokenizer.model)
        lines = (f"{piece}\n" for piece in checkpoint.tokenizer.pieces())
        Path(folder, "vocab.txt").write_text("".join(lines))
        config["tokenizer"] = {"dir": folder, "type": "bpe"}
        theirs = kind(OmegaConf.create(config)).eval()
        for part in {"encoder", "decoder", "joint"} & config.keys():
            load(getattr(theirs, part), f"{part}.", our_name, model.state_dict())
        with open_dict(theirs.cfg):  # `transcribe` looks into it
            theirs.cfg.validation_ds = {"manifest_filepath": None}
        theirs.save_to(target)


# form: what writes it, to a path of that name
FORMS = {
    "onnx": partial(write_onnx, int8=False),
    "onnx-int8": partial(write_onnx, int8=True),
    "parakeet": write_transformers,
    "model.nemo": write_nemo,
}


def _of_heads(package: str, make: Any) -> dict[str, tuple[str, str, Any]]:
    """A package that reads ONNX: each head, in float32 and int8."""
    return {
        f"{make.__name__}_{head}_{precision}": (package, form, partial(make, head=head))
        for head in ("ctc", "rnnt")
        for precision, form in (("float32", "onnx"), ("int8", "onnx-int8"))
    }


# name: package, form of the model ("" as asrkit loads it), and what loads it
PROGRAMS = {
    **{
        f"asrkit_{precision}": ("asrkit-workbench", "", partial(asrkit, precision=precision))
        for precision in ("float32", "bfloat16", "int8")
    },
    **_of_heads("sherpa-onnx", sherpa_onnx),
    **_of_heads("onnxruntime", onnxruntime),
    "transformers_ctc": ("transformers", "parakeet", partial(transformers, batch=BATCH)),
    "nemo": ("nemo_toolkit", "model.nemo", partial(nemo, batch=BATCH)),
}


def peak_B() -> int | None:
    """The most bytes that this process held since it began; None but on Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def program(name: str) -> tuple[str, str, Callable[[str, int], Transcribe]]:
    """The program of that name, here or of a Whisper."""
    import whisper_programs

    return {**PROGRAMS, **whisper_programs.PROGRAMS}[name]


def serve(name: str) -> None:
    """Answer requests until they end. What a program prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    package, _, make = program(name)
    call: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                call = make(request["model"], request["threads"])
                call([request["first"]])
                answer: dict[str, Any] = {"version": f"{package} {version(package)}"}
            else:
                start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
                texts = call(request["files"])
                cpu_ns = time.process_time_ns() - cpu_start
                wall_ns = time.perf_counter_ns() - start
                answer = {"wall_ms": wall_ns / 1e6, "cpu_ms": cpu_ns / 1e6}
                answer |= {"texts": texts, "peak_B": peak_B()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main(arguments: list[str]) -> None:
    """Write a form, transcribe one file, or answer requests."""
    sys.path.insert(1, str(CHECKOUT))
    os.environ["HF_HUB_OFFLINE"] = "1"
    match arguments:
        case ["--write", form, source, target]:
            import torch
            import whisper_forms

            with torch.no_grad():
                {**FORMS, **whisper_forms.FORMS}[form](source, target)
        case [name, model, threads, file]:
            print(*program(name)[2](model, int(threads))([file]), flush=True)
        case [name]:
            serve(name)


if __name__ == "__main__":
    main(sys.argv[1:])
