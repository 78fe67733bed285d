"""Peers in their own processes: the protocol with a real loss; peers that are missing, disagree or die."""

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from asrkit.decoders import ctc_greedy
from asrkit.losses import rnnt_loss
from asrkit.workbench.measure.comparison import Answer, check
from benchmarks.__main__ import main
from benchmarks.harness.cases import Case, PeerArms, Suite
from benchmarks.harness.runner import run
from benchmarks.peers import processes
from benchmarks.peers.processes import Peer, Peers, digest
from benchmarks.suites import SUITES, losses


@pytest.fixture(scope="module")
def peers():
    """torchaudio as a peer: a real loss that every installation has."""
    with Peers(sys.executable, {"rnnt": ("torchaudio",)}) as started:
        yield started


def declare(monkeypatch, case):
    """A suite "one" of this case."""
    suite = Suite(name="one", cases=lambda device, quick: iter([case]))
    monkeypatch.setitem(SUITES, "one", suite)


@pytest.fixture
def case():
    """The smallest lattice, without our own arm of the same name."""
    case = losses.logits_case(rnnt_loss, (1, 12, 6, 9), "cpu")
    arms = {name: case.arms[name] for name in ("reference", "wavefront")}
    return replace(case, arms=arms, setups={}, ratios=())


def test_a_peer_computes_the_same_from_the_same_seed_and_times_itself(peers, case):
    (peer,) = peers.arms(**case.peers.request).values()
    answer = peer(observe=True)
    result = case.once("reference")()
    wanted = [part.item() for part in digest(result, case.peers.logits)]
    assert torch.stack(answer.digest).tolist() == pytest.approx(wanted, rel=1e-5)
    assert min(answer.wall_ms, answer.cpu_ms) > 0
    assert answer.peak_B >= 0
    assert peer().digest == ()  # a digest takes time


def test_records_name_the_peer_and_its_version(peers, case, monkeypatch):
    declare(monkeypatch, case)
    found = run("one", quick=True, peers=peers)
    by = {
        record["metric"]: record for record in found if record["impl"] == "torchaudio"
    }
    assert {*by} == {"latency", "cpu_time", "peak_memory"}
    version = importlib.metadata.version("torchaudio")
    for record in by.values():
        assert record["params"]["peer"] == f"torchaudio {version}"
    assert by["peak_memory"]["timer"] == "VmHWM of its process"


def test_a_peer_that_disagrees_is_not_measured(peers, case, monkeypatch):
    cost, gradient = case.once("reference")()
    arms = dict.fromkeys(("wrong", "numba_cpu"), lambda: (cost, gradient.flip(1)))
    declare(monkeypatch, replace(case, arms=arms, setups={}))
    wanted = "torchaudio disagrees with wrong, so it was not measured"
    with pytest.raises(AssertionError, match=wanted):
        run("one", quick=True, peers=peers)


@pytest.mark.parametrize("wrong", [0, 1, 2], ids=["labels", "lengths", "frames"])
def test_a_peer_decoder_must_find_the_same_labels_on_the_same_frames(wrong):
    log_probs = torch.eye(3)[torch.tensor([[0, 2, 1], [2, 2, 1]])]
    found = ctc_greedy(log_probs, torch.tensor([3, 3]))
    parts = [*digest(found, None)]
    theirs = lambda: Answer(wall_ms=1.0, cpu_ms=1.0, digest=tuple(parts))  # noqa: E731
    arms = {"ours": lambda: found, "theirs": theirs}
    request = {"kind": "x"}
    peers = PeerArms(request=request)
    case = Case(what="x", arms=arms, peers=peers, digest=partial(digest, logits=None))
    check(case)
    parts[wrong] = parts[wrong] + 1
    with pytest.raises(AssertionError, match="theirs disagrees .* Integers differ"):
        check(case)


def test_a_peer_that_is_not_installed_is_left_out_with_one_line(case, capfd):
    with Peers(sys.executable, {"rnnt": ("warprnnt_numba",)}) as absent:
        for _ in range(2):
            assert absent.arms(**case.peers.request) == {}
    (line,) = capfd.readouterr().err.splitlines()
    assert "peer warprnnt_numba: PackageNotFoundError" in line
    assert "`make peers`" in line


def test_a_peer_whose_process_dies_raises():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", "input()"], **pipes)
    peer = Peer(process=process, name="frail", request={})
    for _ in range(2):  # first it ends without an answer, then it is gone
        with pytest.raises(RuntimeError, match="peer frail: its process ended"):
            peer()
        process.wait()
    process.communicate()


def test_peers_without_their_environment_are_an_error_of_one_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(processes, "PYTHON", tmp_path / "none")
    command = ["losses", "--quick", "--peers", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    wanted = "--peers: expected the environment .venv-peers, got none. `make peers` installs it."
    assert capsys.readouterr().err.strip() == f"python -m benchmarks: {wanted}"
    assert not [*tmp_path.iterdir()]
