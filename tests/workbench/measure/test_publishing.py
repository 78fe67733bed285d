import pytest

from asrkit.workbench import records
from asrkit.workbench.measure import Timing
from asrkit.workbench.measure.publishing import publish_ratio, publish_times

TIMES = {
    "slow": Timing(samples_ms=(4.0, 6.0, 9.0), warmup=2, timer="clock"),
    "fast": Timing(samples_ms=(2.0, 2.0, 3.0), warmup=1, timer="clock"),
}


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would show."""
    data = []
    monkeypatch.setattr(
        "IPython.display.display", lambda bundle, **_: data.append(bundle)
    )
    return data


def test_the_latency_of_each_arm_is_published_with_its_implementation(shown):
    impls = {"slow": "loops", "fast": "kernel"}
    publish_times("a-loss", TIMES, {"shape": [1]}, impls=impls)
    slow, fast = (bundle[records.MIME] for bundle in shown)
    assert slow["impl"] == "loops"
    assert slow["value"] == 6.0
    assert fast["impl"] == "kernel"
    assert fast["value"] == 2.0
    assert slow["stats"]["warmup"] == 2
    assert slow["params"] == {"shape": [1]}
    assert not records.problem(slow)


def test_a_ratio_is_taken_within_each_repeat_and_names_its_arms(shown):
    record = publish_ratio("a-claim", TIMES, "slow", "fast", {"device": "cpu"})
    assert record["samples"] == [2.0, 3.0, 3.0]
    assert record["value"] == 3.0
    assert record["params"] == {"device": "cpu", "arms": ["slow", "fast"]}
    assert record["impl"] == "fast"
    assert shown[0][records.MIME] == record
