"""Files of a Hugging Face folder: configs, tokenizer, weights in safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrkit.models.checkpoints.own import Values, Weights, read_safetensors
from asrkit.shapes import expect


def expect_only(values: Mapping[str, Any], only: Mapping[str, Any], name: str) -> None:
    """ValueError unless each key has the one value that asrkit supports, or is missing.

    Args:
        values: A section of a config.
        only: The supported value of each key that the shapes of the weights do not reveal.
        name: Name of the section.
    """
    for key, value in only.items():
        got = values.get(key, value)
        expect(
            got == value,
            f"{name}.{key}",
            repr(value),
            f"{got!r:.80}",
            "Other values are not supported.",
        )


def translated(values: Mapping[str, Any], names: Mapping[str, list]) -> Values:
    """Arguments of one of asrkit's configs.

    Args:
        values: A section of a config of another program.
        names: For each argument the key in the section and the default, which may be left out
            for None. `inner`, the width of feed-forwards, becomes `expansion`, its ratio to
            `width`.
    """
    sizes = {ours: values.get(*theirs) for ours, theirs in names.items()}
    if "inner" in sizes:
        sizes["expansion"] = sizes.pop("inner") // sizes["width"]
    return sizes


def read_json(path: Path, name: str) -> Values:
    """The JSON object in file `name` of the folder, empty if there is no such file."""
    if not (path / name).is_file():
        return {}
    return json.loads((path / name).read_text(encoding="utf-8"))


def vocabulary(text: str) -> dict[str, int]:
    """Ids of all tokens by their texts, from the text of a tokenizer.json."""
    contents = json.loads(text)
    vocab = contents["model"]["vocab"]
    if isinstance(vocab, list):  # with scores
        vocab = {piece: id_ for id_, (piece, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in contents.get("added_tokens") or ()}


def extractor(path: Path) -> Values:
    """Settings of the feature extractor, from the one of two files that has them."""
    own, processor = "preprocessor_config.json", "processor_config.json"
    settings = read_json(path, own) or read_json(path, processor).get("feature_extractor")
    expect(bool(settings), "model", f"{own} or a feature_extractor in {processor}", "neither")
    assert settings is not None
    return settings


def read_weights(path: Path) -> Weights:
    """All tensors of model.safetensors, or of the shards in its index."""
    names = ["model.safetensors"]
    index = read_json(path, "model.safetensors.index.json")
    if index and not (path / names[0]).is_file():
        names = sorted({*index["weight_map"].values()})
    weights: Weights = {}
    for name in names:
        expect(
            Path(name).name == name and (path / name).is_file(),  # in no other folder
            "model",
            name,
            f"none in {path.name}",
            "Pickled weights (.bin, .pt) are not read.",
        )
        weights |= read_safetensors(path / name)[0]
    return weights
