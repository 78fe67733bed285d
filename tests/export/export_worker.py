"""What engines and clients compute of exported models, by the Python of `make peers`.

    .venv-peers/bin/python -P export_worker.py parity FOLDER
    .venv-peers/bin/python -P export_worker.py client RECORDINGS EXPORTED...

`parity` exports every case of `cases` and writes FOLDER/parity.json: for each engine the largest error of log-probabilities, and
tokens and ours. `client` prints sherpa-onnx's texts of all recordings in a folder, a JSON line for each export.
"""

import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
BATCHES = ((2, 167), (1, 64), (3, 1), (1, 9), (4, 333), (5, 17))  # B and T
KINDS = {  # the exported part of each case
    "ctc-near": ("onnx", "onnx-int8", "openvino-int8"),
    "ctc-jasper": ("onnx",),
    "rnnt-lstm": ("onnx",),
    "tdt-stateless": ("onnx", "openvino"),
}


def cases():
    """Small models of every encoder and predictor: name to config."""
    from asrkit.models import (
        ConvConfig,
        CTCConfig,
        JasperConfig,
        LSTMConfig,
        Stage,
        StatelessConfig,
        presets,
    )

    tiny = presets.tiny(vocab_size=28)
    stages = (
        Stage(channels=16, kernel=11, stride=2, repeat=1, dense=False),
        Stage(channels=24, kernel=13, repeat=2),
    )
    encoders = {
        "ctc-near": replace(tiny.encoder, context=(4, 4)),
        "ctc-jasper": JasperConfig(bins=80, stages=stages),
    }
    ctc = {
        name: CTCConfig(vocab_size=28, encoder=one) for name, one in encoders.items()
    }
    conv = ConvConfig(width=32, layers=3)
    lstm = LSTMConfig(width=24, layers=2)
    scaled = replace(tiny.encoder, scale_input=True)
    return ctc | {
        "rnnt-lstm": replace(tiny, encoder=conv, predictor=lstm, durations=()),
        "tdt-stateless": replace(
            tiny, encoder=scaled, predictor=StatelessConfig(context=3)
        ),
    }


@torch.no_grad()
def checkpoint_of(config):
    """A model whose weights differ enough that tokens do; the same in every process."""
    from asrkit.features import FeatureConfig
    from asrkit.models import Checkpoint, make_model
    from asrkit.text import CharTokenizer

    torch.manual_seed(0)
    model = make_model(config).eval()
    for name, weight in model.named_parameters():
        if name.startswith("output") or "lstm" in name:
            weight.mul_(6)  # they start small
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm1d):
            part.running_mean.uniform_(-0.2, 0.2)
            part.running_var.uniform_(0.5, 1.5)
    labels = (torch.arange(28).expand(4, -1),) * hasattr(model, "join")
    scores = model(*batch(4, 333, padding=0.0), *labels)[0]
    model.output.bias -= scores.flatten(0, -2).mean(
        0
    )  # no token is likeliest everywhere
    if labels and not model.durations:
        model.output.bias[-1] += 1.0  # otherwise a label is likeliest on every frame
    return Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), {})


def batch(B, T, padding=7.0):
    """Features (B, T, 80) with `padding` after each length, and the lengths."""
    generator = torch.Generator().manual_seed(B * 1000 + T)
    features = torch.randn(B, T, 80, generator=generator)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    beyond = torch.arange(T) >= lengths[:, None]
    return features.masked_fill(beyond[..., None], padding), lengths


@torch.inference_mode()
def scores(model, features, lengths):
    """Log-probabilities of a CTC model or projected frames of a transducer within each utterance, as one row; the lengths."""
    encode = getattr(model, "encode", model)
    found, ends, *_ = encode(features, lengths)
    rows = zip(found, ends.tolist(), strict=True)
    return torch.cat([row[:n].flatten() for row, n in rows]), ends


def client_tokens(folder, features, lengths):
    """Greedy tokens of each utterance by the loop of a client: encoder, decoder and joiner in ONNX Runtime, nothing of ours."""
    from onnxruntime import InferenceSession

    encoder, decoder, joiner = (
        InferenceSession(folder / f"{name}.onnx")
        for name in ("encoder", "decoder", "joiner")
    )
    metadata = encoder.get_modelmeta().custom_metadata_map
    blank = int(metadata["vocab_size"])
    shape = (int(metadata["pred_rnn_layers"]), 1, int(metadata["pred_hidden"]))
    names = [one.name for one in decoder.get_inputs()]
    signal = features.transpose(1, 2).contiguous().numpy()
    frames, ends = encoder.run(
        None, {"audio_signal": signal, "length": lengths.numpy()}
    )

    def predict(token, states):
        values = [np.array([[token]], np.int32), np.array([1], np.int32), *states]
        found, _, *states = decoder.run(None, dict(zip(names, values, strict=True)))
        return found, states

    rows = []
    for row, end in zip(frames, ends, strict=True):
        prediction, states = predict(blank, [np.zeros(shape, np.float32)] * 2)
        tokens, t, on_frame = [], 0, 0
        while t < end:
            frame = row[None, :, t : t + 1]
            inputs = {"encoder_outputs": frame, "decoder_outputs": prediction}
            logits = joiner.run(None, inputs)[0].reshape(-1)
            token = int(logits[: blank + 1].argmax())
            durations = logits[blank + 1 :]
            step = int(durations.argmax()) if len(durations) else int(token == blank)
            if token != blank:
                tokens.append(token)
                prediction, states = predict(token, states)
                on_frame += 1
            if on_frame == 10 or token == blank:
                step = max(step, 1)
            on_frame *= step == 0
            t += step
        rows.append(tokens)
    return rows


def parity(folder):
    """Export every case, and compare what engines compute with what we do."""
    from asrkit.export import export
    from asrkit.transcribe import Recognizer

    found = {}
    for name, config in cases().items():
        checkpoint = checkpoint_of(config)
        ours = Recognizer(checkpoint.model)
        for kind in KINDS[name]:
            format_, *int8 = kind.split("-")
            path = folder / f"{name}-{kind}"
            export(checkpoint, path, format=format_, int8=bool(int8))
            for engine in ("onnxruntime", "openvino")[format_ == "openvino" :]:
                found[f"{name} {kind} {engine}"] = compared(ours, path, engine)
        if not name.startswith("ctc"):
            path = folder / f"{name}-onnx"
            rows = [client_tokens(path, *batch(B, T)) for B, T in BATCHES]
            client = {"tokens": [*itertools.chain(*rows)]}
            found[f"{name} client"] = found[f"{name} onnx onnxruntime"] | client
    (folder / "parity.json").write_text(json.dumps(found))


def compared(ours, path, engine):
    """The largest error of log-probabilities by an engine, and its tokens and ours."""
    from asrkit.export import load_exported
    from asrkit.transcribe import Recognizer

    theirs = Recognizer(load_exported(path, engine).model)
    error, tokens, wanted = 0.0, [], []
    for B, T in BATCHES:
        signal = batch(B, T)
        expected, ends = scores(ours.model, *signal)
        got, got_ends = scores(theirs.model, *signal)
        assert ends.tolist() == got_ends.tolist()
        error = max(error, (got - expected).abs().max().item())
        wanted += ours.decode(*ours.encode(*signal)).tokens()
        tokens += theirs.decode(*theirs.encode(*signal)).tokens()
    return {"error": error, "tokens": tokens, "wanted": wanted}


def client(folder, recordings):
    """The text of each recording, by sherpa-onnx as its users call it."""
    import sherpa_onnx
    import soundfile

    graphs = {path.stem: str(path) for path in folder.glob("*.onnx")}
    graphs["tokens"] = str(folder / "tokens.txt")
    if "model" in graphs:
        recognizer = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(**graphs)
    else:
        kind = {"model_type": "nemo_transducer"}
        recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(**graphs, **kind)
    texts = []
    for path in recordings:
        samples, rate_hz = soundfile.read(path, dtype="float32")
        stream = recognizer.create_stream()
        stream.accept_waveform(rate_hz, samples)
        recognizer.decode_stream(stream)
        texts.append(stream.result.text)
    return texts


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    torch.set_num_threads(1)
    if sys.argv[1] == "parity":
        parity(Path(sys.argv[2]))
    else:
        recordings = sorted(Path(sys.argv[2]).iterdir())
        for folder in sys.argv[3:]:
            print(json.dumps(client(Path(folder), recordings)))
