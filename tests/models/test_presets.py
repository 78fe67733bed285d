"""Presets have the sizes of the published models."""

import pytest
import torch

from asrkit.models import make_model, presets

# Counted from the same settings built with nemo_toolkit 3.0.0 (ConformerEncoder, RNNTDecoder, RNNTJoint, ConvASRDecoder);
# transformers 5.23.0 has the same for all but the 110M, which it cannot build. Model cards give two digits: 0.6B, 1.1B, 114M.
COUNTS = {
    "parakeet_ctc_0_6b": 608_799_745,
    "parakeet_ctc_1_1b": 1_062_540_289,
    "parakeet_rnnt_0_6b": 616_692_225,
    "parakeet_rnnt_1_1b": 1_070_432_769,
    "parakeet_tdt_0_6b": 617_825_926,
    "parakeet_tdt_1_1b": 1_070_435_974,
    "tdt_ctc_110m": 114_624_647,
}


def parameters(config):
    """Parameters of the model of `config`, without memory for them."""
    with torch.device("meta"):
        model = make_model(config)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_as_many_parameters_as_the_published_model(name):
    assert parameters(presets.PRESETS[name]()) == COUNTS[name]


def test_the_multilingual_model_is_the_preset_with_its_vocabulary():
    multilingual = presets.parakeet_tdt_0_6b(vocab_size=8192)  # parakeet-tdt-0.6b-v3
    assert parameters(multilingual) == 627_008_134


def test_the_mlperf_model_has_the_rounds_parameters_and_a_row_for_blank():
    config = presets.mlperf_rnnt()
    of_the_round = (
        49_006_080  # training_results_v1.0, NVIDIA's rnnt, built from its own settings
    )
    row_of_blank = config.predictor.width
    assert parameters(config) == of_the_round + row_of_blank == 49_006_592


# Model cards give 883M and 182M for the flash models and 1B for the first.
CANARY = {
    "canary_1b": 1_016_677_408,
    "canary_1b_flash": 883_554_432,
    "canary_180m_flash": 182_643_840,
}


@pytest.mark.parametrize("name", CANARY)
def test_a_canary_has_as_many_parameters_as_its_card_says(name):
    config = presets.PRESETS[name]()
    assert parameters(config) == CANARY[name]
    assert (config.encoder.bins, config.encoder.scale_input) == (128, False)
    assert config.heads == 8
    assert config.vocab_size % 8 == 0


# Facts of the published checkpoints that parameter counts do not show.
SCALED = {
    "parakeet_ctc_0_6b",
    "parakeet_ctc_1_1b",
    "parakeet_rnnt_0_6b",
    "parakeet_rnnt_1_1b",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_the_settings_of_its_checkpoint(name):
    config = presets.PRESETS[name]()
    encoder = config.encoder
    assert encoder.scale_input == (name in SCALED)
    assert encoder.bins == (128 if name == "parakeet_tdt_0_6b" else 80)
    assert encoder.bias == (name != "parakeet_tdt_0_6b")
    sizes = (encoder.heads, encoder.kernel, encoder.subsampling, encoder.context)
    assert sizes == (8, 9, 8, (-1, -1))
    durations = (0, 1, 2, 3, 4) if "tdt" in name else ()
    assert getattr(config, "durations", ()) == durations
