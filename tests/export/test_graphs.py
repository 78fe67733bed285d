"""What leaves: one program for audio of any length, and a predictor that starts from zeros."""

import pytest
import torch

from asrkit.export.graphs import graphs, state_sizes
from asrkit.models import FastConformer, FastConformerConfig


def test_attention_to_near_frames_only_leaves_as_it_is_computed_in_blocks(worker):
    """In eager mode long audio goes in blocks, in a program it is masked: T is above and below where blocks begin."""
    torch.manual_seed(0)
    config = FastConformerConfig(
        width=16, layers=1, subsampling_channels=8, context=(3, 2)
    )
    encoder = FastConformer(config).eval()
    features, lengths = worker.batch(2, 400)
    signal = (features, lengths)
    dynamic = ({1: torch.export.Dim.DYNAMIC}, None)
    with torch.no_grad():
        program = torch.export.export(encoder, signal, dynamic_shapes=dynamic).module()
        for T in (400, 72):
            features, lengths = worker.batch(2, T)
            wanted, _ = encoder(features, lengths)
            found, _ = program(features, lengths)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["rnnt-lstm", "tdt-stateless"])
@torch.no_grad()
def test_the_decoder_graph_starts_from_zeros_and_says_what_the_predictor_says(
    worker, name
):
    model = worker.checkpoint_of(worker.cases()[name]).model
    _, graph, _ = graphs(model)
    layers, width = state_sizes(model)
    states = [torch.zeros(layers, 2, width), torch.zeros(layers, 2, width)]
    ours = None
    for labels in ([model.blank] * 2, [3, 0], [model.blank - 1, 5], [5, 5]):
        targets = torch.tensor(labels, dtype=torch.int32)[:, None]
        found, lengths, *states = graph.module(
            targets, torch.ones(2, dtype=torch.int32), *states
        )
        wanted, ours = model.predict(torch.tensor(labels), ours)
        assert lengths.tolist() == [1, 1]
        projected = model.predictor_projection(found[:, :, 0])
        torch.testing.assert_close(projected, wanted, rtol=0, atol=1e-6)
