"""`make_model`: the model of any config."""

from asrkit.models.attention_decoder import AEDConfig, AEDModel
from asrkit.models.transducer import CTCConfig, CTCModel, TransducerConfig, TransducerModel

ModelConfig = TransducerConfig | CTCConfig | AEDConfig
Model = TransducerModel | CTCModel | AEDModel


def make_model(config: ModelConfig) -> Model:
    """The model that `config` describes, with random weights.

    >>> make_model(presets.parakeet_ctc_0_6b())  # doctest: +SKIP
    """
    if isinstance(config, CTCConfig):
        return CTCModel(config)
    if isinstance(config, AEDConfig):
        return AEDModel(config)
    return TransducerModel(config)
