import pytest
import torch

from asrkit.data import Utterances, batches
from asrkit.text import CharTokenizer

TOKENIZER = CharTokenizer()


@pytest.mark.parametrize("batch_seconds", [0.01, 9.0, 40.0, 1e6])
def test_every_utterance_is_batched_once_and_batches_keep_to_the_budget(
    utterances, batch_seconds
):
    plan = list(batches(utterances, TOKENIZER, batch_seconds=batch_seconds))
    ids = [id_ for batch in plan for id_ in batch.ids]
    assert sorted(ids) == sorted(utterances.ids)
    longest = [batch.waveforms.shape[1] for batch in plan]
    assert longest == sorted(longest, reverse=True)
    for batch in plan:
        assert batch.waveforms.numel() <= batch_seconds * 16_000 or len(batch.ids) == 1


def test_a_batch_has_samples_and_tokens_padded_by_zeros(
    utterances,
):
    for batch in batches(utterances, TOKENIZER, batch_seconds=60.0):
        assert batch.waveforms.dtype == torch.float32
        assert batch.targets.dtype == torch.int64
        for row, id_ in enumerate(batch.ids):
            number = int(id_[1:])
            size = len(utterances.waveforms[number])
            labels = TOKENIZER.encode(utterances.texts[number])
            assert batch.sample_lengths[row] == size
            assert batch.target_lengths[row] == len(labels)
            assert (batch.waveforms[row, :size] == (number + 1) / 32768).all()
            assert (batch.waveforms[row, size:] == 0).all()
            padding = [0] * (batch.targets.shape[1] - len(labels))
            assert batch.targets[row].tolist() == labels + padding


ONE = {"waveforms": [torch.ones(1)], "ids": ["a"], "texts": ["a"], "speakers": ["s"]}


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda utterances: next(batches(utterances, TOKENIZER, batch_seconds=0)),
            "batch_seconds: expected > 0",
        ),
        (
            lambda utterances: Utterances(**ONE | {"texts": []}),
            "waveforms, ids.*: expected equally",
        ),
        (
            lambda utterances: Utterances(
                **{name: 2 * value for name, value in ONE.items()}
            ),
            r"ids: expected all different, got \['a'\] several times. Repeat cuts by",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(utterances, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(utterances)
