"""NeMo's greedy transducer decoders in a process of their own, run by the Python of `make peers`:
see asrkit.workbench.bench.peers.peer_worker.

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
where cuda-python or the driver cannot do that; here that is an error.

A GPU's machine without `make peers` needs the sixteen files of NeMo that these decoders import,
half a megabyte. Where there is .venv-peers they are copied, and the folder is taken along to the
same place there:

    .venv-peers/bin/python -P asrkit/workbench/bench/peers/peer_decoders.py copy build/peers
    asrkit bench decoders --device cuda --peers
"""

import functools
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import files, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LOOPS = ("nemo_label_looping", "nemo_frame_looping", "nemo_one_by_one")
GRAPHS = "nemo_label_looping_graphs"  # on CUDA only


def write(path: Path, model: Any, encoded: Tensor, lengths: Tensor) -> None:
    """Write what NeMo needs to decode the same batch with the same weights.

    Args:
        path: the file.
        model: a TransducerModel with an LSTM and a relu.
        encoded: projected frames (B, T, D).
        lengths: of the frames, (B,).
    """
    torch.save(
        {
            "weights": model.state_dict(),
            "durations": [*model.durations],
            "encoded": encoded,
            "lengths": lengths,
        },
        path,
    )


class Decoder(NamedTuple):
    """A call that decodes a plan, and the modules whose calls are counted."""

    decode: Callable[[], Any]
    predictor: Any
    joint: Any


@functools.lru_cache(1)
def decoder(
    loop: str, plan: str, max_symbols: int, keep_durations: bool = False, device: str = "cpu"
) -> Decoder:
    """NeMo's decoder of a plan.

    Args:
        loop: one of LOOPS, or GRAPHS.
        plan: path of what `write` wrote.
        max_symbols: labels on a frame at most.
        keep_durations: whether the hypotheses of TDT have the durations of their labels.
        device: "cpu" or "cuda".

    Raises:
        ValueError, OSError, ImportError: NeMo would decode without the graphs that are wanted.
    """
    from nemo_stubs import stub_nemo

    if "nemo" not in sys.modules:
        stub_nemo()
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding as greedy

    by_graphs = loop == GRAPHS
    if by_graphs:
        expect_graphs(device)
    batch = torch.load(plan, map_location=device)
    durations = batch["durations"]
    encoded = batch["encoded"]
    predictor, joint = modules(batch["weights"], len(durations), encoded)
    options = {
        "decoder_model": predictor,
        "joint_model": joint,
        "blank_index": predictor.blank_idx,
        "max_symbols_per_step": max_symbols,
    }
    if loop != "nemo_one_by_one":
        options["use_cuda_graph_decoder"] = by_graphs
    if durations:  # there is no frame looping of TDT
        batched = greedy.GreedyBatchedTDTInfer
        one_by_one = greedy.GreedyTDTInfer
        options["durations"] = durations
        options["include_duration"] = keep_durations
    else:
        batched = greedy.GreedyBatchedRNNTInfer
        one_by_one = greedy.GreedyRNNTInfer
        if loop != "nemo_one_by_one":
            options["loop_labels"] = loop != "nemo_frame_looping"
    if loop == "nemo_one_by_one":
        infer = one_by_one(**options)
    else:
        infer = batched(**options)
    if by_graphs:  # forced, it raises where it would fall back
        infer.decoding_computer.force_cuda_graphs_mode("full_graph")

    def decode() -> Any:
        transposed = encoded.transpose(1, 2)
        return infer.forward(encoder_output=transposed, encoded_lengths=batch["lengths"])[0]

    return Decoder(decode, predictor, joint)


def expect_graphs(device: str) -> None:
    """ValueError, OSError or ImportError, with the reason, where NeMo would decode without
    conditional nodes and not say so.
    """
    if not device.startswith("cuda"):
        raise ValueError(
            f"device: expected 'cuda' for {GRAPHS}, got {device!r}."
            " On a CPU NeMo decodes without graphs."
        )
    from nemo.core.utils import cuda_python_utils
    from nemo_stubs import cuda_python

    cuda_python_utils.check_cuda_python_cuda_graphs_conditional_nodes_supported()
    if not cuda_python():
        raise ModuleNotFoundError("NeMo's graphs need cuda-python 12.6 or newer")


def modules(weights: dict[str, Tensor], durations: int, encoded: Tensor) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of a TransducerModel.

    Args:
        weights: of the TransducerModel.
        durations: how many the model has.
        encoded: frames (B, T, D), whose dtype and device both get.
    """
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint

    V, H = weights["predictor.embedding.weight"].shape
    D = encoded.shape[-1]
    predictor = RNNTDecoder(prednet={"pred_hidden": H, "pred_rnn_layers": 1}, vocab_size=V - 1)
    sizes = {
        "encoder_hidden": D,
        "pred_hidden": H,
        "joint_hidden": D,
        "activation": "relu",
        "dropout": 0.0,
    }
    joint = RNNTJoint(jointnet=sizes, num_classes=V - 1, num_extra_outputs=durations)
    embedding = _weights_of("predictor.embedding.", weights, "embed.")
    lstm = _weights_of("predictor.lstm.", weights, "dec_rnn.lstm.")
    predictor.prediction.load_state_dict(embedding | lstm)
    joint.pred.load_state_dict(_weights_of("predictor_projection.", weights))
    joint.joint_net[-1].load_state_dict(_weights_of("output.", weights))
    joint.enc = nn.Identity()
    return predictor.eval().to(encoded), joint.eval().to(encoded)


def _weights_of(
    prefix: str, weights: dict[str, Tensor], nemo_prefix: str = ""
) -> dict[str, Tensor]:
    """The weights whose names begin with `prefix`, which NeMo's prefix takes the place of."""
    return {
        nemo_prefix + name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


@contextmanager
def counted(**methods: tuple[Any, str]) -> Iterator[dict[str, int]]:
    """Calls of the methods, an object and a name each, while the block runs."""
    calls = dict.fromkeys(methods, 0)

    def count(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name, (owner, method) in methods.items():
        setattr(owner, method, count(name, getattr(owner, method)))
    try:
        yield calls
    finally:
        for owner, method in methods.values():
            delattr(owner, method)


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float, float | None]:
    """What the call returns, milliseconds on the clock and, on a CPU, of all threads."""
    if not device.startswith("cuda"):
        wall_start = time.perf_counter_ns()
        cpu_start = time.process_time_ns()
        result = call()
        cpu_ns = time.process_time_ns() - cpu_start
        wall_ns = time.perf_counter_ns() - wall_start
        return result, wall_ns / 1e6, cpu_ns / 1e6
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end), None


def serve(loop: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    device = request.get("device", "cpu")
    keep = request.get("keep_durations", False)
    nemo = decoder(loop, request["plan"], request["max_symbols"], keep, device)
    watched = {}
    if request["observe"] and loop != GRAPHS:  # a graph's calls are recorded once, then unseen
        watched["join"] = (nemo.joint, "joint_after_projection")
        watched["predict"] = (nemo.predictor, "predict")
    with counted(**watched) as calls:
        hypotheses, wall_ms, cpu_ms = timed(nemo.decode, device)
    answer = {
        "wall_ms": wall_ms,
        "cpu_ms": cpu_ms,
        "version": f"nemo_toolkit {version('nemo_toolkit')}",
    }
    if not request["observe"]:
        return answer
    labels = []
    frames = []
    durations = []
    for hypothesis in hypotheses:
        labels.append([int(label) for label in hypothesis.y_sequence])
        frames.append([int(frame) for frame in hypothesis.timestamp])
        durations.append([int(jump) for jump in _durations(hypothesis.token_duration)])
    lengths = [len(row) for row in labels]
    return answer | {
        "digest": [_padded(labels), lengths, _padded(frames)],
        "counts": calls,
        "durations": durations,
        "scores": [float(hypothesis.score) for hypothesis in hypotheses],
    }


def _durations(durations: Any) -> Any:
    """Durations to go through: none where NeMo has not kept them."""
    if durations is None:
        return []
    return durations


def _padded(rows: list[list[int]]) -> list[list[int]]:
    """Rows of one length, filled up with -1."""
    longest = max(map(len, rows))
    return [row + [-1] * (longest - len(row)) for row in rows]


def copy(folder: Path) -> None:
    """Copy into `folder` what these decoders import of NeMo and beside torch, and the metadata
    that NeMo's version is read from.
    """
    sys.path.append(str(Path(__file__).parent))
    from nemo_stubs import stub_nemo

    stub_nemo()

    from nemo.collections.asr.modules import rnnt  # noqa: F401
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding  # noqa: F401

    root = Path(sys.modules["nemo"].__path__[0]).parent
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if path and Path(path).is_relative_to(root / "nemo"):
            _copy_file(Path(path), root, folder)
    for file in files("nemo_toolkit") or ():
        if file.name == "METADATA":
            _copy_file(Path(str(file.locate())), root, folder)
    packaging = Path(sys.modules["packaging"].__file__ or "").parent
    for path in packaging.glob("*.py"):
        _copy_file(path, packaging.parent, folder)


def _copy_file(path: Path, root: Path, folder: Path) -> None:
    """Copy a file to where it lies below `root`, in `folder`."""
    target = folder / path.relative_to(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def main(loop: str, folder: str = "") -> None:
    """Answer until the requests end. `folder`: what `copy` wrote, for a Python without NeMo."""
    sys.path.append(str(Path(__file__).parent))
    if folder:
        sys.path.append(folder)
    from peer_worker import answer_requests

    answer_requests(functools.partial(serve, loop))


if __name__ == "__main__":
    if sys.argv[1] == "copy":
        copy(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
