import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.workbench.lessons.cuda_graphs import blocks_of_turns
from asrkit.workbench.lessons.label_looping import watch
from asrkit.workbench.lessons.shared.planted import planted


@pytest.mark.parametrize("k", [1, 3])
def test_a_decode_in_blocks_has_the_same_output_and_runs_whole_blocks(k):
    plan = planted(3, 20, V=17, width=340)
    with torch.inference_mode():
        found, ran = blocks_of_turns(k, plan.model, plan.encoded, plan.lengths)
    eager = transducer_greedy(plan.model, plan.encoded, plan.lengths, graphs="off")
    assert all(map(torch.equal, found.parts(), eager.parts()))
    assert ran % k == 0 and ran > max(map(len, plan.labels))


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_a_turn_of_frame_looping_is_a_joint_call_of_its_plain_loop(durations):
    plan = planted(4, 30, V=17, width=340, durations=durations)
    batch = plan.model, plan.encoded, plan.lengths
    with torch.inference_mode():
        found, ran = blocks_of_turns(1, *batch, strategy="frame_looping")
    assert found.tokens() == plan.labels
    plain = len(watch(*batch, strategy="frame_looping").joint_calls)
    # the flag is read a turn late; the plain loop visits frames that all durations skip
    assert ran - 1 == plain if not durations else ran - 1 <= plain
