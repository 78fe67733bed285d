"""NeMo's greedy transducer decoders; see peer_worker.py.

A request names a file that `write` wrote: weights of a TransducerModel with an LSTM and a relu, and
projected frames, so NeMo's projection of the encoder is not run. Prediction network, joint and
decoder are NeMo's. The answer has the digest [labels, lengths, frames] of the hypotheses, their
scores and, with "keep_durations", the durations of TDT's labels.

On CUDA there is also nemo_label_looping_graphs: label looping as one CUDA graph with conditional
nodes. Where cuda-python or the driver does not support that, NeMo warns and falls back to smaller
graphs or to none; here that is an error.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LOOPS = ("nemo_label_looping", "nemo_frame_looping", "nemo_one_by_one")
GRAPHS = "nemo_label_looping_graphs"  # on CUDA only


def write(path: Path, model: Any, encoded: Tensor, lengths: Tensor) -> None:
    """Write the weights and the batch that NeMo decodes; called by asrkit's side.

    Args:
        path: file to write.
        model: a TransducerModel with an LSTM and a relu.
        encoded: projected frames (B, T, D).
        lengths: their lengths (B,).
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


def prepare(
    loop: str, plan: str, max_symbols: int, device: str = "cpu", keep_durations: bool = False
) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    """The call of NeMo's decoder, and the function that makes an answer of its hypotheses.

    Args:
        loop: one of LOOPS, or GRAPHS.
        plan: path of the file that `write` wrote.
        max_symbols: most labels on a frame.
        device: "cpu" or "cuda".
        keep_durations: whether TDT's hypotheses include the durations of their labels.
    """
    from benchmarks.peers.nemo_stubs import stub_nemo

    stub_nemo()
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding as greedy

    batch = torch.load(plan, map_location=device)
    durations = batch["durations"]
    encoded = batch["encoded"]
    lengths = batch["lengths"]
    predictor, joint = modules(batch["weights"], len(durations), encoded)
    options = {
        "decoder_model": predictor,
        "joint_model": joint,
        "blank_index": predictor.blank_idx,
        "max_symbols_per_step": max_symbols,
    }
    kind = "RNNT"
    if durations:
        kind = "TDT"
        options |= {"durations": durations, "include_duration": keep_durations}
    if loop == "nemo_one_by_one":
        infer = getattr(greedy, f"Greedy{kind}Infer")(**options)
    else:
        options["use_cuda_graph_decoder"] = loop == GRAPHS
        if not durations:  # TDT has no frame looping
            options["loop_labels"] = loop != "nemo_frame_looping"
        infer = getattr(greedy, f"GreedyBatched{kind}Infer")(**options)
    if loop == GRAPHS:  # if forced, it raises instead of falling back
        assert device == "cuda", "on a CPU NeMo decodes without graphs"
        infer.decoding_computer.force_cuda_graphs_mode("full_graph")

    def call() -> Any:
        transposed = encoded.transpose(1, 2)
        return infer.forward(encoder_output=transposed, encoded_lengths=lengths)[0]

    return call, answer


def modules(weights: Mapping[str, Tensor], durations: int, encoded: Tensor) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of a TransducerModel.

    Args:
        weights: weights of the TransducerModel.
        durations: number of its durations.
        encoded: frames (B, T, D), whose dtype and device both modules get.
    """
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint

    from asrkit.models.checkpoints.nemo import our_name
    from benchmarks.peers.peer_encoders import load

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
    joint.enc = nn.Identity()
    load(predictor, "decoder.", our_name, weights)
    load(joint, "joint.", our_name, weights)
    return predictor.eval().to(encoded), joint.eval().to(encoded)


def answer(hypotheses: Any) -> dict[str, Any]:
    """NeMo's hypotheses as numbers."""
    labels = [torch.as_tensor(row.y_sequence).long() for row in hypotheses]
    frames = [torch.as_tensor(row.timestamp).long() for row in hypotheses]
    durations = [row.token_duration for row in hypotheses]
    return {
        "digest": [_padded(labels), [*map(len, labels)], _padded(frames)],
        "durations": [list(map(int, jumps)) for jumps in durations if jumps is not None],
        "scores": [float(row.score) for row in hypotheses],
    }


def _padded(rows: list[Tensor]) -> list[list[int]]:
    """The rows, padded with -1 to one length."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).tolist()


PEERS = {loop: ("nemo_toolkit", partial(prepare, loop)) for loop in (*LOOPS, GRAPHS)}
