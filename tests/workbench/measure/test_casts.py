"""Casts of modules for which arithmetic says how many there are, where, and of how many bytes."""

import inspect
from collections import Counter

import pytest
import torch
from torch import nn

from asrkit.models.fastconformer import (
    FastConformer,
    FastConformerConfig,
)
from asrkit.workbench.measure import (
    CastProfile,
    Op,
    cast_profile,
    median_profile,
    profiles_in_turns,
)

B, I, O = 4, 8, 16
LAYERS, MODES, HALVES = (
    2,
    ("float32", "autocast", "half"),
    (torch.bfloat16, torch.float16),
)
WEIGHTS_OF_A_BLOCK = 9 + 9 + 1  # nine layers with weight and bias, one without bias
ACTIVATIONS_OF_A_BLOCK = 2  # both queries, which meet biases in float32


class Two(nn.Module):
    """Two linear layers, one deeper down, and a product with a view of a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Linear(I, O),
            nn.ModuleDict({"deep": nn.Linear(O, I)}),
        )

    def forward(self, x):
        return self.second["deep"](self.first(x)) @ self.first.weight[:I].t()


@pytest.fixture
def linear():
    return nn.Linear(I, O)


@pytest.fixture
def x():
    return torch.randn(B, I)


@pytest.fixture
def encoder(one_thread):
    torch.manual_seed(0)
    config = FastConformerConfig(
        width=32, layers=LAYERS, heads=4, subsampling_channels=8
    )
    return FastConformer(config).eval(), (
        torch.randn(2, 64, 80),
        torch.tensor([64, 40]),
    )


def count(profile, *by):
    return {
        tuple(row[field] for field in by): row["ops"]
        for row in profile.table(*by, kind="cast")
    }


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_weight_bias_and_input_of_a_linear_layer(linear, x, dtype):
    line = inspect.currentframe().f_lineno + 1
    profile = cast_profile(linear, (x,), "autocast", dtype=dtype, repeats=1)
    name = str(dtype).removeprefix("torch.")
    assert count(profile, "operand") == {("weight",): 2, ("activation",): 1}
    assert Counter(op.bytes for op in profile.casts) == Counter(
        size * (4 + 2) for size in (O * I, O, B * I)
    )
    assert count(profile, "module", "site", "source", "target") == {
        (
            "Linear",
            f"tests/workbench/measure/test_casts.py:{line}",
            "float32",
            name,
        ): 3
    }
    (product,) = (op for op in profile.ops if op.kind != "cast")
    assert (product.kind, product.name, product.source, product.target, product.operand) == (
        "matrix product", "addmm", name, name, "",
    )  # fmt: skip
    assert product.bytes == 2 * (O + B * I + O * I + B * O)


@pytest.mark.parametrize("mode", ["float32", "half"])
def test_one_precision_needs_no_cast(linear, x, mode):
    profile = cast_profile(linear, (x,), mode, repeats=1)
    assert [op.kind for op in profile.ops] == ["matrix product"] and profile.share(
        "cast"
    ) == 0
    assert profile.ops[0].source == ("float32" if mode == "float32" else "bfloat16")
    assert linear.weight.dtype == x.dtype == torch.float32  # a copy was moved


CACHED = {  # casts of three calls in one region: 3 of the activation, and 2 or 3 * 2 of the weights
    "while grad is on": (torch.enable_grad, True, 3 + 2),
    "under no_grad": (torch.no_grad, True, 3 + 2),
    "in inference mode": (torch.inference_mode, True, 3 + 3 * 2),
    "of frozen weights": (torch.enable_grad, False, 3 + 3 * 2),
}


@pytest.mark.parametrize("case", CACHED)
def test_the_cache_of_a_region(linear, x, case):
    context, trained, casts = CACHED[case]
    linear.requires_grad_(trained)
    with context():
        assert (
            len(cast_profile(linear, (x,), "autocast", calls=3, repeats=1).casts)
            == casts
        )
        assert (
            len(cast_profile(linear, (x,), "autocast", calls=1, repeats=1).casts) == 3
        )


def test_casts_are_found_by_module_and_views_of_weights_are_weights(x):
    profile = cast_profile(Two(), (x,), "autocast", repeats=1)
    assert count(profile, "module", "operand") == {
        ("first", "weight"): 2, ("first", "activation"): 1, ("second.deep", "weight"): 2, ("Two", "weight"): 1
    }  # fmt: skip
    assert [op.module for op in profile.within("second").ops] == ["second.deep"] * 3
    with pytest.raises(
        ValueError, match="^path: expected a submodule in which ops ran, got 'sec'"
    ):
        profile.within("sec")


class Copies(nn.Module):
    """What is a cast, and what is none."""

    def forward(self, x):
        x.double().float()  # two casts
        x.new_zeros(B, I, dtype=torch.half).copy_(x)  # a fill, a cast
        (
            x.to(torch.float32),
            x.clone(),
            x.view(-1),
            x.new_empty(3),
        )  # nothing, layout, nothing, nothing
        torch.arange(
            5
        ).float()  # a tensor that is filled, and a conversion that is no cast
        x.new_zeros(B, I).copy_(x)  # a fill, a copy
        x[:1].expand(B, I).double()  # a cast that reads one row
        return x[:0].half()  # nothing to do


def test_only_one_floating_dtype_made_into_another_is_a_cast(x):
    profile = cast_profile(Copies(), (x,), "float32", repeats=1)
    found = [(op.kind, op.name, op.source, op.target, op.bytes) for op in profile.ops]
    assert found == [
        ("cast", "_to_copy", "float32", "float64", B * I * 12), ("cast", "_to_copy", "float64", "float32", B * I * 12),
        ("elementwise", "new_zeros", "", "float16", B * I * 2), ("cast", "copy_", "float32", "float16", B * I * 6),
        ("layout", "clone", "float32", "float32", B * I * 8), ("elementwise", "arange", "", "int64", 5 * 8),
        ("layout", "_to_copy", "int64", "float32", 5 * 12), ("elementwise", "new_zeros", "", "float32", B * I * 4),
        ("layout", "copy_", "float32", "float32", B * I * 8), ("cast", "_to_copy", "float32", "float64", I * 4 + B * I * 8),
    ]  # fmt: skip


KNOWN = {
    "matrix product": lambda x: (
        x @ x.t(),
        torch.bmm(x[None], x.t()[None]),
        torch.mv(x, x[0]),
    ),
    "convolution": lambda x: nn.functional.conv1d(
        x[None], x[:, :, None].expand(-1, -1, 1)[:, :B]
    ),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        *[x.view(1, 2, B, I // 2)] * 3
    ),
    "normalisation": lambda x: (
        nn.functional.layer_norm(x, (I,)),
        nn.functional.batch_norm(x, x[0], x[0].exp()),
    ),
    "elementwise": lambda x: (x + 1, x.softmax(-1), x.sum()),
    "layout": lambda x: (
        torch.cat([x, x]),
        x.t().contiguous(),
        nn.functional.pad(x, (1, 1)),
        x[torch.tensor([0])],
    ),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_ops_fall_into_kinds(x, kind):
    module = Copies()
    module.forward = KNOWN[kind]
    with torch.no_grad():
        found = {op.kind for op in cast_profile(module, (x,), "float32", repeats=1).ops}
    assert found - {"elementwise"} == {kind} - {"elementwise"} and kind in found


def test_autocast_of_an_encoder_casts_what_arithmetic_says(encoder):
    model, inputs = encoder
    with torch.no_grad():
        profile = cast_profile(model, inputs, "autocast", repeats=1)
    convolutions, projection, features, positions = 5 * 2, 2, 1, 1
    assert count(profile, "operand") == {
        ("weight",): LAYERS * WEIGHTS_OF_A_BLOCK + convolutions + projection,
        ("activation",): LAYERS * ACTIVATIONS_OF_A_BLOCK + features + positions,
    }
    assert count(profile.within("blocks.1.attention"), "module", "operand") == {
        ("blocks.1.attention", "activation"): 2, ("blocks.1.attention.qkv", "weight"): 2,
        ("blocks.1.attention.out", "weight"): 2, ("blocks.1.attention.position", "weight"): 1,
    }  # fmt: skip
    weights = sum(op.bytes for op in profile.casts if op.operand == "weight")
    norms = [
        part
        for part in model.modules()
        if isinstance(part, nn.LayerNorm | nn.BatchNorm1d)
    ]
    uncast = sum(p.numel() for part in norms for p in part.parameters()) + sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.endswith(("content_bias", "position_bias"))
    )
    assert weights == (4 + 2) * (sum(p.numel() for p in model.parameters()) - uncast)


def test_tables_add_up_and_begin_with_what_takes_longest():
    def op(kind, name, ms):
        return Op(
            kind=kind,
            name=name,
            module="m",
            site="s",
            source="",
            target="",
            operand="",
            bytes=10,
            ms=ms,
        )

    ops = (op("cast", "a", 1.0), op("layout", "b", 2.0), op("cast", "c", 5.0))
    profile = CastProfile(ops=ops)
    assert profile.table() == [
        {"kind": "cast", "ops": 2, "ms": 6.0, "share": 0.75, "bytes": 20},
        {"kind": "layout", "ops": 1, "ms": 2.0, "share": 0.25, "bytes": 10},
    ]
    assert [row["name"] for row in profile.table("kind", "name", kind="cast")] == [
        "c",
        "a",
    ]
    assert (profile.op_ms, profile.share("cast"), profile.share("attention")) == (
        8.0,
        0.75,
        0.0,
    )
    for asked in (profile.share, lambda kind: profile.table(kind=kind)):
        with pytest.raises(
            ValueError,
            match="^kind: expected one of 'cast', 'attention', .*, got 'casts'",
        ):
            asked("casts")
    assert len(repr(profile)) < 1000


def test_the_caller_finds_all_as_it_was(linear, x):
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    with pytest.raises(RuntimeError):
        cast_profile(linear, (x[:, :3],), "autocast")
    cast_profile(linear, (x,), "half", repeats=1)
    assert (
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
    ) == before
    assert not torch.is_autocast_enabled("cpu") and linear.weight.dtype == torch.float32


class Fickle(nn.Module):
    """Takes another number of ops each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.calls):
            x = x + 1
        return x


REFUSED = {
    "mode: expected one of 'float32', 'autocast', 'half', got 'amp'.": {"mode": "amp"},
    "device: expected one of 'cpu', 'cuda', got 'meta'.": {"device": "meta"},
    "module: expected float32 weights, got {torch.bfloat16}. Modes start from module.float().": {"module": nn.Linear(8, 8).bfloat16()},
    "module: expected the same ops in every call, got [2, 3]. Try module.eval().": {"module": Fickle(), "repeats": 2, "warmup": 0},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_profiled_is_refused(linear, x, message):
    given = {"module": linear, "inputs": (x,), "mode": "float32"} | REFUSED[message]
    with pytest.raises(ValueError) as error:
        cast_profile(**given)
    assert str(error.value) == message


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_timed():
    model, x = (
        nn.Sequential(nn.Linear(1024, 4096), nn.LayerNorm(4096)).cuda(),
        torch.randn(1000, 1024, device="cuda"),
    )
    with torch.no_grad():
        profiles = {
            mode: cast_profile(model, (x,), mode, device="cuda", repeats=3)
            for mode in MODES
        }
    assert {mode: len(profile.casts) for mode, profile in profiles.items()} == {
        "float32": 0,
        "autocast": 4,
        "half": 0,
    }
    assert all(op.ms > 0 for profile in profiles.values() for op in profile.ops)
    assert {op.kind for op in profiles["half"].ops} == {
        "matrix product",
        "normalisation",
    }


def test_modes_take_turns_and_the_median_is_that_of_each_op():
    layer = torch.nn.Linear(4, 3)
    turns = profiles_in_turns(layer, (torch.randn(2, 4),), repeats=3)
    assert len(turns) == 3 and [*turns[0]] == ["float32", "autocast", "half"]
    profiles = [turn["autocast"] for turn in turns]
    merged = median_profile(profiles)
    for number, op in enumerate(merged.ops):
        times = sorted(profile.ops[number].ms for profile in profiles)
        assert op.ms == times[1] and op.name == profiles[0].ops[number].name
