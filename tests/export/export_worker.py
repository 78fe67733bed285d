"""What engines and clients compute of exported models, by the Python of `make peers`.

    .venv-peers/bin/python -P export_worker.py parity FOLDER
    .venv-peers/bin/python -P export_worker.py client RECORDINGS EXPORTED...

`parity` exports every case of `cases` and writes FOLDER/parity.json: for each engine the largest error of log-probabilities, and
tokens beside ours. `client` prints the texts of all recordings in a folder as sherpa-onnx finds them, a JSON line for each export.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
BATCHES = ((2, 167), (1, 64), (3, 1), (1, 9), (4, 333), (5, 17))  # B and T


def cases():
    """Small models of every encoder and predictor: name to config."""
    from asrkit.models import (
        ConvConfig,
        CTCConfig,
        FastConformerConfig,
        JasperConfig,
        LSTMConfig,
        Stage,
        StatelessConfig,
        TransducerConfig,
    )

    fast = FastConformerConfig(
        width=32, layers=2, subsampling_channels=16, scale_input=True
    )
    short = FastConformerConfig(width=32, layers=1, subsampling_channels=16)
    near = FastConformerConfig(
        width=32, layers=1, subsampling_channels=16, context=(4, 4)
    )
    stages = (
        Stage(channels=16, kernel=11, stride=2, repeat=1, dense=False),
        Stage(channels=16, kernel=11, repeat=2),
        Stage(channels=24, kernel=13, repeat=2),
        Stage(channels=32, kernel=1, repeat=1, dense=False),
    )
    conv = ConvConfig(width=32, layers=3)
    return {
        "ctc-fastconformer": CTCConfig(vocab_size=28, encoder=fast),
        "ctc-near": CTCConfig(vocab_size=28, encoder=near),
        "ctc-jasper": CTCConfig(
            vocab_size=28, encoder=JasperConfig(bins=80, stages=stages)
        ),
        "rnnt-lstm": TransducerConfig(
            vocab_size=28, encoder=conv, predictor=LSTMConfig(width=24, layers=2)
        ),
        "rnnt-stateless-1": TransducerConfig(
            vocab_size=28, encoder=conv, predictor=StatelessConfig(context=1)
        ),
        "tdt-fastconformer": TransducerConfig(
            vocab_size=28,
            encoder=short,
            predictor=StatelessConfig(context=3),
            durations=(0, 1, 2, 4),
        ),
    }


def checkpoint_of(config):
    """A model whose weights differ enough that tokens do; the same in every process."""
    from asrkit.features import FeatureConfig
    from asrkit.models import Checkpoint, make_model
    from asrkit.text import CharTokenizer

    torch.manual_seed(0)
    model = make_model(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("output.weight", "output.bias")):
                weight.mul_(6)
            elif "lstm" in name:
                weight.mul_(4)  # they start small
        for part in model.modules():
            if isinstance(part, torch.nn.BatchNorm1d):
                part.running_mean.uniform_(-0.2, 0.2)
                part.running_var.uniform_(0.5, 1.5)
        _let_all_tokens_win(model)
    return Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), {})


def _let_all_tokens_win(model):
    """Centre the logits, so that no token is the likeliest everywhere."""
    from asrkit.models import CTCModel

    encoded, ends = model.encoder(*batch(4, 333))
    frames = torch.cat([row[:n] for row, n in zip(encoded, ends.tolist(), strict=True)])
    if isinstance(model, CTCModel):
        model.output.bias -= model.output(frames).mean(0)
        return
    targets = torch.arange(model.blank)[None]
    rows = model.rows(targets)[0]
    model.output.bias -= model.join(
        model.encoder_projection(frames)[:, None], rows
    ).mean((0, 1))
    if not model.durations:  # else a label is likeliest on every frame, ten times
        model.output.bias[model.blank] += 1.0


def batch(B, T, padding=float("nan")):
    """Features (B, T, 80) with `padding` behind each length, and the lengths."""
    generator = torch.Generator().manual_seed(B * 1000 + T)
    features = torch.randn(B, T, 80, generator=generator)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    behind = torch.arange(T) >= lengths[:, None]
    return features.masked_fill(behind[..., None], padding), lengths


@torch.inference_mode()
def scores(model, features, lengths):
    """Log-probabilities of labels (B, T, ..., V) within each utterance, as one list of rows."""
    from asrkit.models import CTCModel

    encoded, ends = model.encoder(features, lengths)
    if isinstance(model, CTCModel):
        found = model.output(encoded).log_softmax(-1)
    else:
        targets = torch.tensor([[3, 7, 1]]).expand(len(features), -1)
        logits = model.join(
            model.encoder_projection(encoded)[:, :, None], model.rows(targets)[:, None]
        )
        found = logits[..., : model.blank + 1].log_softmax(-1)
    return torch.cat(
        [row[:n].flatten() for row, n in zip(found, ends.tolist(), strict=True)]
    ), ends


def client_tokens(folder, features, lengths):
    """Greedy tokens of each utterance by the loop of a client: encoder, decoder and joiner in ONNX Runtime, nothing of ours."""
    import onnxruntime

    def session(name):
        files = sorted(folder.glob(f"{name}*.onnx"))
        return onnxruntime.InferenceSession(
            str(files[0]), providers=["CPUExecutionProvider"]
        )

    encoder, decoder, joiner = session("encoder"), session("decoder"), session("joiner")
    metadata = encoder.get_modelmeta().custom_metadata_map
    V = int(metadata["vocab_size"]) + 1
    shape = (int(metadata["pred_rnn_layers"]), 1, int(metadata["pred_hidden"]))
    names = [one.name for one in decoder.get_inputs()]
    signal = features.transpose(1, 2).contiguous().numpy()
    frames, ends = encoder.run(
        None,
        dict(zip(("audio_signal", "length"), (signal, lengths.numpy()), strict=True)),
    )

    def predict(token, states):
        values = [np.array([[token]], np.int32), np.array([1], np.int32), *states]
        found, _, *states = decoder.run(None, dict(zip(names, values, strict=True)))
        return found, states

    rows = []
    for row, end in zip(frames, ends, strict=True):
        states = [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
        prediction, states = predict(V - 1, states)
        tokens, t, on_frame = [], 0, 0
        while t < end:
            inputs = {
                "encoder_outputs": row[None, :, t : t + 1],
                "decoder_outputs": prediction,
            }
            logits = joiner.run(None, inputs)[0].reshape(-1)
            token = int(logits[:V].argmax())
            step = int(logits[V:].argmax()) if len(logits) > V else int(token == V - 1)
            if token != V - 1:
                tokens.append(token)
                prediction, states = predict(token, states)
                on_frame += 1
            if on_frame == 10 or (token == V - 1 and step == 0):
                step = max(step, 1)
            if step:
                on_frame = 0
            t += step
        rows.append(tokens)
    return rows


def parity(folder):
    """Export every case, and compare what engines compute with what we do."""
    from asrkit.export import export, onnx_files
    from asrkit.models import CTCModel
    from asrkit.transcribe import Recognizer, load_exported

    found = {}
    inline = onnx_files.INLINE_BYTES
    for name, config in cases().items():
        checkpoint = checkpoint_of(config)
        # One case leaves as models of more than 2 GB do, with weights in a file of their own.
        onnx_files.INLINE_BYTES = 1000 if name == "ctc-fastconformer" else inline
        exports = {"onnx": export(checkpoint, folder / name, format="onnx")}
        if name in ("ctc-fastconformer", "tdt-fastconformer"):
            exports["openvino"] = export(
                checkpoint, folder / f"{name}-ir", format="openvino"
            )
        if name == "ctc-fastconformer":
            for format_ in ("onnx", "openvino"):
                kind = f"{format_}-int8"
                exports[kind] = export(
                    checkpoint, folder / f"{name}-{kind}", format=format_, int8=True
                )
        ours = Recognizer(checkpoint.model)
        for kind, exported in exports.items():
            for engine in (
                ("onnxruntime", "openvino")
                if kind.startswith("onnx")
                else ("openvino",)
            ):
                theirs = Recognizer(
                    load_exported(exported.path, engine, threads=1).model
                )
                errors, tokens, wanted = [], [], []
                for B, T in BATCHES:
                    features, lengths = batch(B, T)
                    expected, ends = scores(checkpoint.model, features, lengths)
                    got, got_ends = scores(theirs.model, features, lengths)
                    assert ends.tolist() == got_ends.tolist()
                    errors.append((got - expected).abs().max().item())
                    wanted += ours.decode(*ours.encode(features, lengths)).tokens()
                    tokens += theirs.decode(*theirs.encode(features, lengths)).tokens()
                found[f"{name} {kind} {engine}"] = {
                    "error": max(errors),
                    "tokens": tokens,
                    "wanted": wanted,
                }
            if not isinstance(checkpoint.model, CTCModel) and kind == "onnx":
                tokens = [
                    row
                    for B, T in BATCHES
                    for row in client_tokens(exported.path, *batch(B, T))
                ]
                found[f"{name} {kind} client"] = {
                    "error": 0.0,
                    "tokens": tokens,
                    "wanted": wanted,
                }
    (folder / "parity.json").write_text(json.dumps(found))


def client(folder, recordings):
    """The text of each recording, by sherpa-onnx as its users call it."""
    import sherpa_onnx
    import soundfile

    manifest = json.loads((folder / "asrkit.json").read_text())
    graphs = {name: str(folder / file) for name, file in manifest["graphs"].items()}
    tokens = str(folder / "tokens.txt")
    if manifest["head"] == "ctc":
        recognizer = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(
            model=graphs["model"], tokens=tokens
        )
    else:
        recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(
            encoder=graphs["encoder"],
            decoder=graphs["decoder"],
            joiner=graphs["joiner"],
            tokens=tokens,
            model_type="nemo_transducer",
        )
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
