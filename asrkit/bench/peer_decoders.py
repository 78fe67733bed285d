"""NeMo's greedy transducer decoders in a process of their own, run by the Python of `make peers`: see asrkit.bench.peer_worker.

    python -P peer_decoders.py nemo_label_looping
    {"plan": "plan.pt", "max_symbols": 10, "threads": 1, "observe": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [labels, lengths, frames], "told": {"join": ..., "predict": ...}, "version": "..."}

`plan` is a file that `write` made: the weights of a TransducerModel with an LSTM and a relu, and frames that are projected
already, so NeMo's own projection of the encoder is left out. Prediction network, joint and decoder are NeMo's. A request is one
call; with "observe" the answer has what it found and the calls it made: beside the digest scores, and with "keep_durations"
those of TDT's labels.
"""

import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = (".modules", ".parts", ".parts.submodules", ".parts.utils")
UNUSED = ("context_biasing", "context_biasing.biasing_multi_model", "submodules.ngram_lm", "utils.adapter_utils")
LOOPS = ("nemo_label_looping", "nemo_frame_looping", "nemo_one_by_one")


def write(path: Path, model: Any, encoded: Tensor, lengths: Tensor) -> None:
    """What NeMo needs to decode the same batch with the same weights."""
    torch.save({"weights": model.state_dict(), "durations": [*model.durations], "encoded": encoded, "lengths": lengths}, path)


def stub_nemo() -> None:
    """Let NeMo's decoders be imported without what they name and do not use here: lightning, hydra, adapters, fusion models."""
    (root,) = [path for path in map(Path, sys.path) if (path / "nemo").is_dir()]
    core, asr = "nemo.core", "nemo.collections.asr"
    parents = ["nemo", core, f"{core}.utils", "nemo.utils", "nemo.collections", "nemo.collections.common", asr]
    for name in [*parents, "nemo.collections.common.parts", *(asr + end for end in PACKAGES)]:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
    adapters = type("AdapterModuleMixin", (), {"is_adapter_available": lambda self: False})
    registered, config = types.SimpleNamespace(get_registered_adapter=_same), types.SimpleNamespace(structured=_same)
    classes = {"typecheck": lambda: _same, "Typing": type("Typing", (), {}), "adapter_mixins": registered}
    stubs: dict[str, dict[str, Any]] = {
        "omegaconf": {"OmegaConf": config, "ListConfig": list},
        f"{core}.classes": classes, f"{core}.classes.exportable": {}, f"{core}.neural_types": {},
        f"{core}.classes.mixins": {"AdapterModuleMixin": adapters},
        f"{core}.utils.optional_libs": {"CUDA_PYTHON_AVAILABLE": False, "cuda_python_required": _same},
        **{f"{asr}.parts.{name}": {} for name in UNUSED},
    }  # fmt: skip
    for name, given in stubs.items():
        sys.modules[name] = Stub(name)
        vars(sys.modules[name]).update(given)
    vars(sys.modules[core])["NeuralModule"] = nn.Module
    vars(sys.modules["nemo.utils"])["logging"] = types.SimpleNamespace(info=_same, warning=_same, debug=_same)


def _same(given: Any = None) -> Any:
    return given


class Stub(types.ModuleType):
    """A module in which every other name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@functools.lru_cache(1)
def decoder(loop: str, plan: str, max_symbols: int, keep_durations: bool) -> tuple[Callable[[], Any], Any, Any]:
    """A call that decodes the plan, NeMo's prediction network and its joint."""
    if "nemo" not in sys.modules:
        stub_nemo()
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding as greedy

    given = torch.load(plan)
    durations, encoded, lengths = given["durations"], given["encoded"], given["lengths"]
    predictor, joint = modules(given["weights"], len(durations), encoded)
    how = {
        "decoder_model": predictor,
        "joint_model": joint,
        "blank_index": predictor.blank_idx,
        "max_symbols_per_step": max_symbols,
    }
    how |= {"durations": durations, "include_duration": keep_durations} if durations else {}
    if loop == "nemo_one_by_one":
        infer = (greedy.GreedyTDTInfer if durations else greedy.GreedyRNNTInfer)(**how)
    elif durations:
        infer = greedy.GreedyBatchedTDTInfer(**how, use_cuda_graph_decoder=False)  # it has no frame looping of TDT
    else:
        infer = greedy.GreedyBatchedRNNTInfer(**how, use_cuda_graph_decoder=False, loop_labels=loop == "nemo_label_looping")
    return lambda: infer.forward(encoder_output=encoded.transpose(1, 2), encoded_lengths=lengths)[0], predictor, joint


def modules(weights: dict[str, Tensor], durations: int, encoded: Tensor) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of a TransducerModel, in the dtype of encoded (B, T, D)."""
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint

    (V, H), D = weights["predictor.embedding.weight"].shape, encoded.shape[-1]
    predictor = RNNTDecoder(prednet={"pred_hidden": H, "pred_rnn_layers": 1}, vocab_size=V - 1)
    sizes = {"encoder_hidden": D, "pred_hidden": H, "joint_hidden": D, "activation": "relu", "dropout": 0.0}
    joint = RNNTJoint(jointnet=sizes, num_classes=V - 1, num_extra_outputs=durations)
    own = {"embed.": "predictor.embedding.", "dec_rnn.lstm.": "predictor.lstm."}
    predictor.prediction.load_state_dict(
        {there + name.removeprefix(here): weights[name] for there, here in own.items() for name in weights if name.startswith(here)}
    )
    joint.pred.load_state_dict({name: weights[f"predictor_projection.{name}"] for name in ("weight", "bias")})
    joint.joint_net[-1].load_state_dict({name: weights[f"output.{name}"] for name in ("weight", "bias")})
    joint.enc = nn.Identity()
    return predictor.eval().to(encoded.dtype), joint.eval().to(encoded.dtype)


@contextmanager
def counted(**of: tuple[Any, str]) -> Iterator[dict[str, int]]:
    """Calls of the methods, an object and a name each, while the block runs."""
    calls = dict.fromkeys(of, 0)

    def count(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name, (thing, method) in of.items():
        setattr(thing, method, count(name, getattr(thing, method)))
    try:
        yield calls
    finally:
        for thing, method in of.values():
            delattr(thing, method)


def serve(loop: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    decode, predictor, joint = decoder(loop, request["plan"], request["max_symbols"], request.get("keep_durations", False))
    with counted(join=(joint, "joint_after_projection"), predict=(predictor, "predict")) as calls:
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        found = decode()
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    answer = {"wall_ms": wall / 1e6, "cpu_ms": cpu / 1e6, "version": f"nemo_toolkit {version('nemo_toolkit')}"}
    if not request["observe"]:
        return answer
    rows, frames = ([[*map(int, getattr(one, field))] for one in found] for field in ("y_sequence", "timestamp"))
    durations = [[*map(int, one.token_duration)] if one.token_duration is not None else [] for one in found]
    lengths, found_scores = [*map(len, rows)], [float(one.score) for one in found]
    padded = [[row + [-1] * (max(lengths) - len(row)) for row in part] for part in (rows, frames)]
    digest = [padded[0], lengths, padded[1]]
    return answer | {"digest": digest, "told": calls, "durations": durations, "scores": found_scores}


def main(loop: str) -> None:
    """Answer until the requests end."""
    sys.path.append(str(Path(__file__).parent))
    from peer_worker import answer_requests

    answer_requests(functools.partial(serve, loop))


if __name__ == "__main__":
    main(sys.argv[1])
