"""NeMo's greedy transducer decoders in a process of their own, run by the Python of `make peers`:
see asrkit.workbench.bench.rivals.peer_worker.

    $ python -P peer_decoders.py nemo_label_looping
    {"plan": "plan.pt", "max_symbols": 10, "threads": 1, "observe": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [labels, lengths, frames],
     "counts": {"join": ..., "predict": ...}, "version": "..."}

`plan` is a file that `write` made: the weights of a TransducerModel with an LSTM and a relu, and
frames that are projected already, so NeMo's own projection of the encoder is left out. Prediction
network, joint and decoder are NeMo's. A request is one call, and the answer is one line. With
"observe" it also holds the hypotheses (the digest, and scores) and counts of calls of joint and
predictor; with "keep_durations" also the durations of TDT's labels.

With "device": "cuda" weights and frames are moved there, and a call is timed by events on an idle
device, without "cpu_ms". There is one loop more, nemo_label_looping_graphs: NeMo's label looping as
one CUDA graph with conditional nodes. NeMo falls back to smaller graphs, or to none, with a warning
where cuda-python or the driver cannot do that; here that is an error. None of this has run on a GPU
yet.

A GPU's machine without `make peers` needs the sixteen files of NeMo that these decoders import,
half a megabyte. Where there is .venv-peers they are copied, and the folder is taken along to the
same place there:

    .venv-peers/bin/python -P asrkit/workbench/bench/rivals/peer_decoders.py copy build/peers
    asrkit bench decoders --device cuda --peers
"""

import functools
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = (".modules", ".parts", ".parts.submodules", ".parts.utils")
UNUSED = (
    "context_biasing",
    "context_biasing.biasing_multi_model",
    "submodules.ngram_lm",
    "utils.adapter_utils",
)
LOOPS = ("nemo_label_looping", "nemo_frame_looping", "nemo_one_by_one")
GRAPHS = "nemo_label_looping_graphs"  # on CUDA only


def write(path: Path, model: Any, encoded: Tensor, lengths: Tensor) -> None:
    """What NeMo needs to decode the same batch with the same weights."""
    torch.save(
        {
            "weights": model.state_dict(),
            "durations": [*model.durations],
            "encoded": encoded,
            "lengths": lengths,
        },
        path,
    )


def stub_nemo() -> None:
    """Let NeMo's decoders be imported without what they name and do not use here: lightning, hydra,
    adapters, fusion models.
    """
    root = next((path for path in map(Path, sys.path) if (path / "nemo").is_dir()), None)
    if root is None:
        raise ModuleNotFoundError("No module named 'nemo'")
    core, asr = "nemo.core", "nemo.collections.asr"
    parents = [
        "nemo",
        core,
        f"{core}.utils",
        "nemo.utils",
        "nemo.collections",
        "nemo.collections.common",
        asr,
    ]
    for name in [*parents, "nemo.collections.common.parts", *(asr + end for end in PACKAGES)]:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
    adapters = type("AdapterModuleMixin", (), {"is_adapter_available": lambda self: False})
    registered, config = (
        types.SimpleNamespace(get_registered_adapter=_same),
        types.SimpleNamespace(structured=_same),
    )
    classes = {
        "typecheck": lambda: _same,
        "Typing": type("Typing", (), {}),
        "adapter_mixins": registered,
    }
    stubs: dict[str, dict[str, Any]] = {
        "omegaconf": {"OmegaConf": config, "ListConfig": list},
        f"{core}.classes": classes,
        f"{core}.classes.exportable": {},
        f"{core}.neural_types": {},
        f"{core}.classes.mixins": {"AdapterModuleMixin": adapters},
        f"{core}.utils.optional_libs": {
            "CUDA_PYTHON_AVAILABLE": cuda_python(),
            "cuda_python_required": _same,
        },
        **{f"{asr}.parts.{name}": {} for name in UNUSED},
    }
    for name, given in stubs.items():
        sys.modules[name] = Stub(name)
        vars(sys.modules[name]).update(given)
    vars(sys.modules[core])["NeuralModule"] = nn.Module
    vars(sys.modules["nemo.utils"])["logging"] = types.SimpleNamespace(
        info=_same, warning=_same, debug=_same
    )


def cuda_python() -> bool:
    """Whether there is a GPU, and cuda-python as new as NeMo's graphs ask for."""
    if not torch.cuda.is_available():
        return False
    try:
        from cuda.bindings import __version__
    except ImportError:
        return False
    return tuple(map(int, __version__.split(".")[:2])) >= (12, 6)


def _same(given: Any = None) -> Any:
    return given


class Stub(types.ModuleType):
    """A module in which every other name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@functools.lru_cache(1)
def decoder(
    loop: str, plan: str, max_symbols: int, keep_durations: bool = False, device: str = "cpu"
) -> tuple[Callable[[], Any], Any, Any]:
    """A call that decodes the plan on `device`, NeMo's prediction network and its joint; an error
    where that cannot be.
    """
    if "nemo" not in sys.modules:
        stub_nemo()
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding as greedy

    if loop == GRAPHS:
        expect_graphs(device)
    given = torch.load(plan, map_location=device)
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
    elif durations:  # there is no frame looping of TDT
        infer = greedy.GreedyBatchedTDTInfer(**how, use_cuda_graph_decoder=loop == GRAPHS)
    else:
        loop_labels = loop in ("nemo_label_looping", GRAPHS)
        infer = greedy.GreedyBatchedRNNTInfer(
            **how, use_cuda_graph_decoder=loop == GRAPHS, loop_labels=loop_labels
        )
    if loop == GRAPHS:
        infer.decoding_computer.force_cuda_graphs_mode(
            "full_graph"
        )  # forced, it raises where it would fall back
    return (
        lambda: infer.forward(encoder_output=encoded.transpose(1, 2), encoded_lengths=lengths)[0],
        predictor,
        joint,
    )


def expect_graphs(device: str) -> None:
    """ValueError, OSError or ImportError, with the reason, where NeMo would decode without
    conditional nodes and not say so.
    """
    if not device.startswith("cuda"):
        raise ValueError(
            f"device: expected 'cuda' for {GRAPHS}, got {device!r}."
            " On a CPU NeMo decodes without graphs."
        )
    from nemo.core.utils.cuda_python_utils import (
        check_cuda_python_cuda_graphs_conditional_nodes_supported,
    )

    check_cuda_python_cuda_graphs_conditional_nodes_supported()
    if not cuda_python():
        raise ModuleNotFoundError("NeMo's graphs need cuda-python 12.6 or newer")


def modules(weights: dict[str, Tensor], durations: int, encoded: Tensor) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of a TransducerModel, dtype and device
    those of encoded (B, T, D).
    """
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint

    (V, H), D = weights["predictor.embedding.weight"].shape, encoded.shape[-1]
    predictor = RNNTDecoder(prednet={"pred_hidden": H, "pred_rnn_layers": 1}, vocab_size=V - 1)
    sizes = {
        "encoder_hidden": D,
        "pred_hidden": H,
        "joint_hidden": D,
        "activation": "relu",
        "dropout": 0.0,
    }
    joint = RNNTJoint(jointnet=sizes, num_classes=V - 1, num_extra_outputs=durations)
    own = {"embed.": "predictor.embedding.", "dec_rnn.lstm.": "predictor.lstm."}
    predictor.prediction.load_state_dict(
        {
            there + name.removeprefix(here): weights[name]
            for there, here in own.items()
            for name in weights
            if name.startswith(here)
        }
    )
    joint.pred.load_state_dict(
        {name: weights[f"predictor_projection.{name}"] for name in ("weight", "bias")}
    )
    joint.joint_net[-1].load_state_dict(
        {name: weights[f"output.{name}"] for name in ("weight", "bias")}
    )
    joint.enc = nn.Identity()
    return predictor.eval().to(encoded), joint.eval().to(encoded)


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


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float, float | None]:
    """What the call returns, milliseconds on the clock and, on a CPU, of all threads."""
    if not device.startswith("cuda"):
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        found = call()
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
        return found, wall / 1e6, cpu / 1e6
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        found = call()
        end.record()
        end.synchronize()
        return found, start.elapsed_time(end), None


def serve(loop: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    device = request.get("device", "cpu")
    keep = request.get("keep_durations", False)
    decode, predictor, joint = decoder(loop, request["plan"], request["max_symbols"], keep, device)
    seen = (
        request["observe"] and loop != GRAPHS
    )  # a graph's calls are recorded once, and then out of sight
    watched = (
        {"join": (joint, "joint_after_projection"), "predict": (predictor, "predict")}
        if seen
        else {}
    )
    with counted(**watched) as calls:
        found, wall_ms, cpu_ms = timed(decode, device)
    answer = {
        "wall_ms": wall_ms,
        "cpu_ms": cpu_ms,
        "version": f"nemo_toolkit {version('nemo_toolkit')}",
    }
    if not request["observe"]:
        return answer
    rows, frames = (
        [[*map(int, getattr(one, field))] for one in found] for field in ("y_sequence", "timestamp")
    )
    durations = [
        [*map(int, one.token_duration)] if one.token_duration is not None else [] for one in found
    ]
    lengths, found_scores = [*map(len, rows)], [float(one.score) for one in found]
    padded = [[row + [-1] * (max(lengths) - len(row)) for row in part] for part in (rows, frames)]
    digest = [padded[0], lengths, padded[1]]
    return answer | {
        "digest": digest,
        "counts": calls,
        "durations": durations,
        "scores": found_scores,
    }


def copy(folder: Path) -> None:
    """Copies into `folder` what these decoders import of NeMo and beside torch, and what its
    version is told by.
    """
    stub_nemo()

    from nemo.collections.asr.modules import rnnt  # noqa: F401
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding  # noqa: F401

    root = Path(sys.modules["nemo"].__path__[0]).parent
    imported = [
        Path(path)
        for module in [*sys.modules.values()]
        if (path := getattr(module, "__file__", None))
    ]
    wanted = [(root, path) for path in imported if path.is_relative_to(root / "nemo")]
    wanted += [
        (root, Path(str(file.locate())))
        for file in files("nemo_toolkit") or ()
        if file.name == "METADATA"
    ]
    whole = Path(sys.modules["packaging"].__file__ or "").parent
    wanted += [(whole.parent, path) for path in whole.glob("*.py")]
    for base, path in wanted:
        (folder / path.relative_to(base)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.relative_to(base))


def main(loop: str, folder: str = "") -> None:
    """Answer until the requests end. `folder`: what `copy` wrote, for a Python without NeMo."""
    sys.path += [str(Path(__file__).parent), *[folder] * bool(folder)]
    from peer_worker import answer_requests

    answer_requests(functools.partial(serve, loop))


if __name__ == "__main__":
    if sys.argv[1] == "copy":
        copy(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
