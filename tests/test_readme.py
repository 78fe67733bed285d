"""Each Python snippet of the README runs, with the names and files that it takes for granted."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.text import CharTokenizer

ROOT = Path(__file__).resolve().parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
ARPA = """\\data\\
ngram 1=4

\\1-grams:
-0.6 <unk>
-0.6 <s>
-0.6 </s>
-0.6 a

\\end\\
"""


def small_model():
    """A transducer with an LSTM whose vocabulary is letters."""
    torch.manual_seed(0)
    config = TransducerConfig(
        vocab_size=CharTokenizer().vocab_size, predictor=LSTMConfig(width=16), joint_width=16
    )
    return TransducerModel(config).eval()


def names_of_losses(**_):
    """The first snippet makes all that it needs."""
    return {"torch": torch}


def names_of_decoders(folder, **_):
    """A model of one's own, frames that it has encoded, and a language model."""
    (folder / "lm.arpa").write_text(ARPA)
    tokenizer = CharTokenizer()
    letters = [tokenizer.decode([token]).strip() for token in range(tokenizer.vocab_size)]
    return {
        "torch": torch,
        "model": small_model(),
        "encoded": torch.randn(2, 20, 16),
        "lengths": torch.tensor([20, 12]),
        "later_frames": torch.randn(2, 5, 16),
        "later_lengths": torch.tensor([5, 5]),
        "tokens": [*(letter or "<space>" for letter in letters), "<blank>"],
    }


def names_of_models(folder, tiny_speech, **_):
    """A small NeMo archive under the name of a published one, and a recording."""
    spec = importlib.util.spec_from_file_location("cases", ROOT / "tests/models/parity_cases.py")
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    golden = json.loads((ROOT / "tests/golden/nemo.json").read_text())["tdt"]
    weights = {name: torch.zeros(shape) for name, shape in golden["shapes"].items()}
    weights["preprocessor.featurizer.window"] = torch.hann_window(400, periodic=False)
    weights["preprocessor.featurizer.fb"] = mel_bands(FeatureConfig()).T[None]
    config = cases.nemo_config(cases.golden_cases()["tdt"])
    cases.write_nemo(folder / "parakeet-tdt-0.6b-v2.nemo", config, cases.fill(weights))
    soundfile.write(folder / "talk.flac", tiny_speech.waveforms[0].numpy(), 16_000)
    waveforms = torch.stack([tiny_speech.waveforms[0].float() / 32768])
    return {
        "torch": torch,
        "waveforms": waveforms,
        "lengths": torch.tensor([waveforms.shape[1]]),
    }


def names_of_batches(tiny_speech, **_):
    """Cuts with a data set of their waveforms, and a model to search the memory of."""
    from asrkit.data import corpora

    class Waveforms(torch.utils.data.Dataset):
        def __getitem__(self, cuts):
            return cuts

    cuts = corpora.spoken_commands(train=30, dev=3, test=3, progress=False)["train"]
    model = small_model()
    return {
        "torch": torch,
        "cuts": cuts,
        "dataset": Waveforms(),
        "tokenizer": CharTokenizer(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


PREPARED = [names_of_losses, names_of_decoders, names_of_models, names_of_batches]


def test_every_snippet_has_its_names():
    assert len(SNIPPETS) == len(PREPARED)


@pytest.mark.parametrize("number", range(len(PREPARED)), ids=lambda n: PREPARED[n].__name__)
def test_a_snippet_of_the_readme_runs(number, tmp_path, monkeypatch, tiny_speech, one_thread):
    names = PREPARED[number](folder=tmp_path, tiny_speech=tiny_speech)
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README.md, snippet {number + 1}", "exec"), names)
