"""Results depend neither on torch's default dtype nor on its default device, which users may set.

Each case has a process of its own, since constants are kept. They are forks of one that has loaded other packages.
"""

import os
import subprocess
import sys

import pytest
import soundfile
import torch

from asrkit.models import Checkpoint, make_model, presets, save_checkpoint
from asrkit.text import CharTokenizer

SCRIPT = """
import os
import sys
from pathlib import Path

import jiwer, lhotse, numba, soundfile, tokenizers
import torch
import torch._dynamo

folder, *names = sys.argv[1:]
folder = Path(folder)
for name in names:
    if not os.fork():
        break
    if os.wait()[1]:
        sys.exit(f"{name} failed")
else:
    sys.exit()
if name == "meta":
    torch.set_default_device(name)
else:
    torch.set_default_dtype(getattr(torch, name))
from asrkit.data.augment import augment, spec_augment, warp_features
from asrkit.data.utterances import Utterances
from asrkit.decoders import NGram, WordNGram, ctc_alignment, ctc_beam
from asrkit.decoders.attention.beam import normalised
from asrkit.features import FeatureConfig, log_mel
from asrkit.losses import ctc_loss, rnnt_loss, rnnt_loss_lean, tdt_loss
from asrkit.models import attention_decoder, load_checkpoint, relative_attention, whisper
from asrkit.optim import Lamb, NovoGrad
from asrkit.text import CharTokenizer
from asrkit.transcribe import BeamOptions, PipelineConfig, Recognizer, WindowOptions, transcribe


def random(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def whole(*numbers):
    return torch.tensor(numbers, device="cpu")


found = {}
waves, lengths = random(2, 16_000) / 4, whole(16_000, 9000)
for window in ("hann", "hamming"):
    found[window] = log_mel(waves, lengths, config=FeatureConfig(window=window))
found["relative"] = relative_attention.relative_positions(9, -9, 12, waves)
found["sines"] = attention_decoder.sines(40, 12, waves), whisper.sines(40, 12, waves)
generator = torch.Generator().manual_seed(0)
found["augment"] = augment(waves, lengths, generator)
features = log_mel(waves, lengths)
found["masks"] = spec_augment(*features, generator)
found["warped"] = warp_features(*features, generator)
utterances = Utterances(
    waveforms=[(30_000 * waves[0]).short()], texts=["a b"], ids=["1"], speakers=["x"]
)
batch = utterances.batch([0], CharTokenizer())
found["batch"] = batch.waveforms, batch.sample_lengths, batch.targets

log_probs, frames = random(2, 12, 4).log_softmax(-1), whole(12, 9)
tokens, arpa = ["a", "b", "c", "<blank>"], folder / "lm.arpa"
words = ["a", "b", " ", "<blank>"]
for lm in (None, NGram.read(arpa, tokens), WordNGram.read(arpa, words)):
    texts = ctc_beam(log_probs, frames, lm=lm)
    found["beam", type(lm).__name__] = texts.parts()
found["normalised"] = normalised(log_probs[0, :2, 0], whole(7, 12))
found["aligned"] = tuple(ctc_alignment(log_probs, frames, texts))

targets, counts = whole([0, 1], [2, 0]), whole(2, 1)
halves = [random(2, 12, 8), random(2, 3, 8), random(6, 8), random(6)]
for loss, inputs, options in (
    (ctc_loss, [log_probs], {}),
    (rnnt_loss, [random(2, 12, 3, 6)], {}),
    (tdt_loss, [random(2, 12, 3, 6)], {"durations": (0, 1), "omega": 0.5}),
    (rnnt_loss_lean, halves, {"activation": "relu", "dropout": 0.1}),
):
    torch.manual_seed(0)
    inputs = [each.requires_grad_() for each in inputs]
    costs = loss(*inputs, targets, frames, counts, **options)
    found[loss.__name__] = costs, *torch.autograd.grad(costs.sum(), inputs)
for optimizer in (Lamb, NovoGrad):
    weight = torch.nn.Parameter(random(3))
    weight.grad = random(3)
    optimizer([weight], lr=0.1, betas=(0.9, 0.98), weight_decay=0.1).step()
    found[optimizer.__name__] = weight.detach()

for path in sorted(folder.glob("*.safetensors")):
    checkpoint = load_checkpoint(path)
    for search in (None, BeamOptions(beam=2)):
        if search is None or "transducer" not in path.stem:
            recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(search=search))
            found[path.stem, search is None] = recognizer(waves, lengths).parts()
            options = WindowOptions(timestamps=True)
            rest = {"options": options, "recognizer": recognizer}
            (text,) = transcribe(checkpoint, folder / "a.wav", **rest)
            found["text", path.stem, search is None] = text.text, text.words, text.error
torch.save(found, folder / f"{name}.pt")
"""

ARPA = """
\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-1.0 <s> -0.3
-0.7 </s>
-1.2 <unk>
-0.5 a -0.2
-0.9 b -0.1

\\2-grams:
-0.4 <s> a
-0.2 a b

\\end\\
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, an n-gram model, and three seconds at a rate of their own."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(1)
    tokenizer = CharTokenizer()
    configs = {
        "ctc": presets.mini_jasper(tokenizer.vocab_size),
        "transducer": presets.tiny(tokenizer.vocab_size),
        "aed": presets.tiny_aed(tokenizer.vocab_size + 3),
    }
    for name, config in configs.items():
        model = make_model(config).eval()
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        path = folder / f"{name}.safetensors"
        save_checkpoint(path, Checkpoint(model, tokenizer, {}, {}))
    (folder / "lm.arpa").write_text(ARPA)
    noise = torch.randn(3 * 44_100).clamp(-4, 4) / 5
    soundfile.write(folder / "a.wav", noise.numpy(), 44_100)
    return folder


NAMES = ["float32", "bfloat16", "meta"]


@pytest.fixture(scope="module")
def results(folder):
    """What the script finds under each default."""
    command = [sys.executable, "-c", SCRIPT, str(folder), *NAMES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        name: torch.load(folder / f"{name}.pt", weights_only=False) for name in NAMES
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        equal = torch.equal(one.nan_to_num(), other.nan_to_num())
        return equal and one.dtype == other.dtype
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_defaults_of_torch_change_no_result(name, results):
    plain, found = results["float32"], results[name]
    assert found.keys() == plain.keys()
    assert [key for key in plain if not same(found[key], plain[key])] == []
