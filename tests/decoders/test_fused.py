"""The fused turn of label looping with no GPU: run in Triton's interpreter, compiled for GPUs that are not here, and counted.

What this cannot show: speed, and races between the programs of a launch, which the interpreter runs one after another.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asrkit import runtime
from asrkit.decoders import transducer_greedy
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import graph_capture, graphs
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions
from asrkit.models import ConvConfig, LSTMConfig, StatelessConfig, TransducerConfig, TransducerModel
from asrkit.workbench.profiling import turn_launches

TDT = (0, 1, 2, 4)
LSTM = LSTMConfig(width=6, layers=2)
STATELESS, NO_STATE = (StatelessConfig(width=6, context=context) for context in (3, 1))


# ---- what the kernels find: these run in a process of their own, where Triton interprets them


def ours(predictor, durations, dtype=torch.float64):
    torch.manual_seed(3)
    sizes = {"encoder": ConvConfig(width=4, layers=1), "predictor": predictor, "joint_width": 5}
    model = TransducerModel(
        TransducerConfig(vocab_size=6, durations=durations, activation="relu", **sizes)
    )
    model.output.weight.data.mul_(4)
    model.output.bias.data[6] += 1 - 3 * bool(durations)
    return model.to(dtype).eval()


class Swapping(nn.Module):
    """Hands its two states back the other way round, in the memory that they came in; blank is 0, and tokens tie."""

    def __init__(self, durations=()):
        super().__init__()
        self.blank, self.durations, self.scale = 0, durations, nn.Parameter(torch.ones(()))

    def predict(self, labels, state=None):
        if state is None:
            state = {
                "now": labels[:, None].double(),
                "then": labels[:, None].double() + 1,
                "none": None,
            }
        new = {"now": state["then"], "then": state["now"], "none": None}
        return (new["now"] + labels[:, None]) * self.scale, new

    def join(self, encoded, predicted):
        scores = [
            (encoded[..., :4] * predicted).round(),
            encoded[..., 4 : 4 + len(self.durations)].round(),
        ]
        return torch.cat(scores, -1)  # whole numbers: the first of the largest is taken


class Broken(Swapping):
    """Logits of which some are NaN or infinite."""

    def join(self, encoded, predicted):
        logits = super().join(encoded, predicted)
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(logits)[logits[..., 1].long() % 3]
        spoilt = logits.clone()
        spoilt[..., 2] += bad
        spoilt[..., -1] += bad.flip(0)
        return torch.where((logits[..., 0] > 1)[..., None], spoilt, logits)


CASES = [
    (lambda: ours(LSTM, ()), 1, 2, "max_prob"), (lambda: ours(LSTM, TDT), 2, 10, "entropy"),
    (lambda: ours(STATELESS, ()), 8, 1, "none"), (lambda: ours(NO_STATE, TDT, torch.bfloat16), 8, 3, "max_prob"),
    (lambda: Swapping((0, 3)), 2, 2, "none"), (lambda: Broken((0, 1)), 2, 2, "entropy"), (lambda: Broken(), 3, 3, "max_prob"),
]  # fmt: skip


@torch.inference_mode()
def check_turns():
    """Turn for turn the fused turn leaves in the buffers what the plain one leaves, from a fresh start and from a carry."""
    said = 0
    for number, (make, window, max_symbols, confidence) in enumerate(CASES):
        model, generator = make(), torch.Generator().manual_seed(number)
        dtype = next(model.parameters()).dtype
        dtype = torch.float64 if isinstance(model, Swapping) else dtype
        encoded = (2 * torch.randn(3, 5, 5 + isinstance(model, Swapping), generator=generator)).to(
            dtype
        )
        lengths, greedy = torch.tensor([5, 0, 3]), GreedyModel(model, confidence)
        carry = greedy.initial_carry(encoded)
        for _ in range(1 + (number < 2)):
            pair = [
                GraphLoop(
                    3,
                    6,
                    greedy,
                    encoded,
                    carry,
                    GreedyOptions(window=window, max_symbols=max_symbols),
                    lacks,
                )
                for lacks in ("as asked", "")
            ]
            for loop in pair:
                loop.load(encoded, lengths, carry)
            while pair[0].state.time.lt(pair[0].lengths).any():
                for loop in pair:
                    loop.turn(greedy)
                plain, fused = (
                    [*state_tensors(loop.state), loop.counts, loop.active] for loop in pair
                )
                for one, other in zip(plain, fused, strict=True):
                    torch.testing.assert_close(
                        one,
                        other,
                        equal_nan=True,
                        msg=lambda text, number=number: f"{number}: {text}",
                    )
            plain, fused = (loop.hypotheses(lengths, carry, loop.impl) for loop in pair)
            assert (plain.impl, fused.impl) == ("not fused: as asked", "fused")
            for one, other in zip(plain.parts(), fused.parts(), strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)
            said, carry = said + int(plain.lengths.sum()), plain.carry
    assert said > 50


@torch.inference_mode()
def check_large_vocabularies():
    """More logits than a program holds at once, in every format; of equal ones the first."""
    from asrkit.decoders.transducer import fused_turn

    for V, dtype in [
        (29, torch.float16),
        (1025, torch.float32),
        (8198, torch.bfloat16),
        (8198, torch.float32),
    ]:
        logits = (3 * torch.randn(2, 2, V + 3, generator=torch.Generator().manual_seed(V))).to(
            dtype
        )
        logits[0, 0, [V - 2, V // 2]] = logits[0, 0].max() + 1
        logits[0, 1, :V] = -torch.inf
        logits[0, 1, V - 1] = 0
        model = SimpleNamespace(
            blank=V - 1, durations=(0, 1, 4), join=lambda *_, logits=logits: logits
        )
        greedy = GreedyModel(model, "entropy")
        wanted = greedy.best_tokens(torch.zeros(2, 2, 1), torch.zeros(2, 1, 1))
        found = fused_turn.best(logits, greedy.duration_table, V, V - 1, "entropy")
        assert found[0][0, 0] == V // 2 and wanted.jump[0, 1] >= 1
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def check_windows():
    """Frames from each clock on; beyond the last one it comes again."""
    from asrkit.decoders.transducer import fused_turn

    encoded, time = torch.arange(24.0).view(2, 4, 3), torch.tensor([1, 9])
    assert torch.equal(
        fused_turn.window(encoded, time, 4), encoded[[[0], [1]], [[1, 2, 3, 3], [3, 3, 3, 3]]]
    )


def check_what_is_recorded():
    """A capture sees the kernels, as ops that wait for nothing, and which weights a turn reads."""
    model = ours(LSTM, TDT)
    with torch.inference_mode():
        greedy, encoded = GreedyModel(model), torch.zeros(3, 7, 5, dtype=torch.float64)
        loop = GraphLoop(3, 8, greedy, encoded, greedy.initial_carry(encoded), GreedyOptions(), "")
        with graph_capture.CaptureGuard() as seen:
            loop.turn(greedy)
    at = {
        name: part.untyped_storage().data_ptr() in seen.storages_read
        for name, part in model.named_parameters()
    }
    assert all(found == (not name.startswith(("encoder", "ctc"))) for name, found in at.items()), at


def test_the_kernels_find_what_torch_finds_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    checks = ["check_turns", "check_large_vocabularies", "check_windows", "check_what_is_recorded"]
    calls = "; ".join(f"{here.stem}.{check}()" for check in checks)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem}; {calls}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ---- what a GPU gets


class NoDriver:
    """Triton's driver where there is no GPU: it compiles for one and launches nothing."""

    def __init__(self, cc):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", cc, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture(scope="module", params=[80, 90, 100])
def launched(request):
    """Every kernel as the ops launch it, for V = 1025 and 8198, compiled and not run: {name: what its binary says}."""
    pytest.importorskip("triton")
    from triton.runtime import JITFunction, driver

    from asrkit.decoders.transducer import fused_turn as kernels
    from asrkit.decoders.transducer import triton_kernels
    from asrkit.workbench.profiling import cubin

    if not hasattr(triton_kernels._walk, "create_binder"):
        pytest.skip("TRITON_INTERPRET is set, which leaves nothing to compile")
    made = []

    def run(self, *given, grid, warmup, **options):
        compiled = compile_only(self, *given, grid=grid, warmup=True, **options)
        threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        made.append(
            cubin.read(
                compiled.asm["cubin"],
                self.__name__,
                cc=request.param,
                threads=threads,
                shared_B=shared,
            )
        )

    compile_only = JITFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", NoDriver(request.param))
        patch.setattr(JITFunction, "run", run)
        B, W, E, whole, number = 128, 8, 640, torch.zeros(128, dtype=torch.int64), torch.zeros(128)
        kernels.window(torch.zeros(B, 16, E, dtype=torch.bfloat16), whole, W)
        for V, dtype, durations in [(1025, torch.bfloat16, 0), (8198, torch.float32, 5)]:
            table = torch.zeros(durations, dtype=torch.int64) if durations else None
            reading = kernels.best(
                torch.zeros(B, W, V + durations, dtype=dtype), table, V, V - 1, "entropy"
            )
        said, active = torch.zeros(3, B, 5121, dtype=torch.int64), torch.zeros((), dtype=torch.bool)
        clocks = whole, whole.clone(), whole.clone(), number, whole.clone()
        kernels.walk(*reading, *clocks, said, torch.zeros(B, 5121), active, V - 1, 10)
        state = [
            torch.zeros(B, E),
            torch.zeros(B, 2, E, dtype=torch.bfloat16),
            torch.zeros(B, 2, dtype=torch.int64),
        ]
        kernels.overwrite(whole.bool(), state, [part.clone() for part in state])
    return made


def test_every_launch_compiles_without_spills_and_fills_half_a_multiprocessor(launched):
    assert [one.name for one in launched] == ["_window", "_best", "_best", "_walk", "_overwrite"]
    for one in launched:
        assert one.spills == one.stack_B == 0, one
        assert one.registers <= 64 and one.warps >= 32, one


@pytest.mark.parametrize(
    ("predictor", "most"), [(LSTMConfig(width=8), 12), (LSTM, 17), (STATELESS, 13)], ids=repr
)
@pytest.mark.parametrize("durations", [(), TDT], ids=["RNN-T", "TDT"])
def test_a_fused_turn_takes_a_dozen_launches(predictor, most, durations):
    pytest.importorskip("triton")
    config = TransducerConfig(
        vocab_size=9,
        encoder=ConvConfig(width=4, layers=1),
        predictor=predictor,
        durations=durations,
    )
    for confidence in ("none", "entropy"):
        plain, fused = (
            turn_launches(config, fused=way, confidence=confidence) for way in (False, True)
        )
        assert fused.launches == most and plain.launches > 5 * most - 20
        assert fused.syncs == plain.syncs == 0
        assert all(fused.ops[name] == 1 for name in ("window", "best", "walk", "overwrite"))


@pytest.mark.parametrize("predictor", [LSTM, LSTMConfig(width=8), STATELESS], ids=repr)
@pytest.mark.parametrize("fused", [False, True])
def test_under_autocast_a_turn_keeps_the_dtypes_that_it_began_with(predictor, fused):
    pytest.importorskip("triton")
    config = TransducerConfig(
        vocab_size=9, encoder=ConvConfig(width=4, layers=1), predictor=predictor
    )
    for dtype in (torch.bfloat16, torch.float16):
        assert turn_launches(config, fused=fused, autocast=dtype).syncs == 0


# ---- where it cannot be fused


def decoded(store, model, batch, mode="step", turn="auto"):
    with torch.inference_mode():
        greedy = GreedyModel(model)
        carry, options = greedy.initial_carry(batch[0]), GreedyOptions(graphs=mode, turn=turn)
        return store.decode(graphs.DecoderCall(greedy, *batch, carry, options))


@pytest.fixture
def tried(monkeypatch):
    """A capture that runs a turn, as the real one does first, and then is turns run eagerly; lists which were fused."""
    found = []

    def capture(loop, greedy, mode):
        found.append(loop.fused)
        loop.turn(greedy)
        return lambda: loop.repeat(lambda: loop.turn(greedy))

    monkeypatch.setattr(graphs, "capture", capture)
    return found


def test_kernels_that_fail_leave_the_plain_turn_and_the_result_says_why(
    make, speak, same, monkeypatch, tried
):
    pytest.importorskip("triton")
    model, batch, store = make("lstm", 3), speak("lstm", 4, 11, 3), graphs.GraphCache()
    monkeypatch.setattr(graphs, "_why_not_fused", lambda encoded: "")
    from asrkit.decoders.transducer import fused_turn

    def broken(loop, greedy):
        raise RuntimeError("Failed to find C compiler.\nMore of it")

    monkeypatch.setattr(fused_turn, "turn", broken)
    for mode in ("step", "auto"):
        found = decoded(store, model, batch, mode)
        same(found, transducer_greedy(model, *batch))
        assert (
            found.impl
            == "windowed_looping, graphs=step, not fused: RuntimeError: Failed to find C compiler."
        )
    assert tried == [True, False]
    found = decoded(store, model, batch, turn="plain")
    assert found.impl == "windowed_looping, graphs=step, not fused: as asked"
    with pytest.raises(
        RuntimeError,
        match=r"^graphs='step': capture failed, RuntimeError: turn='fused': RuntimeError: Failed to ",
    ):
        decoded(store, model, batch, turn="fused")


def test_auto_goes_on_with_plain_turns_if_fused_ones_find_other_labels(
    make, speak, same, monkeypatch, tried
):
    pytest.importorskip("triton")
    model, batch, store = make("lstm", 3), speak("lstm", 4, 11, 3), graphs.GraphCache()
    monkeypatch.setattr(graphs, "_why_not_fused", lambda encoded: "")
    from asrkit.decoders.transducer import fused_turn

    monkeypatch.setattr(
        fused_turn, "turn", lambda loop, greedy: (loop.plain_turn(greedy), loop.outputs[0].add_(1))
    )
    for _ in range(2):
        found = decoded(store, model, batch, "auto")
        same(found, transducer_greedy(model, *batch))
        assert (
            found.impl
            == "windowed_looping, graphs=step, not fused: the fused turn found other labels than the plain loop"
        )
    assert tried == [True, False] and len(store.loops) == 1


def test_what_is_lacking_is_said(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True)
    assert graphs._why_not_fused(torch.zeros(1)) == "Triton has nothing for cpu"
    for why in ("", "no package triton", "RuntimeError: built for another driver"):
        monkeypatch.setattr(runtime, "lacks", {"triton": why}.__getitem__)
        assert graphs._why_not_fused(on_gpu) == why


@pytest.mark.parametrize(("change", "wanted"), [
    ({"turn": "fast"}, "turn: expected one of 'auto', 'fused', 'plain', got 'fast'."),
    ({"turn": "fused"}, "turn: expected 'auto' with graphs='auto', got 'fused'. Only a graph asked for by name has a choice."),
    ({"turn": "plain", "graphs": "off"},
     "turn: expected 'auto' with graphs='off', got 'plain'. Only a graph asked for by name has a choice."),
])  # fmt: skip
def test_a_turn_that_cannot_be_chosen_is_one_line(make, speak, change, wanted):
    with pytest.raises(ValueError) as error:
        transducer_greedy(make("lstm", 3), *speak("lstm", 2, 5, 3), **change)
    assert str(error.value) == wanted


@pytest.mark.parametrize(("state", "said"), [
    (lambda one: one.double(), "model.predict: expected torch.float32, as it began with, got torch.float64. Keep one dtype."),
    (lambda one: one[:, :1], "model.predict: expected shape (4, 3), as before, got (4, 1)."),
])  # fmt: skip
def test_a_state_that_changes_its_kind_is_one_line(state, said):
    pytest.importorskip("triton")
    from asrkit.decoders.transducer import fused_turn

    own = torch.zeros(4, 3)
    with pytest.raises(ValueError) as error:
        fused_turn.keep_emitted(torch.ones(4, dtype=torch.bool), (state(own),), (own,))
    assert str(error.value) == said
