"""Exported models in ONNX Runtime and OpenVINO compared with ours: log-probabilities, tokens of ragged batches, a client's loop."""

import json

import pytest

pytestmark = pytest.mark.live
FLOAT32 = 1e-4  # limit for errors of log-probabilities
IN_FLOAT32 = [
    f"{case} onnx {engine}"
    for case in ("ctc-near", "ctc-jasper", "rnnt-lstm", "tdt-stateless")
    for engine in ("onnxruntime", "openvino")
]


@pytest.fixture(scope="session")
def computed(in_peers, worker, tmp_path_factory):
    """What engines computed of every case, by case, format and engine."""
    folder = tmp_path_factory.mktemp("parity")
    done = in_peers("-P", worker.__file__, "parity", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "parity.json").read_text())


@pytest.mark.parametrize("case", [*IN_FLOAT32, "tdt-stateless openvino openvino"])
def test_log_probabilities_are_ours_and_so_are_tokens_of_ragged_batches(computed, case):
    found = computed[case]
    assert found["error"] < FLOAT32
    assert found["tokens"] == found["wanted"]
    assert len({token for row in found["tokens"] for token in row}) > 3


@pytest.mark.parametrize("case", ["rnnt-lstm", "tdt-stateless"])
def test_a_client_that_has_nothing_but_the_graphs_finds_our_tokens(computed, case):
    found = computed[f"{case} client"]
    assert found["tokens"] == found["wanted"]
    assert sum(map(len, found["tokens"])) > 20


@pytest.mark.parametrize("kind", ["onnx-int8", "openvino-int8"])
def test_int8_is_near_and_is_not_float32(computed, kind):
    assert 1e-3 < computed[f"ctc-near {kind} openvino"]["error"] < 2.0
