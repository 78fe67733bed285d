"""What is kept of a weight between calls: the same object while nothing changed, never what a former weight gave."""

import copy
import pickle

import pytest
import torch

from asrkit.models.attention import RelativeAttention, attended, relative_positions
from asrkit.models.weight_cache import WeightCache

T, EVERYWHERE = 5, (-1, -1)


@pytest.fixture
def attention():
    """One that keeps, as in an optimized model."""
    torch.manual_seed(0)
    attention = RelativeAttention(8, 2).eval()
    attention.position_cache = WeightCache()
    return attention


def projected(attention, T=T):
    """What attention over T frames uses, kept or not."""
    distances = attended(T, EVERYWHERE)
    return attention.projected(
        relative_positions(*distances, 8, attention.position.weight), distances
    )


def anew(attention, T=T):
    """The same of a copy, which keeps nothing yet."""
    return projected(copy.deepcopy(attention), T)


def step_of_an_optimizer(attention):
    attention.position.weight.grad = torch.ones(8, 8)
    torch.optim.AdamW(attention.parameters()).step()


def another_weight_in_its_memory(attention):
    """Freed and allocated again, memory often has the same address."""
    kind = attention.position.weight.dtype
    attention.to(torch.float16).to(kind)


CHANGES = {
    "an edit in place": lambda attention: attention.position.weight.mul_(2),
    "load_state_dict": lambda attention: attention.load_state_dict(
        RelativeAttention(8, 2).state_dict()
    ),
    "weights that are assigned": lambda attention: attention.load_state_dict(
        RelativeAttention(8, 2).state_dict(), assign=True
    ),
    "another parameter": lambda attention: setattr(
        attention.position, "weight", torch.nn.Parameter(torch.randn(8, 8))
    ),
    "a step of an optimizer": step_of_an_optimizer,
    "a cast": lambda attention: attention.to(torch.bfloat16),
    "a cast and back": another_weight_in_its_memory,
    "a new layer": lambda attention: setattr(
        attention, "position", torch.nn.Linear(8, 8, bias=False)
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_the_weight_leaves_a_stale_value(attention, change, mode):
    with mode():
        first = projected(attention)
        assert projected(attention) is first
    with torch.no_grad():
        CHANGES[change](attention)
        found, wanted = projected(attention), anew(attention)
    assert (
        found is not first
        and found.dtype == wanted.dtype
        and torch.equal(found, wanted)
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_as_it_was_built_keeps_nothing_and_follows_edits_that_no_count_sees(
    mode,
):
    layer = RelativeAttention(8, 2).eval()
    with mode():
        first = projected(layer)
        layer.position.weight.data.mul_(2)
        assert torch.equal(projected(layer), 2 * first)


def test_an_edit_within_inference_mode_is_seen(attention):
    with torch.inference_mode():
        first = projected(attention)
        attention.position.weight.mul_(2)
        assert torch.equal(projected(attention), 2 * first)


def test_each_length_and_dtype_of_positions_has_its_own(attention):
    with torch.inference_mode():
        for length in (T, 9, T):
            assert torch.equal(projected(attention, length), anew(attention, length))
        distances = attended(T, EVERYWHERE)
        doubled = attention.double().projected(
            relative_positions(*distances, 8, torch.zeros(1).double()), distances
        )
    assert doubled.dtype == torch.float64


def test_gradients_training_and_autocast_keep_nothing(attention):
    assert projected(attention) is not projected(attention)
    projected(attention).sum().backward()
    assert attention.position.weight.grad is not None
    with torch.no_grad():
        assert projected(attention.train()) is not projected(attention)
        attention.eval()
        kept = projected(attention)
        with torch.autocast("cpu", torch.bfloat16):
            assert projected(attention).dtype == torch.bfloat16
        assert projected(attention) is kept


def test_what_is_kept_is_neither_copied_nor_saved(attention):
    with torch.inference_mode():
        first = projected(attention)
    for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        with torch.inference_mode():
            assert projected(twin) is not first and torch.equal(projected(twin), first)
    assert set(attention.state_dict()) == {
        name for name, _ in attention.named_parameters()
    }
