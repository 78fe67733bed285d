"""Peers in processes of their own: the protocol with a real loss, what is missing, what disagrees, what dies."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from asrkit.cli import main
from asrkit.decoders import ctc_greedy
from asrkit.losses import rnnt_loss
from asrkit.workbench import bench
from asrkit.workbench.bench.agreement import digest
from asrkit.workbench.bench.peers.processes import Answer, Peer
from asrkit.workbench.bench.suites import losses


@pytest.fixture(scope="module")
def peers():
    """torchaudio as a peer: a real loss that every installation has."""
    with bench.Peers(sys.executable, {"rnnt": ("torchaudio",)}) as started:
        yield started


def declare(monkeypatch, case):
    """A suite "one" of this case."""
    suite = bench.Suite(name="one", cases=lambda device, quick: iter([case]))
    monkeypatch.setitem(bench.SUITES, "one", suite)


@pytest.fixture
def case():
    """The smallest lattice, without our own arm of the same name."""
    made = losses.logits_case(rnnt_loss, (1, 12, 6, 9), "cpu")
    return replace(
        made,
        arms={name: arm for name, arm in made.arms.items() if name != "torchaudio"},
        ratios=(),
    )


def test_a_peer_computes_the_same_from_the_same_seed_and_times_itself(peers, case):
    (peer,) = peers.arms(**case.peers.request).values()
    answer, (cost, gradient) = peer(observe=True), case.run("reference")
    assert torch.stack(answer.digest).tolist() == pytest.approx(
        [one.item() for one in digest((cost, gradient), case.peers.logits)], rel=1e-5
    )
    assert answer.wall_ms > 0 and answer.cpu_ms > 0 and answer.peak_B >= 0
    assert peer().digest == ()  # only asked for once: it costs time


def test_records_name_the_peer_and_its_version(peers, case, monkeypatch):
    declare(monkeypatch, case)
    found = [
        record
        for record in bench.run("one", quick=True, peers=peers)
        if record["impl"] == "torchaudio"
    ]
    assert {record["metric"] for record in found} == {
        "latency",
        "cpu_time",
        "peak_memory",
    }
    assert {record["params"]["peer"] for record in found} == {
        f"torchaudio {torch.__version__.split('+')[0]}"
    }
    assert {
        record["timer"] for record in found if record["metric"] == "peak_memory"
    } == {"VmHWM of its process"}


def test_a_peer_that_disagrees_is_not_measured(peers, case, monkeypatch):
    turned = {
        "wrong": lambda: (case.run("reference")[0], case.run("reference")[1].flip(1)),
        "numba_cpu": lambda: turned["wrong"](),
    }
    declare(monkeypatch, replace(case, arms=turned, setups={}))
    with pytest.raises(
        AssertionError, match="torchaudio disagrees with wrong, so it was not measured"
    ):
        bench.run("one", quick=True, peers=peers)


@pytest.mark.parametrize("wrong", [0, 1, 2], ids=["labels", "lengths", "frames"])
def test_a_peer_decoder_has_to_find_the_same_labels_on_the_same_frames(wrong):
    found = ctc_greedy(
        torch.eye(3)[torch.tensor([[0, 2, 1], [2, 2, 1]])], torch.tensor([3, 3])
    )
    parts = list(digest(found, None))

    def check():
        answer = Answer(wall_ms=1.0, cpu_ms=1.0, digest=tuple(parts))
        arms = {"ours": lambda: found, "theirs": lambda: answer}
        bench.check(
            bench.Case(
                what="x",
                arms=arms,
                params={},
                peers=bench.PeerArms(request={"kind": "x"}),
            )
        )

    check()
    parts[wrong] = parts[wrong] + 1
    with pytest.raises(
        AssertionError,
        match=r"theirs disagrees with ours, so it was not measured\. Integers differ",
    ):
        check()


def test_a_peer_that_is_not_installed_is_one_line_and_left_out(case, capfd):
    with bench.Peers(sys.executable, {"rnnt": ("warprnnt_numba",)}) as absent:
        assert (
            absent.arms(**case.peers.request) == absent.arms(**case.peers.request) == {}
        )
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        "peer warprnnt_numba: PackageNotFoundError" in line and "`make peers`" in line
    )


def test_a_peer_whose_process_dies_is_heard():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", "input()"], **pipes)
    peer = Peer(process=process, name="frail", request={})
    for _ in range(2):  # it ends instead of answering, then it is gone
        with pytest.raises(RuntimeError, match="peer frail: its process ended"):
            peer()
        process.wait()
    process.communicate()


def test_peers_without_their_environment_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "asrkit.workbench.bench.peers.processes.PYTHON", tmp_path / "none"
    )
    assert (
        main(["bench", "losses", "--quick", "--peers", "--out", str(tmp_path / "out")])
        == 2
    )
    err = capsys.readouterr().err.strip()
    assert (
        err
        == "asrkit bench: --peers: expected the environment .venv-peers, got none. `make peers` installs it."
    )
    assert not list(tmp_path.iterdir())
