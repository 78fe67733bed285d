"""Results do not depend on torch's default dtype, which is the user's: each case in a process of its own, since constants are kept."""

import subprocess
import sys

import pytest
import soundfile
import torch

from asrkit.models import Checkpoint, CTCConfig, CTCModel, FastConformerConfig, save_checkpoint
from asrkit.text import CharTokenizer

SCRIPT = '''
import sys
import torch

name, checkpoint, arpa, sound, out = sys.argv[1:]
if name == "meta":
    torch.set_default_device(name)
else:
    torch.set_default_dtype(getattr(torch, name))
from asrkit.data.augment import augment, spec_augment, warp_features
from asrkit.decoders import NGram, ctc_alignment, ctc_beam, ctc_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.losses import ctc_loss, rnnt_loss, tdt_loss
from asrkit.models import attention, attention_decoder, load_checkpoint, whisper
from asrkit.optim import Lamb
from asrkit.transcribe import transcribe


def random(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def whole(*numbers):
    return torch.tensor(numbers, device="cpu")


found = {}
waves, lengths = random(2, 16_000) / 4, whole(16_000, 9000)
for window in ("hann", "hamming"):
    found["log_mel", window] = log_mel(waves, lengths, config=FeatureConfig(window=window))
like = random(1)
found["relative"] = attention.relative_positions(9, -9, 12, like)
found["sines"] = attention_decoder.sines(40, 12, like), whisper.sines(40, 12, like)
generator = torch.Generator().manual_seed(0)
found["augment"] = augment(waves, lengths, generator)
features = log_mel(waves, lengths)
found["masks"] = spec_augment(*features, generator)
found["warped"] = warp_features(*features, generator)
log_probs, frames = random(2, 12, 4).log_softmax(-1), whole(12, 9)
for decode in (ctc_greedy, ctc_beam):
    heard = decode(log_probs, frames)
    found[decode.__name__] = heard.parts()
found["fused"] = ctc_beam(log_probs, frames, lm=NGram.read(arpa, ["a", "b", "c", "<blank>"]), lm_weight=0.5).parts()
found["aligned"] = tuple(ctc_alignment(log_probs, frames, heard))
targets, counts = whole([0, 1], [2, 0]), whole(2, 1)
found["ctc"] = ctc_loss(log_probs, targets, frames, counts)
for n, (loss, options) in enumerate([(rnnt_loss, {}), (tdt_loss, {"durations": (0, 1)})]):
    logits = random(2, 12, 3, 6).requires_grad_()
    costs = loss(logits, targets, frames, counts, **options)
    found["lattice", n] = costs, *torch.autograd.grad(costs.sum(), logits)
weight = torch.nn.Parameter(random(3))
weight.grad = random(3)
Lamb([weight], lr=0.1).step()
found["lamb"] = weight.detach()
(text,) = transcribe(load_checkpoint(checkpoint), sound)
found["text"] = text.text, text.words
torch.save(found, out)
'''


ARPA = """
\\data\\
ngram 1=6
ngram 2=2

\\1-grams:
-1.0 <s> -0.3
-0.7 </s>
-1.2 <unk>
-0.5 a -0.2
-0.9 b -0.1
-1.1 c

\\2-grams:
-0.4 <s> a
-0.2 a b

\\end\\
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint, an n-gram model and a recording of two seconds, longer than a window."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    model = CTCModel(CTCConfig(vocab_size=28, encoder=FastConformerConfig(width=16, layers=1, heads=2)))
    save_checkpoint(folder / "model.safetensors", Checkpoint(model, CharTokenizer(), {}, {}))
    (folder / "lm.arpa").write_text(ARPA)
    soundfile.write(folder / "a.wav", 0.2 * torch.randn(88_200).clamp(-4, 4).numpy(), 44_100)
    return [folder / name for name in ("model.safetensors", "lm.arpa", "a.wav", "out.pt")]


def run(name, files):
    done = subprocess.run([sys.executable, "-c", SCRIPT, name, *map(str, files)], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(files[-1], weights_only=False)


@pytest.fixture(scope="module")
def plain(files):
    return run("float32", files)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in tensors(part)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize("name", ["float64", "bfloat16", "meta"])
def test_the_default_dtype_changes_no_result(name, files, plain):
    found = run(name, files)
    for key, wanted in plain.items():
        for one, other in zip(tensors(found[key]), tensors(wanted), strict=True):
            assert one.dtype == other.dtype, key
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), key
    assert found["text"] == plain["text"]
