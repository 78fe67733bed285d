"""The table of checks: it passes on a CPU, sees what is wrong, and says of every check what is left out when it fails."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from asrkit.workbench.bench import checks, guards
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks import decoders as decoder_checks
from asrkit.workbench.bench.checks import losses as loss_checks
from asrkit.workbench.bench.checks import models as model_checks
from asrkit.workbench.bench.checks import profiling as profiling_checks
from asrkit.workbench.bench.suites import (
    aed,
    decoders,
    encoder,
    jasper,
    ladder,
    losses,
    optimizers,
    phases,
)

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
    """All of them run in the rehearsal of tests/workbench/bench/test_share.py."""
    kinds = {(check.group, check.call.func): check.name for check in reversed(checks.table("cpu"))}
    assert not failures("cpu", lambda check: check.name in kinds.values())


@pytest.mark.gpu
def test_every_check_passes_on_a_gpu():
    assert not failures("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_checks_have_names_of_their_own_and_can_be_listed_without_the_device(device):
    table = checks.table(device)
    for kind, less in (("rnnt", ()), ("tdt", ()), ("ctc", ladder.TRANSDUCER_RUNGS)):
        rungs = [
            rung
            for rung in ladder.RUNGS
            if (device == "cuda" or rung not in ladder.GPU_RUNGS) and rung not in less
        ]
        assert {f"ladder-{kind} {rung}" for rung in rungs} <= {check.name for check in table}
    assert len({check.name for check in table}) == len(table) > 100


def arms_of(device):
    """Arms that the suites have on a device by their names, as `way`s and by their cases, as far as that can be told without it."""
    cuda, ways = device == "cuda", set[str]()

    def add(what, names, *dtypes):
        ways.update(
            guards.way(name, what, dtype) for name in names for dtype in dtypes or ("float32",)
        )

    for what, group in encoder.groups(cuda, compiled=True).items():
        for name, one in group.items():
            add(what, [name], one.arithmetic)
    for name, way in jasper.ways(cuda, compiled=True).items():
        add("jasper-inference", [name], way.arithmetic)
    modes = ("step", "full") if cuda else ()
    for kind in ("rnnt", "tdt"):
        graphs = [f"windowed_looping_{mode}{end}" for mode, end in product(modes, ("", "_plain"))]
        add(f"{kind}-greedy", [*decoders.LOOPS, "one_by_one", *graphs], "float32", "bfloat16")
        add(f"{kind}-greedy-window", [f"window_{size}" for size in decoders.WINDOWS])
        windowed = ["off", *modes, *["full_plain"] * cuda]
        add(
            f"{kind}-greedy-graphs",
            [f"window_{size}_{mode}" for size in (8, 1) for mode in windowed],
            "bfloat16",
        )
        add(f"{kind}-recogniser", ["windowed_looping_off", *graphs], "bfloat16")
    for kind, rung in product(("rnnt", "tdt", "ctc"), ladder.RUNGS):
        if (cuda or rung not in ladder.GPU_RUNGS) and not (
            kind == "ctc" and rung in ladder.TRANSDUCER_RUNGS
        ):
            add(
                f"ladder-{kind}",
                [f"only_{rung}"],
                ladder.dtype_of(ladder.RUNGS[rung].get("precision", "float32")),
            )
            add(f"ladder-{kind}", [f"to_{rung}"], "bfloat16")
    dtypes = ("float32", "bfloat16") if cuda else ("float32",)
    ways_of_lstm = [f"phases_{count}" for count in phases.COUNTS]
    ways_of_lstm += [f"sub_batches_{count}" for count in phases.SUB_BATCHES]
    add("lstm-phases-librispeech", ["whole", *ways_of_lstm], *dtypes)
    add("lstm-packed", ["whole", "packed"], *dtypes)
    add("optimizer-step", [f"lamb_{impl}" for impl in optimizers.implementations(device)])
    add("weight-average", ["average"])
    drafts = [f"draft_{per_cent}" for per_cent in aed.ERRORS]
    forms = modes if cuda else ("packed",)
    best = [f"{name}_{form}" for name, form in product(aed.BEST, forms)]
    dtype = "bfloat16" if cuda else "float32"
    add("aed-greedy", [*aed.WAYS, *aed.SLOW_WAYS, *drafts, *best], dtype)
    add("ctc-greedy-batched", ["sequential", "batched"])
    add("feature-norm-batched", ["sequential", "batched"])
    add("precision-parakeet_ctc_0_6b", ["float32"], "float32")
    add("precision-parakeet_ctc_0_6b", ["autocast", "bfloat16"], "bfloat16")
    add("precision-parakeet_ctc_0_6b", ["float16"], "float16")
    add("half-over-autocast", ["autocast", "bfloat16"], "bfloat16")
    odd = {"lean_triton", losses.SMALL_TILE, "torchaudio_bfloat16"}
    losses_of = {
        *losses.joint_arms(*losses.joint_inputs((1, 2, 2, 2, 2), "cpu")),
        *(odd if cuda else []),
    }
    for name in losses_of:
        add("rnnt-loss-joint", [name], "bfloat16" if name.endswith("_bfloat16") else "float32")
    for what in ("rnnt-loss", "tdt-loss"):
        fast = ["numba_cuda", "triton"] if cuda else ["numba_cpu"]
        fast += [f"{name}_overwrite" for name in fast]
        add(what, ["wavefront", "torchaudio", *fast], "float32", "float16", "bfloat16")
    return (
        ways
        | ({"lean_triton_bfloat16"} if cuda else set())
        | {way.rpartition(" ")[2] for way in ways}
        | {"rnnt-loss-ragged", "tdt-loss", *(f"ladder-{kind}" for kind in ("rnnt", "tdt", "ctc"))}
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_check_vouches_for_is_an_arm_or_a_case(device):
    patterns = {check.vouches for check in checks.table(device)} - {""}
    assert len(patterns) > 10
    for pattern in patterns:
        for part in pattern.split("|"):
            assert any(re.search(part, name) for name in arms_of(device)) or "window_" in part, part
    kernels = [
        check
        for check in checks.table(device)
        if check.group in ("losses numba_cuda", "lean triton")
    ]
    patterns = {check.vouches for check in kernels} - {""}
    assert not any(
        re.search(pattern, name)
        for pattern in patterns
        for name in ("wavefront", "torchaudio", "lean")
    )


def bars(check):
    """The ways of a GPU that are left out where this check fails."""
    return {
        way
        for way in arms_of("cuda")
        if ": " in way and check.vouches and re.search(check.vouches, way)
    }


def test_no_check_that_fails_takes_all_graphs_along():
    named = ": (windowed_looping|window_.)_(step|full)(_plain)?$|: .*_(graph_whole|graph_of_steps|fused_turns)$"
    graphs = {way for way in arms_of("cuda") if re.search(named, way)}
    assert len(graphs) > 25
    for check in checks.table("cuda"):
        found = bars(check) & graphs
        kinds = {
            kind
            for kind in ("rnnt", "tdt")
            for way in found
            if re.search(f"^(ladder-)?{kind}", way)
        }
        modes = {mode for mode in ("_full", "_whole", "_step") for way in found if mode in way}
        assert len(found) < len(graphs) / 3 and len(kinds) <= 1, check.name
        assert check.group == "ladder" or len(modes - {"_whole"}) <= 1, check.name
        assert check.group == "ladder" or len({turn_of(way) for way in found}) <= 1, check.name


def turn_of(way):
    """The turn that an arm's graph computes; the rungs of graphs have plain ones."""
    return "plain" if re.search("_plain$|_graph_(whole|of_steps)$", way) else "fused"


def test_fused_turns_that_are_wrong_leave_every_plain_graph_and_the_other_way_round():
    graphs = [
        check for check in checks.table("cuda") if re.match("graphs (step|full)", check.group)
    ]
    barred = {turn: set().union(*(bars(check) for check in graphs if check.group.endswith("plain") == (turn == "plain")))
              for turn in ("plain", "fused")}  # fmt: skip
    for turn, ways in barred.items():
        assert {turn_of(way) for way in ways} == {turn} and len(ways) > 15
        assert {guards.way("window_8_full" + "_plain" * (turn == "plain"), f"{kind}-greedy-graphs", "bfloat16")
                for kind in ("rnnt", "tdt")} <= ways  # fmt: skip
    assert guards.way("to_graph_whole", "ladder-tdt", "bfloat16") in barred["plain"]
    assert guards.way("to_fused_turns", "ladder-tdt", "bfloat16") in barred["fused"]


@pytest.mark.parametrize("turn", ["fused", "plain"])
@pytest.mark.parametrize("mode", ["step", "full"])
def test_a_check_of_graphs_vouches_for_the_model_and_the_arithmetic_that_it_shows(mode, turn):
    end = "_plain" * (turn == "plain")
    group = mode + " plain" * (turn == "plain")
    by = {
        check.name.removeprefix(f"graphs={group}: "): bars(check)
        for check in checks.table("cuda")
        if check.group == f"graphs {group}"
    }
    for name in (
        "autocast",
        "nothing captured waits",
        "carry",
        "weights that change and move",
        "float16 0 durations",
    ):
        assert by[name] == set(), name
    for kind, count in (("rnnt", 0), ("tdt", 5)):
        for dtype in ("float32", "bfloat16"):
            found = by[f"{dtype} {count} durations"]
            assert f"{kind}-greedy in {dtype}: windowed_looping_{mode}{end}" in found
            rungs = {"_whole": "_full", "_fused_turns": "_full"}
            shown = {
                way: way.replace(
                    *next((rung for rung in rungs.items() if rung[0] in way), ("", ""))
                )
                for way in found
            }
            assert all(
                f"{kind}" in way and f" in {dtype}: " in way and mode[:4] in shown[way]
                for way in found
            )
        if (mode, turn) != ("step", "plain"):  # which no window has
            assert (
                f"{kind}-greedy-graphs in bfloat16: window_8_{mode}{end}"
                in by[f"bfloat16 {count} durations"]
            )
        assert (
            f"{kind}-recogniser in bfloat16: windowed_looping_{mode}{end}"
            in by[f"bfloat16 {count} durations"]
        )


def test_the_loops_without_graphs_vouch_for_none_and_batched_is_not_the_other_batched():
    by = {check.name: bars(check) for check in checks.table("cuda")}
    assert {way.rpartition(" ")[2] for way in by["windowed_looping rnnt"]} == {"windowed_looping", "windowed_looping_off", *(
        f"window_{size}" for size in (1, 2, 4, 6, 8, 16)), "window_1_off", "window_8_off"}  # fmt: skip
    assert by["ctc batched"] == {"ctc-greedy-batched in float32: batched"}
    assert by["normalize"] == {"feature-norm-batched in float32: batched"}
    assert {way.partition(":")[0] for way in by["precision bfloat16"]} == {
        "precision-parakeet_ctc_0_6b in bfloat16", "half-over-autocast in bfloat16"}  # fmt: skip
    assert {way[:11] for way in by["encoder bfloat16"]} == {"encoder-bfl"}


@pytest.mark.parametrize(
    "rung", ["graph_whole", "graph_of_steps", "fused_turns", "graphed_encoder", "optimized_encoder"]
)
def test_a_graph_that_fails_its_check_is_on_no_ladder_of_its_kind(rung):
    for kind, how in product(("rnnt", "tdt"), (f"to_{rung}", f"only_{rung}")):
        way = guards.way(how, f"ladder-{kind}", "bfloat16" if how.startswith("to") else "float32")
        vouching = {check.group for check in checks.table("cuda") if way in bars(check)}
        of = {
            "graph_whole": "graphs full plain",
            "graph_of_steps": "graphs step plain",
            "fused_turns": "graphs full",
        }
        assert vouching - {"ladder"} == {of.get(rung, "encoder")} and "ladder" in vouching
    alone = [check for check in checks.table("cuda") if check.group == "ladder"]
    assert not any(
        re.search(check.vouches, name)
        for check in alone
        for name in arms_of("cuda")
        if "ladder-" not in name
    )


def test_a_wrong_rung_fails_its_own_check_only(monkeypatch):
    plain = model_checks.FileRecognizer

    class Wrong(plain):
        def __call__(self, *given, **how):
            heard = super().__call__(*given, **how)
            return (
                heard._replace(labels=heard.labels + 1)
                if self.config.loading == "overlapped"
                else heard
            )

    monkeypatch.setattr(model_checks, "FileRecognizer", Wrong)
    wanted = ("ladder-rnnt baseline", "ladder-rnnt by_length", "ladder-rnnt overlapped")
    found = failures("cpu", lambda check: check.name in wanted)
    assert found == {
        "ladder-rnnt overlapped": "AssertionError: ladder-rnnt-tiny says other labels than its script"
    }


def test_a_graphs_scores_may_be_off_by_rounding_and_its_tokens_not(monkeypatch):
    plain, wrong = decoder_checks.transducer_greedy, {}

    def decode(*given, graphs, **how):
        found = plain(*given, graphs=graphs, **how)
        return (
            found
            if graphs == "off"
            else replace(found, **{name: change(found) for name, change in wrong.items()})
        )

    monkeypatch.setattr(decoder_checks, "transducer_greedy", decode)
    wrong["scores"] = lambda found: found.scores * 1.002
    decoder_checks._looped("cpu", (), torch.bfloat16, graphs="auto")
    with pytest.raises(AssertionError, match="apart, of"):
        decoder_checks._looped("cpu", (), torch.float32, graphs="auto")
    wrong["frames"] = lambda found: found.frames + 1
    with pytest.raises(AssertionError, match="integers differ"):
        decoder_checks._looped("cpu", (), torch.bfloat16, graphs="auto")


def off_by_one(decode):
    return lambda *given, **how: replace(found := decode(*given, **how), labels=found.labels + 1)


@pytest.mark.parametrize(
    ("name", "spoil", "group", "said"),
    [
        ("ctc_greedy", off_by_one, "decoders", "integers differ"),
        ("normalize", lambda f: lambda *a: f(*a) * 1.01, "models", "apart, of"),
        ("rnnt_loss_packed", lambda f: lambda *a, **k: 1.001 * f(*a, **k), "losses numba_cpu", "apart, of"),
        ("split_batches", lambda f: lambda *a, **k: f(*a, **k) + 1, "losses wavefront", "apart, of"),
        ("peak_memory", lambda f: lambda *a, **k: f(*a, **k) + 8192, "profiling", "12008192"),
    ],
)  # fmt: skip
def test_a_wrong_path_is_found(monkeypatch, name, spoil, group, said):
    rooms = (decoder_checks, model_checks, profiling_checks, loss_checks)
    room = next(room for room in rooms if hasattr(room, name))
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

    call = loss_checks.LogitsCall((3, 6, 4, 9))
    with pytest.raises(AssertionError, match="apart, of"):
        loss_checks._check_logits_loss("cpu", loss, "wavefront", torch.float32, call)


def test_likeness_is_relative_to_the_largest_and_knows_nan_and_infinity():
    wanted = torch.tensor([100.0, torch.inf, torch.nan])
    near([wanted + torch.tensor([1e-4, 0, 0])], [wanted])
    for wrong in (
        torch.tensor([100.1, torch.inf, torch.nan]),
        torch.tensor([100.0, 5.0, torch.nan]),
        torch.tensor([100.0, torch.inf, 1.0]),
    ):
        with pytest.raises(AssertionError):
            near([wrong], [wanted])
    with pytest.raises(AssertionError, match="shapes"):
        near([wanted[:1]], [wanted])
