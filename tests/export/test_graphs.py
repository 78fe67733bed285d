"""What leaves: programs of torch.export that hold for any B and T, and graphs that say what the model says."""

import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.export.graphs import Joiner, ctc_graphs, state_sizes, transducer_graphs
from asrkit.models import CTCModel, FastConformer, FastConformerConfig

NAMES = (
    "ctc-fastconformer",
    "ctc-near",
    "ctc-jasper",
    "rnnt-lstm",
    "rnnt-stateless-1",
    "tdt-fastconformer",
)


def graphs_of(model):
    """All graphs of a model, by name."""
    graphs = (
        ctc_graphs(model) if isinstance(model, CTCModel) else transducer_graphs(model)
    )
    return {graph.name: graph for graph in graphs}


def program_of(graph):
    """The graph by torch.export."""
    dynamic = tuple(
        dict.fromkeys(graph.dynamic[name], torch.export.Dim.DYNAMIC)
        for name in graph.inputs
    )
    with torch.no_grad():
        program = torch.export.export(
            graph.module,
            tuple(graph.inputs.values()),
            dynamic_shapes=dynamic,
            strict=False,
        )
    return program.module()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_one_program_of_torch_export_computes_batches_of_any_size(cases, batch, name):
    model = cases[name].model
    graph = next(iter(graphs_of(model).values()))
    program = program_of(graph)
    for B, T in ((2, 167), (1, 64), (4, 333), (5, 48)):
        features, lengths = batch(B, T)
        wanted, wanted_ends = model.encoder(features, lengths)
        if graph.name == "model":
            wanted = model.output(wanted).log_softmax(-1)
        else:
            wanted = wanted.transpose(1, 2)
        found, ends = program(features.transpose(1, 2), lengths)
        assert ends.tolist() == wanted_ends.tolist()
        assert not wanted.isnan().any()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_attention_to_near_frames_only_leaves_as_it_is_computed_in_blocks(batch):
    """In eager mode long audio goes in blocks, in a program it is masked: T is above and below where blocks begin."""
    torch.manual_seed(0)
    config = FastConformerConfig(
        width=16, layers=1, subsampling_channels=8, context=(3, 2)
    )
    encoder = FastConformer(config).eval()
    features, lengths = batch(2, 400)
    signal = (features, lengths)
    dynamic = ({1: torch.export.Dim.DYNAMIC}, None)
    with torch.no_grad():
        program = torch.export.export(encoder, signal, dynamic_shapes=dynamic).module()
        for T in (400, 72):
            features, lengths = batch(2, T)
            wanted, _ = encoder(features, lengths)
            found, _ = program(features, lengths)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["rnnt-lstm", "rnnt-stateless-1", "tdt-fastconformer"])
@torch.no_grad()
def test_the_decoder_graph_starts_from_zeros_and_says_what_the_predictor_says(
    cases, name
):
    model = cases[name].model
    decoder = graphs_of(model)["decoder"].module
    layers, width = state_sizes(model)
    states = [torch.zeros(layers, 2, width), torch.zeros(layers, 2, width)]
    ours = None
    for labels in ([model.blank] * 2, [3, 0], [model.blank - 1, 5], [5, 5]):
        targets = torch.tensor(labels, dtype=torch.int32)[:, None]
        found, lengths, *states = decoder(
            targets, torch.ones(2, dtype=torch.int32), *states
        )
        wanted, ours = model.predict(torch.tensor(labels), ours)
        assert lengths.tolist() == [1, 1]
        projected = model.predictor_projection(found[:, :, 0])
        torch.testing.assert_close(projected, wanted, rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_joiner_has_a_logit_for_each_number_of_frames_up_to_the_longest_duration(
    cases,
):
    model = cases["tdt-fastconformer"].model
    assert model.durations == (0, 1, 2, 4)
    V = model.blank + 1
    encoded, predicted = (
        torch.randn(2, 5, 32),
        torch.randn(2, 3, model.config.predictor.width),
    )
    logits = Joiner(model)(encoded.transpose(1, 2), predicted.transpose(1, 2))
    assert logits.shape == (2, 5, 3, V + 5)
    frames = model.encoder_projection(encoded)[:, :, None]
    wanted = model.join(frames, model.predictor_projection(predicted)[:, None])
    places = [*range(V + 3), V + 4]
    torch.testing.assert_close(logits[..., places], wanted, rtol=0, atol=1e-6)
    assert (logits[..., V + 3] < logits[..., places].amin(-1) - 1000).all()


@torch.no_grad()
def test_cases_recognise_tokens_that_differ(cases, batch):
    """Else agreement of tokens would say nothing."""
    for name, checkpoint in cases.items():
        model = checkpoint.model
        if not isinstance(model, CTCModel):
            encoded, lengths, _ = model.encode(*batch(4, 333))
            rows = transducer_greedy(model, encoded, lengths).tokens()
            assert len({token for row in rows for token in row}) > 1, name
