"""What NeMo would record as a CUDA graph, run as plain calls on a CPU by the Python of `make peers`.

python -P nemo_graph_worker.py FOLDER_OF_PEER_DECODERS PLAN
[labels, frames]
"""

import json
import sys

import torch


def main(folder, plan):
    """Prints what NeMo's calls find in the plan."""
    sys.path.append(folder)
    import nemo_stubs
    import peer_decoders

    # as on a GPU's machine, where NeMo imports cuda-python with its decoders
    nemo_stubs.cuda_python = lambda: True
    nemo_stubs.stub_nemo()
    from nemo.collections.asr.parts.submodules import rnnt_greedy_decoding as greedy
    from nemo.collections.asr.parts.utils.rnnt_utils import batched_hyps_to_hypotheses

    given = torch.load(plan)
    durations, encoded, lengths = given["durations"], given["encoded"], given["lengths"]
    predictor, joint = peer_decoders.modules(given["weights"], len(durations), encoded)
    how = {
        "decoder_model": predictor,
        "joint_model": joint,
        "blank_index": predictor.blank_idx,
        "max_symbols_per_step": 10,
    }
    kind = greedy.GreedyBatchedTDTInfer if durations else greedy.GreedyBatchedRNNTInfer
    how |= {"durations": durations} if durations else {"loop_labels": True}
    computer = kind(**how, use_cuda_graph_decoder=True).decoding_computer
    computer.force_cuda_graphs_mode(
        "no_graphs"
    )  # the calls that it would record, one after another
    with torch.inference_mode():
        found, _ = computer.cuda_graphs_impl(encoded, lengths)
    hypotheses = batched_hyps_to_hypotheses(found, batch_size=len(lengths))
    print(
        json.dumps(
            [
                [[*map(int, getattr(one, field))] for one in hypotheses]
                for field in ("y_sequence", "timestamp")
            ]
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
