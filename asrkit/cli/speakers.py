"""`asrkit train --hold-out each`: one training for each speaker, and a table of their errors."""

import argparse
from typing import TYPE_CHECKING

from asrkit.cli.command import count, finish, say, text_stream

if TYPE_CHECKING:
    from asrkit.models.assembly import ModelConfig
    from asrkit.text import Tokenizer
    from asrkit.training import CrossValidation, Fold, TrainConfig

EACH = "each"  # the value of --hold-out that holds out one speaker after the other
HEADING = ("speaker", "WER", "95 % interval", "words", "utterances", "trained on", "steps")


def train_for_each_speaker(
    args: argparse.Namespace,
    model_config: "ModelConfig",
    tokenizer: "Tokenizer",
    config: "TrainConfig",
) -> int:
    """Train once for each speaker of the manifests, and print what each model makes of the speaker
    it was not trained on.

    Args:
        args: those of `asrkit train`.
        model_config: the model of every training.
        tokenizer: makes labels of transcripts.
        config: how each model is trained.
    """
    from asrkit.data import Utterances, corpora
    from asrkit.shapes import expect
    from asrkit.training import cross_validate

    remedy = "Hold out one speaker at a time, or train in one process."
    expect(args.ranks is None, "ranks", "none with --hold-out each", args.ranks, remedy)
    progress = not args.no_progress
    cuts, added_cuts = corpora.load_by_speaker(
        args.manifest, join_digits=args.join_digits, kinds=args.kinds, progress=progress
    )
    speech = Utterances.load(cuts, progress=progress)
    added = Utterances.load(added_cuts, progress=progress)
    speakers = sorted(set(speech.speakers))
    say(args, f"one training for each of {count(len(speakers), 'speaker')}: {', '.join(speakers)}")

    def tell(fold: "Fold") -> None:
        say(args, f"{fold.speaker}: WER {fold.wer}")

    with text_stream(args):
        result = cross_validate(
            model_config,
            tokenizer,
            speech,
            added,
            out=args.out,
            config=config,
            device=args.device,
            resume=not args.fresh,
            progress=progress,
            on_fold=tell,
        )
    finish(args, {"out": str(args.out)} | result.to_json(), "\n".join(_lines(args, result)))
    return 0


def _lines(args: argparse.Namespace, result: "CrossValidation") -> list[str]:
    """The table of the speakers, and a last line that says where the models are."""
    from asrkit.workbench.tables import aligned

    rows = [HEADING]
    for fold in result.folds:
        rate = fold.wer
        row = (
            fold.speaker,
            f"{100 * rate.rate:.1f} %",
            f"{100 * rate.low:.1f} to {100 * rate.high:.1f} %",
            f"{rate.units:,}",
            f"{fold.utterances:,}",
            f"{fold.trained_on:,}",
            f"{fold.steps:,}",
        )
        rows.append(row)
    worst = result.worst
    mean_percent = 100 * result.mean_wer
    worst_percent = 100 * worst.wer.rate
    summary = f"mean WER {mean_percent:.1f} %, worst {worst_percent:.1f} % ({worst.speaker})"
    return [*aligned(rows, right=range(1, len(HEADING))), f"{summary}: {args.out}"]
