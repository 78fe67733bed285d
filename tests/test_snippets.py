"""Each Python snippet of the README and of docs/ runs, with the names and files that it assumes.

The snippets of a page run one after another and share their names, as a reader would type them.
"""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.text import CharTokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
SNIPPETS = {
    page: re.findall(
        r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL
    )
    for page in PAGES
}
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
        vocab_size=CharTokenizer().vocab_size,
        predictor=LSTMConfig(width=16),
        joint_width=16,
    )
    return TransducerModel(config).eval()


def nothing(**_):
    """For a snippet that defines all it needs, or continues with the names of the one before."""
    return {}


def names_of_decoders(folder, **_):
    """A user's own model, encoded frames, and a language model."""
    (folder / "lm.arpa").write_text(ARPA)
    tokenizer = CharTokenizer()
    letters = [
        tokenizer.decode([token]).strip() for token in range(tokenizer.vocab_size)
    ]
    return {
        "model": small_model(),
        "encoded": torch.randn(2, 20, 16),
        "lengths": torch.tensor([20, 12]),
        "later_frames": torch.randn(2, 5, 16),
        "later_lengths": torch.tensor([5, 5]),
        "tokens": [*(letter or "<space>" for letter in letters), "<blank>"],
    }


def names_of_ctc(folder, **_):
    """The output of a character model for two utterances, and a language model of words."""
    (folder / "words.arpa").write_text(ARPA)
    return {
        "log_probs": torch.randn(2, 20, CharTokenizer().vocab_size + 1).log_softmax(-1),
        "lengths": torch.tensor([20, 12]),
    }


def names_of_recordings(folder, archive, tiny_speech):
    """A small NeMo archive under the name of a published one, and a recording."""
    shutil.copy(archive, folder)
    soundfile.write(folder / "talk.flac", tiny_speech.waveforms[0].numpy(), 16_000)
    waveforms = torch.stack([tiny_speech.waveforms[0].float() / 32768])
    return {"waveforms": waveforms, "lengths": torch.tensor([waveforms.shape[1]])}


def names_of_whisper(folder, **_):
    """A small Whisper under the name of a published one, and a second of sound."""
    cases = module("tests/models/whisper_cases.py")
    golden = json.loads((ROOT / "tests/golden/whisper.json").read_text())["whisper"]
    weights = {name: torch.zeros(shape) for name, shape in golden["shapes"].items()}
    cases.write_folder(
        folder / "whisper-small", cases.CASES["whisper"], cases.fill(weights)
    )
    waveforms, lengths = cases.speech((16_000,))
    return {"waveforms": waveforms, "lengths": lengths}


def module(path):
    """A file of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def names_of_a_program(**files):
    """Those recordings, for a snippet that is a program."""
    return names_of_recordings(**files) | {"__name__": "__main__"}


def names_of_batches(**_):
    """Cuts, and a model to search the memory of."""
    from asrkit.data import corpora

    cuts = corpora.spoken_commands(train=30, dev=3, test=3, progress=False)["train"]
    model = small_model()
    return {
        "cuts": cuts,
        "tokenizer": CharTokenizer(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


PREPARED = {  # what each snippet of a page assumes
    "README.md": [nothing],
    "docs/library.md": [
        nothing,
        names_of_decoders,
        names_of_ctc,
        nothing,
        nothing,
        names_of_recordings,
        names_of_whisper,
    ],
    "docs/training.md": [*[nothing] * 3, names_of_batches, *[nothing] * 5],
    "docs/export.md": [nothing],
    "docs/scale.md": [names_of_a_program, nothing],
    "docs/transcribing.md": [names_of_recordings],
}


def test_every_snippet_has_its_names():
    found = {page: len(snippets) for page, snippets in SNIPPETS.items() if snippets}
    assert found == {page: len(prepared) for page, prepared in PREPARED.items()}


@pytest.mark.parametrize("page", PREPARED)
def test_the_snippets_of_a_page_run(
    page, tmp_path, monkeypatch, archive, tiny_speech, one_thread
):
    names = {}
    monkeypatch.chdir(tmp_path)
    for number, (snippet, prepare) in enumerate(
        zip(SNIPPETS[page], PREPARED[page], strict=True)
    ):
        names |= prepare(folder=tmp_path, archive=archive, tiny_speech=tiny_speech)
        exec(compile(snippet, f"{page}, snippet {number + 1}", "exec"), names)
