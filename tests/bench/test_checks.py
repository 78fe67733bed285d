"""The table of checks: it passes on a CPU, sees what is wrong, and says of every check what is left out when it fails."""

import re
from dataclasses import replace

import pytest
import torch

from asrkit.bench import checks, decoders, encoder, ladder, loss_checks, losses

pytestmark = pytest.mark.usefixtures("one_thread")


def failures(device, wanted=lambda check: True):
    found = {}
    for check in filter(wanted, checks.table(device)):
        try:
            check.call()
        except Exception as error:
            found[check.name] = f"{type(error).__name__}: {error}"
    return found


def test_a_check_of_each_kind_passes_on_a_cpu():
    """All of them run in the rehearsal of tests/bench/test_share.py."""
    kinds = {(check.group, check.call.func): check.name for check in reversed(checks.table("cpu"))}
    assert not failures("cpu", lambda check: check.name in kinds.values())


@pytest.mark.gpu
def test_every_check_passes_on_a_gpu():
    assert not failures("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_checks_have_names_of_their_own_and_can_be_listed_without_the_device(device):
    table = checks.table(device)
    assert {f"ladder {rung}" for rung in ladder.RUNGS if device == "cuda" or rung not in ladder.OF_GPU} <= {
        check.name for check in table
    }
    assert len({check.name for check in table}) == len(table) > 100


def arms_of(device):
    """Names of arms and cases that the suites have on a device, as far as they can be told without it."""
    cuda = device == "cuda"
    names = {name for group in encoder.groups(cuda, compiled=True).values() for name in group} | {*encoder.groups(cuda, True)}
    names |= {*decoders.LOOPS, "one_by_one", "batched", "window_1", "rnnt-loss-ragged", "split", "wavefront", "torchaudio"}
    names |= {
        "float32",
        "autocast",
        "bfloat16",
        "float16",
        "both_batched",
        "ctc-greedy-batched",
        "sequential_norm",
        "sequential_ctc",
    }
    names |= {"tdt-loss", "ladder-rnnt", *(f"{how}_{rung}" for rung in ladder.RUNGS for how in ("to", "only"))}
    names |= {*losses.variants(*losses.halves((1, 2, 2, 2, 2), "cpu"))}
    return names | (
        {
            "numba_cuda",
            "numba_cuda_overwrite",
            "triton",
            "triton_overwrite",
            "lean_triton",
            "lean_triton_bfloat16",
            "label_looping_step",
            "label_looping_full",
        }
        if cuda
        else {"numba_cpu", "numba_cpu_overwrite"}
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_check_vouches_for_is_an_arm_or_a_case(device):
    patterns = {check.vouches for check in checks.table(device)} - {""}
    assert len(patterns) > 10
    for pattern in patterns:
        for part in pattern.split("|"):
            assert any(re.search(part, name) for name in arms_of(device)), part
    kernels = [check for check in checks.table(device) if check.group in ("losses numba_cuda", "lean triton")]
    patterns = {check.vouches for check in kernels} - {""}
    assert not any(re.search(pattern, name) for pattern in patterns for name in ("wavefront", "torchaudio", "lean"))


@pytest.mark.parametrize("rung", ["to_graph_whole", "only_graph_whole", "to_graph_of_steps", "to_graphed_encoder"])
def test_a_graph_that_fails_its_check_is_on_no_ladder(rung):
    vouching = {check.group for check in checks.table("cuda") if check.vouches and re.search(check.vouches, rung)}
    assert vouching - {"ladder"} in ({"graphs full"}, {"graphs step"}, {"encoder"}) and "ladder" in vouching
    alone = [check.vouches for check in checks.table("cuda") if check.group == "ladder" and check.vouches != "^ladder-"]
    assert not any(re.search(one, name) for one in alone for name in arms_of("cuda") if not name.startswith(("to_", "only_")))


def test_a_wrong_rung_fails_its_own_check_only(monkeypatch):
    plain = checks.Recogniser

    class Wrong(plain):
        def __call__(self, *given, **how):
            heard = super().__call__(*given, **how)
            return heard._replace(labels=heard.labels + 1) if self.how.loading == "overlapped" else heard

    monkeypatch.setattr(checks, "Recogniser", Wrong)
    wanted = ("ladder baseline", "ladder by_length", "ladder overlapped")
    found = failures("cpu", lambda check: check.name in wanted)
    assert found == {"ladder overlapped": "AssertionError: ladder-rnnt-tiny says other labels than its script"}


def test_a_graphs_scores_may_be_off_by_rounding_and_its_tokens_not(monkeypatch):
    plain, wrong = checks.transducer_greedy, {}

    def decode(*given, graphs, **how):
        found = plain(*given, graphs=graphs, **how)
        return found if graphs == "off" else replace(found, **{name: change(found) for name, change in wrong.items()})

    monkeypatch.setattr(checks, "transducer_greedy", decode)
    wrong["scores"] = lambda found: found.scores * 1.002
    checks._looped("cpu", "auto", (), torch.bfloat16)
    with pytest.raises(AssertionError, match="apart, of"):
        checks._looped("cpu", "auto", (), torch.float32)
    wrong["frames"] = lambda found: found.frames + 1
    with pytest.raises(AssertionError, match="integers differ"):
        checks._looped("cpu", "auto", (), torch.bfloat16)


def off_by_one(decode):
    return lambda *given, **how: replace(found := decode(*given, **how), labels=found.labels + 1)


@pytest.mark.parametrize(
    ("name", "spoil", "group", "said"),
    [
        ("ctc_greedy", off_by_one, "decoders", "integers differ"),
        ("transducer_beam", lambda beam: lambda *a, **k: replace(x := beam(*a, **k), scores=x.scores + 1), "decoders", "1 apart"),
        ("normalize", lambda f: lambda *a: f(*a) * 1.01, "models", "apart, of"),
        ("rnnt_loss_packed", lambda f: lambda *a, **k: 1.001 * f(*a, **k), "losses numba_cpu", "apart, of"),
        ("split_batches", lambda f: lambda *a, **k: f(*a, **k) + 1, "losses wavefront", "apart, of"),
        ("peak_memory", lambda f: lambda *a, **k: f(*a, **k) + 8192, "profiling", "12008192"),
    ],
)  # fmt: skip
def test_a_wrong_path_is_found(monkeypatch, name, spoil, group, said):
    room = checks if hasattr(checks, name) else loss_checks
    monkeypatch.setattr(room, name, spoil(getattr(room, name)))
    found = failures("cpu", lambda check: check.group == group)
    assert any(said in why for why in found.values()), found


def test_a_gradient_that_is_wrong_is_found_though_the_loss_is_right():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, costs):
            return costs.clone()

        @staticmethod
        def backward(ctx, slope):
            return slope * 1.01

    def loss(*given, impl, **how):
        costs = loss_checks.rnnt_loss(*given, impl=impl, **how)
        return costs if impl == "reference" else Half.apply(costs)

    with pytest.raises(AssertionError, match="apart, of"):
        loss_checks._loss("cpu", loss, "wavefront", torch.float32, (3, 6, 4, 9), {}, False)


def test_likeness_is_relative_to_the_largest_and_knows_nan_and_infinity():
    wanted = torch.tensor([100.0, torch.inf, torch.nan])
    checks.near([wanted + torch.tensor([1e-4, 0, 0])], [wanted])
    for wrong in (
        torch.tensor([100.1, torch.inf, torch.nan]),
        torch.tensor([100.0, 5.0, torch.nan]),
        torch.tensor([100.0, torch.inf, 1.0]),
    ):
        with pytest.raises(AssertionError):
            checks.near([wrong], [wanted])
    with pytest.raises(AssertionError, match="shapes"):
        checks.near([wanted[:1]], [wanted])
