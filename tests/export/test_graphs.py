"""One program of torch.export for audio of any length."""

import torch

from asrkit.models import FastConformer, FastConformerConfig


def test_attention_to_near_frames_only_leaves_as_it_is_computed_in_blocks(worker):
    """Eager attention of long audio is computed in blocks, exported attention is masked; T is below and above the limit."""
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
