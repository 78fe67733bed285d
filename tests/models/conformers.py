"""A small FastConformer for tests of the encoder and of its fused forms."""

import dataclasses

import torch

from asrkit.models import FastConformer, FastConformerConfig

SMALL = FastConformerConfig(
    width=16, layers=2, heads=2, subsampling=4, subsampling_channels=4
)


def build(**changes) -> FastConformer:
    """An encoder in eval mode in which every weight and statistic matters."""
    torch.manual_seed(0)
    encoder = FastConformer(dataclasses.replace(SMALL, **changes))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no bias stays zero
        for block in encoder.blocks:
            block.batch_norm.running_mean.normal_()
            block.batch_norm.running_var.uniform_(0.5, 2)
    return encoder.eval()
