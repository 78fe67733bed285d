"""NeMo's greedy transducer decoders; see peer_worker.py.

A request names a file that `write` made: the weights of a TransducerModel with an LSTM and a relu,
and frames that are projected already, so NeMo's own projection of the encoder is left out.
Prediction network, joint and decoder are NeMo's. The answer has the hypotheses: the digest
[labels, lengths, frames], scores, and with "keep_durations" the durations of TDT's labels.

On CUDA there is one loop more, nemo_label_looping_graphs: NeMo's label looping as one CUDA graph
with conditional nodes. NeMo falls back to smaller graphs, or to none, with a warning where
cuda-python or the driver cannot do that; here that is an error.
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
    """Write what NeMo needs to decode the same batch with the same weights; asrkit's side.

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


def prepare(
    loop: str, plan: str, max_symbols: int, device: str = "cpu", keep_durations: bool = False
) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    """NeMo's decoder of a plan as a call, and what makes an answer of its hypotheses.

    Args:
        loop: one of LOOPS, or GRAPHS.
        plan: path of what `write` wrote.
        max_symbols: labels on a frame at most.
        device: "cpu" or "cuda".
        keep_durations: whether the hypotheses of TDT have the durations of their labels.
    """
    from nemo_stubs import stub_nemo

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
        if not durations:  # there is no frame looping of TDT
            options["loop_labels"] = loop != "nemo_frame_looping"
        infer = getattr(greedy, f"GreedyBatched{kind}Infer")(**options)
    if loop == GRAPHS:  # forced, it raises where it would fall back
        assert device == "cuda", "on a CPU NeMo decodes without graphs"
        infer.decoding_computer.force_cuda_graphs_mode("full_graph")

    def call() -> Any:
        transposed = encoded.transpose(1, 2)
        return infer.forward(encoder_output=transposed, encoded_lengths=lengths)[0]

    return call, answer


def modules(weights: Mapping[str, Tensor], durations: int, encoded: Tensor) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of a TransducerModel.

    Args:
        weights: of the TransducerModel.
        durations: how many the model has.
        encoded: frames (B, T, D), whose dtype and device both get.
    """
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint
    from peer_encoders import load

    from asrkit.models.checkpoints.nemo import our_name

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
    """Hypotheses of NeMo as numbers."""
    labels = [torch.as_tensor(one.y_sequence).long() for one in hypotheses]
    frames = [torch.as_tensor(one.timestamp).long() for one in hypotheses]
    durations = [one.token_duration for one in hypotheses]
    return {
        "digest": [_padded(labels), [*map(len, labels)], _padded(frames)],
        "durations": [list(map(int, jumps)) for jumps in durations if jumps is not None],
        "scores": [float(one.score) for one in hypotheses],
    }


def _padded(rows: list[Tensor]) -> list[list[int]]:
    """Rows of one length, filled up with -1."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).tolist()


PEERS = {loop: ("nemo_toolkit", partial(prepare, loop)) for loop in (*LOOPS, GRAPHS)}
