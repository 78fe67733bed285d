"""Casts of modules whose number, places and bytes follow from arithmetic."""

import inspect
import re
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
)

B, I, O = 4, 8, 16
LAYERS = 2
WEIGHTS_OF_A_BLOCK = 9 + 9 + 1  # nine layers with weight and bias, one without bias
ACTIVATIONS_OF_A_BLOCK = 2  # both queries, which meet biases in float32


class Two(nn.Module):
    """Two linear layers, one deeper down, and a product with a view of a weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(I, O)
        self.second = nn.ModuleDict({"deep": nn.Linear(O, I)})

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


def test_autocast_casts_weight_bias_and_input_of_a_linear_layer(linear, x):
    line = inspect.currentframe().f_lineno + 1
    profile = cast_profile(linear, (x,), "autocast", repeats=1)
    assert count(profile, "operand") == {("weight",): 2, ("activation",): 1}
    sizes = Counter(6 * numbers for numbers in (O * I, O, B * I))
    assert Counter(op.bytes for op in profile.casts) == sizes
    site = f"tests/workbench/measure/test_casts.py:{line}"
    where = count(profile, "module", "site", "source", "target")
    assert where == {("Linear", site, "float32", "bfloat16"): 3}
    (product,) = (op for op in profile.ops if op.kind != "cast")
    assert product.kind == "matrix product"
    assert product.name == "addmm"
    assert product.source == "bfloat16"
    assert product.target == "bfloat16"
    assert product.operand == ""
    assert product.bytes == 2 * (O + B * I + O * I + B * O)


@pytest.mark.parametrize("mode, dtype", [("float32", "float32"), ("half", "bfloat16")])
def test_one_precision_needs_no_cast(linear, x, mode, dtype):
    profile = cast_profile(linear, (x,), mode, repeats=1)
    assert [(op.kind, op.source) for op in profile.ops] == [("matrix product", dtype)]
    assert profile.share("cast") == 0
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
        for calls, wanted in ((3, casts), (1, 3)):
            profile = cast_profile(linear, (x,), "autocast", calls=calls, repeats=1)
            assert len(profile.casts) == wanted


def test_casts_are_found_by_module_and_views_of_weights_are_weights(x):
    profile = cast_profile(Two(), (x,), "autocast", repeats=1)
    assert count(profile, "module", "operand") == {
        ("first", "weight"): 2,
        ("first", "activation"): 1,
        ("second.deep", "weight"): 2,
        ("Two", "weight"): 1,
    }
    assert [op.module for op in profile.within("second").ops] == ["second.deep"] * 3
    wanted = "^path: expected a submodule in which ops ran, got 'sec'"
    with pytest.raises(ValueError, match=wanted):
        profile.within("sec")


class Copies(nn.Module):
    """A module with casts, and with copies that are not casts."""

    def forward(self, x):
        x.double().float()  # two casts
        x.new_zeros(B, I, dtype=torch.half).copy_(x)  # a fill, a cast
        x.to(torch.float32), x.view(-1), x.new_empty(3)  # nothing
        x.clone()  # layout
        torch.arange(5).float()  # a fill, and a conversion that is no cast
        x[:1].expand(B, I).double()  # a cast that reads one row
        return x[:0].half()  # nothing to do


def test_only_one_floating_dtype_made_into_another_is_a_cast(x):
    profile = cast_profile(Copies(), (x,), "float32", repeats=1)
    found = [
        f"{op.kind} {op.name} {op.source} {op.target} {op.bytes}" for op in profile.ops
    ]
    N = B * I
    assert found == [
        f"cast _to_copy float32 float64 {12 * N}",
        f"cast _to_copy float64 float32 {12 * N}",
        f"elementwise new_zeros  float16 {2 * N}",
        f"cast copy_ float32 float16 {6 * N}",
        f"layout clone float32 float32 {8 * N}",
        f"elementwise arange  int64 {5 * 8}",
        f"layout _to_copy int64 float32 {5 * 12}",
        f"cast _to_copy float32 float64 {4 * I + 8 * N}",
    ]


KINDS = [  # an op of each
    ("matrix product", lambda x: x @ x.t()),
    ("convolution", lambda x: nn.functional.conv1d(x[None], x[:, :B, None])),
    ("attention", lambda x: nn.functional.scaled_dot_product_attention(x, x, x)),
    ("normalisation", lambda x: nn.functional.layer_norm(x, (I,))),
    ("elementwise", lambda x: x.softmax(-1)),
    ("layout", lambda x: torch.cat([x, x])),
]


@pytest.mark.parametrize("kind, call", KINDS)
@torch.no_grad()
def test_ops_fall_into_kinds(kind, call):
    module = nn.Module()
    x = torch.randn(1, 2, B, I)
    module.forward = lambda: call(x if kind == "attention" else x[0, 0])
    profile = cast_profile(module, (), "float32", repeats=1)
    assert [op.kind for op in profile.ops] == [kind]


@torch.no_grad()
def test_autocast_of_an_encoder_casts_what_arithmetic_says(encoder):
    model, inputs = encoder
    profile = cast_profile(model, inputs, "autocast", repeats=1)
    convolutions = 5 * 2
    projection = 2
    features = 1
    positions = 1
    assert count(profile, "operand") == {
        ("weight",): LAYERS * WEIGHTS_OF_A_BLOCK + convolutions + projection,
        ("activation",): LAYERS * ACTIVATIONS_OF_A_BLOCK + features + positions,
    }
    attention = profile.within("blocks.1.attention")
    assert count(attention, "operand") == {("weight",): 5, ("activation",): 2}
    uncast = [
        part
        for part in model.modules()
        if isinstance(part, nn.LayerNorm | nn.BatchNorm1d)
    ]
    numbers = sum(weight.numel() for weight in model.parameters())
    numbers -= sum(weight.numel() for part in uncast for weight in part.parameters())
    numbers -= LAYERS * 2 * model.width  # biases of queries
    weights = sum(op.bytes for op in profile.casts if op.operand == "weight")
    assert weights == (4 + 2) * numbers


def op(kind, name, ms):
    return Op(kind=kind, name=name, site="s", bytes=10, ms=ms)


def test_tables_add_up_and_begin_with_what_takes_longest():
    ops = (op("cast", "a", 1.0), op("layout", "b", 2.0), op("cast", "c", 5.0))
    profile = CastProfile(ops=ops)
    assert profile.table() == [
        {"kind": "cast", "ops": 2, "ms": 6.0, "share": 0.75, "bytes": 20},
        {"kind": "layout", "ops": 1, "ms": 2.0, "share": 0.25, "bytes": 10},
    ]
    casts = profile.table("kind", "name", kind="cast")
    assert [row["name"] for row in casts] == ["c", "a"]
    assert profile.op_ms == 8.0
    assert profile.share("attention") == 0.0
    with pytest.raises(ValueError, match="^kind: expected one of 'cast', .*, got 'no'"):
        profile.share("no")


def test_the_median_is_that_of_each_op():
    profiles = [
        CastProfile(ops=(op("cast", "a", a), op("cast", "b", b)))
        for a, b in ((1.0, 9.0), (3.0, 7.0), (2.0, 8.0))
    ]
    assert [one.ms for one in median_profile(profiles).ops] == [2.0, 8.0]


def test_the_caller_finds_all_as_it_was(linear, x):
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    with pytest.raises(RuntimeError):
        cast_profile(linear, (x[:, :3],), "autocast")
    after = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    assert after == before
    assert not torch.is_autocast_enabled("cpu")


class Fickle(nn.Module):
    """Runs a different number of ops in each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.calls):
            x = x + 1
        return x


def test_what_cannot_be_profiled_is_refused(linear, x):
    for module, message in [
        (linear.bfloat16(), "expected float32 weights, got {torch.bfloat16}. Modes"),
        (
            Fickle(),
            "expected the same ops in every call, got [2, 3]. Try module.eval()",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"module: {message}")):
            cast_profile(module, (x,), "float32", repeats=2, warmup=0)


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_the_kernels_are_timed():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.LayerNorm(4096)).cuda()
    x = torch.randn(1000, 1024, device="cuda")
    for mode, casts in (("float32", 0), ("autocast", 4), ("half", 0)):
        profile = cast_profile(model, (x,), mode, device="cuda", repeats=3)
        assert len(profile.casts) == casts
        assert all(op.ms > 0 for op in profile.ops)
    assert {op.kind for op in profile.ops} == {"matrix product", "normalisation"}
