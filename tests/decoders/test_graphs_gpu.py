"""Loops by CUDA graphs, on a GPU: the plain loops' results, captures, memory, streams."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from asrkit.decoders import (
    aed_greedy,
    ctc_greedy,
    ctc_greedy_sequential,
    release_graphs,
    transducer_greedy,
)
from asrkit.decoders.transducer import STRATEGIES, graphs

sys.path.insert(0, str(Path(__file__).parent))
import attention_cases
from attention_oracle import aed_greedy_reference

pytestmark = pytest.mark.gpu
MODES = pytest.mark.parametrize("mode", ["step", "full"])
GPU_CASES = pytest.mark.parametrize(
    ("kind", "durations"),
    [
        ("stateless", ()),
        ("lstm", ()),
        ("lstm", (0, 1, 2, 4, 8)),
        ("foreign", (0, 1, 2, 4, 8)),
    ],
)


def on_gpu(make, kind, durations=(), dtype=torch.float32):
    return make(kind, 3, durations=durations).to("cuda", dtype)


def batch_on_gpu(speak, kind, B, T, dtype=torch.float32, seed=3):
    encoded, lengths = speak(kind, B, T, seed)
    return encoded.to("cuda", dtype), lengths.cuda()


def close(found, wanted):
    """The results of a GPU equal those of the CPU."""
    for ours, theirs in zip(found.parts(), wanted.parts(), strict=True):
        torch.testing.assert_close(
            ours.cpu(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True
        )


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@GPU_CASES
@pytest.mark.parametrize(
    ("strategy", "mode", "dtype"),
    [
        *product(["windowed_looping"], ["step", "full", "auto"], FLOATS),
        *product(["label_looping", "frame_looping"], ["step", "full"], FLOATS[:2]),
    ],
)
def test_graphs_equal_the_plain_loop(
    make, speak, same, strategy, mode, kind, durations, dtype
):
    model = on_gpu(make, kind, durations, dtype)
    options = {"strategy": strategy, "confidence": True, "max_symbols": 3}
    ran = "full" if mode == "auto" else mode
    # sizes as the loop has them: half precision rounds by size
    for B, T, seed in [(8, 48, 1), (8, 40, 2), (16, 20, 3), (1, 48, 4), (8, 48, 5)]:
        batch = batch_on_gpu(speak, kind, B, T, dtype, seed)
        found = transducer_greedy(model, *batch, graphs=mode, **options)
        assert found.impl == f"{strategy}, graphs={ran}"
        same(found, transducer_greedy(model, *batch, graphs="off", **options))
        assert found.lengths.sum() > 0


@MODES
def test_on_a_gpu_a_carry_continues_and_padding_does_not_matter(make, speak, mode):
    model = on_gpu(make, "lstm")
    encoded, lengths = batch_on_gpu(speak, "lstm", 5, 30)
    whole = transducer_greedy(model, encoded, lengths, graphs="off").tokens()
    begin = encoded[:, :13], lengths.clamp(max=13)
    rest = encoded[:, 13:], (lengths - 13).clamp(min=0)
    first = transducer_greedy(model, *begin, graphs=mode)
    second = transducer_greedy(model, *rest, graphs=mode, carry=first.carry)
    pairs = zip(first.tokens(), second.tokens(), strict=True)
    assert [a + b for a, b in pairs] == whole
    for b in range(5):
        encoded[b, lengths[b] :] = torch.nan
    assert transducer_greedy(model, encoded, lengths, graphs=mode).tokens() == whole


@MODES
def test_on_a_gpu_weights_may_change_in_place_and_may_move(make, speak, same, mode):
    model = on_gpu(make, "lstm")
    encoded, lengths = batch_on_gpu(speak, "lstm", 8, 48)
    before = transducer_greedy(model, encoded, lengths, graphs=mode)
    with torch.no_grad():
        model.output.weight.neg_()
    after = transducer_greedy(model, encoded, lengths, graphs=mode)
    same(after, transducer_greedy(model, encoded, lengths, graphs="off"))
    assert after.tokens() != before.tokens()
    model.bfloat16()
    batch = encoded.bfloat16(), lengths
    found = transducer_greedy(model, *batch, graphs=mode)
    same(found, transducer_greedy(model, *batch, graphs="off"))


@MODES
@pytest.mark.parametrize("kind", ["stateless", "lstm"])
def test_on_a_gpu_autocast_is_captured(make, speak, same, mode, kind):
    model = on_gpu(make, kind)
    with torch.autocast("cuda", torch.bfloat16):
        for seed in (3, 4):
            batch = batch_on_gpu(speak, kind, 8, 48, seed=seed)
            found = transducer_greedy(model, *batch, graphs=mode)
            same(found, transducer_greedy(model, *batch, graphs="off"))


@MODES
def test_on_a_gpu_memory_is_bounded_and_returned(make, speak, mode):
    model = on_gpu(make, "lstm")
    batch = batch_on_gpu(speak, "lstm", 2, 12)
    transducer_greedy(model, *batch_on_gpu(speak, "lstm", 8, 48), graphs="off")

    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    release_graphs()
    before = used()
    for number in range(graphs.KEEP + 3):
        transducer_greedy(model, *batch, graphs=mode, max_symbols=3 + number)
    assert len(graphs.MODELS[model].loops) == graphs.KEEP
    assert used() > before
    release_graphs(model)
    workspace = 80 << 20  # of matrix products, which torch may keep for a stream
    assert used() - before <= workspace
    for _ in range(3):
        transducer_greedy(model, *batch, graphs=mode)
        release_graphs(model)
    assert used() - before <= workspace


@MODES
def test_on_a_gpu_streams_and_threads_may_share_a_model(make, speak, mode):
    model = on_gpu(make, "lstm")
    batches = [batch_on_gpu(speak, "lstm", 8, 48, seed=seed) for seed in range(8)]

    def decode(batch, mode):
        return transducer_greedy(model, *batch, graphs=mode).tokens()

    def work(own):
        with torch.cuda.stream(torch.cuda.Stream()):
            return [decode(batch, mode) for batch in own]

    wanted = [decode(batch, "off") for batch in batches]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(work, (batches[::2], batches[1::2]))
    assert even == wanted[::2]
    assert odd == wanted[1::2]


@GPU_CASES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_a_gpu_every_loop_equals_the_definition_on_a_cpu(
    make, speak, kind, durations, strategy
):
    options = {"confidence": True, "max_symbols": 3, "graphs": "off"}
    model = make(kind, 3, durations=durations)
    batch = speak(kind, 9, 30, 3)
    wanted = transducer_greedy(model, *batch, strategy="one_by_one", **options)
    there = [part.cuda() for part in batch]
    found = transducer_greedy(model.cuda(), *there, strategy=strategy, **options)
    close(found, wanted)


def test_on_a_gpu_ctc_equals_one_by_one_on_a_cpu():
    draw = torch.Generator().manual_seed(1)
    log_probs = (3 * torch.randn(6, 40, 9, generator=draw)).log_softmax(-1)
    lengths = torch.tensor([40, 33, 7, 2, 1, 0])
    found = ctc_greedy(log_probs.cuda(), lengths.cuda())
    close(found, ctc_greedy_sequential(log_probs, lengths))


def test_on_a_gpu_attention_equals_the_definition_on_a_cpu():
    model = attention_cases.random_model(2, eos=3.0)
    batch = attention_cases.random_frames(5, 6)
    wanted = aed_greedy_reference(model, *batch, **attention_cases.OPTIONS)
    there = [part.cuda() for part in batch]
    found = aed_greedy(model.cuda(), *there, **attention_cases.OPTIONS)
    close(found, wanted)
