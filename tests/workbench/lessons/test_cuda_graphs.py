import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.workbench.lessons.cuda_graphs import blocks_of_turns
from asrkit.workbench.lessons.shared.planted import planted


@pytest.mark.parametrize("k", [1, 3])
def test_a_decode_in_blocks_has_the_same_output_and_runs_whole_blocks(k):
    plan = planted(3, 20, V=17, width=340)
    with torch.inference_mode():
        found, ran = blocks_of_turns(k, plan.model, plan.encoded, plan.lengths)
    eager = transducer_greedy(plan.model, plan.encoded, plan.lengths, graphs="off")
    assert all(map(torch.equal, found.parts(), eager.parts()))
    assert ran % k == 0 and ran > max(map(len, plan.labels))
