"""Cross-validation over speakers: one training for each speaker held out, scored on that speaker.

The error on a speaker whom a model was tuned to says little of the next one's. Each training is a
run of its own in a folder of its own, so that what was interrupted resumes and what was finished is
scored again without training.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from asrkit.data import Utterances
from asrkit.files import atomic, content_hash
from asrkit.models import load_checkpoint
from asrkit.models.assembly import ModelConfig
from asrkit.shapes import expect
from asrkit.text import ErrorRate, Tokenizer, dump_tokenizer, normalize_text
from asrkit.training.config import TrainConfig
from asrkit.training.evaluation import evaluate
from asrkit.training.processes import was_started_as_rank
from asrkit.training.start import train
from asrkit.training.state import run_settings

RESULTS = "cross_validation.json"


@dataclass(frozen=True, kw_only=True)
class Fold:
    """What a model makes of one speaker whom it was not trained on.

    Args:
        speaker: The one held out.
        wer: Word error rate on that speaker's utterances.
        utterances: How many these are.
        trained_on: Utterances of the others.
        steps: Optimizer steps of the training.
        path: The exported model.
    """

    speaker: str
    wer: ErrorRate
    utterances: int
    trained_on: int
    steps: int
    path: Path


@dataclass(frozen=True)
class CrossValidation:
    """The folds, in the order of their training."""

    folds: Sequence[Fold]

    @property
    def mean_wer(self) -> float:
        """Mean of the speakers' word error rates, each speaker counting as much as the next."""
        return sum(fold.wer.rate for fold in self.folds) / len(self.folds)

    @property
    def worst(self) -> Fold:
        """The fold with the highest word error rate."""
        return max(self.folds, key=lambda fold: fold.wer.rate)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "CrossValidation":
        """What `to_json` made, again.

        Args:
            saved: From `to_json`.
        """
        folds = []
        for row in saved["folds"]:
            rate = ErrorRate(**row["wer"])
            folds.append(Fold(**row | {"wer": rate, "path": Path(row["path"])}))
        return cls(folds)

    def to_json(self) -> dict[str, Any]:
        """Mean, worst speaker and every fold, as JSON has them."""
        folds = []
        for fold in self.folds:
            row = asdict(fold)
            row["path"] = str(fold.path)
            folds.append(row)
        return {
            "mean_wer": self.mean_wer,
            "worst_wer": self.worst.wer.rate,
            "worst_speaker": self.worst.speaker,
            "folds": folds,
        }


def cross_validate(  # noqa: PLR0913 - those of `train`, and who is held out
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    speech: Utterances,
    added: Utterances | None = None,
    *,
    out: Path,
    speakers: Sequence[str] | None = None,
    config: TrainConfig | None = None,
    device: str = "cpu",
    resume: bool = True,
    progress: bool = True,
    on_fold: Callable[[Fold], None] | None = None,
) -> CrossValidation:
    """Word error rates of `speech` by speaker, each from a model trained without that speaker.

    Run again with the same arguments, it goes on where it stopped. After each fold the results so
    far are written to cross_validation.json in `out`, with those of earlier calls for other
    speakers, if model, training and speech were the same.

    Args:
        model_config: The model to train for each speaker.
        tokenizer: Makes labels of transcripts.
        speech: Utterances to train on and to test with, a speaker named for each.
        added: Speech to train on only, such as synthetic speech; what a speaker says in it is left
            out too while that speaker is held out.
        out: Folder of the runs: one folder for each speaker, named after the speaker.
        speakers: Those to hold out, one after the other; None is all of `speech`, sorted.
        config: How each model is trained; the defaults of TrainConfig if None.
        device: Where to train, "cpu" or "cuda".
        resume: Whether to go on with the runs in `out`; False removes them.
        progress: Whether to show progress bars.
        on_fold: Called after each fold.

    Returns:
        The folds, their mean and the worst of them.

    Raises:
        ValueError: One of several processes calls, an utterance without speaker or words, a
            speaker that is not in `speech`, a speaker without whom nothing is left to train on, or
            what `asrkit.training.train` refuses.
        OSError: `out` cannot be written to.
    """
    alone = not was_started_as_rank()
    expect(alone, "processes", "one", "several", "Train for one speaker at a time.")
    _check_speech(speech)
    if speakers is None:
        speakers = sorted(set(speech.speakers))
    expect(len(speakers) > 0, "speakers", "at least one", "none")
    everything = speech
    if added is not None:
        everything = speech.joined(added)
    for speaker in speakers:
        _check_speaker(speaker, speech, everything, tokenizer)
    settings = _settings(model_config, tokenizer, everything, config or TrainConfig())
    earlier: list[Fold] = []
    if resume:
        earlier = _earlier_folds(Path(out) / RESULTS, settings)
    folds: list[Fold] = []
    for speaker in speakers:
        others = everything.select(_rows(everything, speaker, said_by=False))
        own = speech.select(_rows(speech, speaker, said_by=True))
        result = train(
            model_config,
            tokenizer,
            others,
            out=fold_folder(out, speaker),
            config=config,
            device=device,
            resume=resume,
            progress=progress,
        )
        rate = evaluate(load_checkpoint(result.path, device=device), own).errors
        fold = Fold(
            speaker=speaker,
            wer=rate,
            utterances=len(own),
            trained_on=len(others),
            steps=len(result.history),
            path=result.path,
        )
        folds.append(fold)
        _write_results(Path(out) / RESULTS, [*earlier, *folds], settings)
        if on_fold is not None:
            on_fold(fold)
    return CrossValidation(folds)


def fold_folder(out: Path, speaker: str) -> Path:
    """Folder of the run without `speaker`: any name is a file name here.

    Args:
        out: Folder of all runs.
        speaker: The one held out.
    """
    return Path(out) / f"without-{quote(speaker, safe='')}"


def _settings(
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    everything: Utterances,
    config: TrainConfig,
) -> str:
    """Hash of what folds have to share for their error rates to be compared."""
    samples = [len(waveform) for waveform in everything.waveforms]
    compared = {
        "run": run_settings(model_config, config),
        "tokenizer": content_hash(dump_tokenizer(tokenizer)),
        "speech": [[*everything.ids], [*everything.texts], [*everything.speakers], samples],
    }
    return content_hash(json.dumps(compared, sort_keys=True).encode())


def _earlier_folds(path: Path, settings: str) -> list[Fold]:
    """The folds that calls with the same settings have left in `path`.

    A file that is no JSON has none: it is written anew, and their models are still there.
    """
    if not path.exists():
        return []
    try:
        saved = json.loads(path.read_text())
    except ValueError:
        return []
    if saved.get("settings") != settings:
        return []
    return [*CrossValidation.from_json(saved).folds]


def _write_results(path: Path, folds: Sequence[Fold], settings: str) -> None:
    """Write the folds, sorted by speaker; of two of one speaker the last."""
    by_speaker = {fold.speaker: fold for fold in folds}
    result = CrossValidation([by_speaker[speaker] for speaker in sorted(by_speaker)])
    with atomic(path) as part:
        part.write_text(json.dumps({"settings": settings} | result.to_json(), indent=1))


def _rows(utterances: Utterances, speaker: str, *, said_by: bool) -> list[int]:
    """Numbers of the utterances that `speaker` says, or of all others."""
    return [row for row, name in enumerate(utterances.speakers) if (name == speaker) == said_by]


def _check_speech(speech: Utterances) -> None:
    """ValueError for an utterance that cannot be scored, or that nobody says."""
    got = "none in " + ", ".join(
        repr(id_) for id_, name in zip(speech.ids, speech.speakers, strict=True) if not name
    )
    named = all(speech.speakers)
    expect(named, "speech", "a speaker for each utterance", got[:80], "Name them in the manifest.")
    pairs = zip(speech.ids, speech.texts, strict=True)
    silent = [id_ for id_, text in pairs if not normalize_text(text).split()]
    expect(not silent, "speech", "words in each utterance", f"none in {silent[:3]}")
    expect(len(speech) > 0, "speech", "at least one utterance", "none")


def _check_speaker(
    speaker: str, speech: Utterances, everything: Utterances, tokenizer: Tokenizer
) -> None:
    """ValueError for a speaker who cannot be held out; now, before the others are trained for."""
    names = set(speech.speakers)
    expect(speaker in names, "speakers", f"those of {sorted(names)[:9]}", repr(speaker))
    others = _rows(everything, speaker, said_by=False)
    remedy = "Add a manifest with other speakers, or spoken_commands."
    wanted = f"utterances of others than {speaker!r} to train on"
    expect(len(others) > 0, "speech", wanted, "none", remedy)
    for row in _rows(speech, speaker, said_by=True):
        tokenizer.encode(speech.texts[row])
