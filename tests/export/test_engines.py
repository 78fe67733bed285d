"""Exported models under ONNX Runtime and OpenVINO, beside ours: log-probabilities, tokens on ragged batches, and a client's loop."""

import json

import pytest

FLOAT32 = 1e-4  # of log-probabilities, as the exports promise
CASES = (
    "ctc-fastconformer",
    "ctc-near",
    "ctc-jasper",
    "rnnt-lstm",
    "rnnt-stateless-1",
    "tdt-fastconformer",
)
IN_FLOAT32 = [
    f"{case} onnx {engine}" for case in CASES for engine in ("onnxruntime", "openvino")
]
IN_FLOAT32 += [
    f"{case} openvino openvino" for case in ("ctc-fastconformer", "tdt-fastconformer")
]
TRANSDUCERS = ("rnnt-lstm", "rnnt-stateless-1", "tdt-fastconformer")


@pytest.fixture(scope="session")
def computed(in_peers, client_script, tmp_path_factory):
    """What engines computed of every case, by case, format and engine."""
    folder = tmp_path_factory.mktemp("parity")
    done = in_peers("-P", client_script, "parity", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "parity.json").read_text())


@pytest.mark.parametrize("case", IN_FLOAT32)
def test_log_probabilities_are_ours_and_so_are_tokens_of_ragged_batches(computed, case):
    found = computed[case]
    assert found["error"] < FLOAT32
    assert found["tokens"] == found["wanted"]
    assert len({token for row in found["tokens"] for token in row}) > 3


@pytest.mark.parametrize("case", TRANSDUCERS)
def test_a_client_that_has_nothing_but_the_graphs_finds_our_tokens(computed, case):
    found = computed[f"{case} onnx client"]
    assert found["tokens"] == found["wanted"]
    assert sum(map(len, found["tokens"])) > 20


@pytest.mark.parametrize("format_", ["onnx-int8", "openvino-int8"])
def test_int8_is_near_and_is_not_float32(computed, format_):
    error = computed[f"ctc-fastconformer {format_} openvino"]["error"]
    assert 1e-3 < error < 2.0
