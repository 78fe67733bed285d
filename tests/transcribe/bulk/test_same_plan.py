"""A plan is the same as the plainest code makes it, and as earlier versions made it."""

import hashlib
import json

import pytest

from asrkit.transcribe.bulk import inputs, planning
from asrkit.transcribe.bulk.planning import BYTES_PER_S, UNKNOWN_S

# Of lines that `planning` of asrkit 0.2.0 wrote before it kept recordings by column.
EARLIER = {
    60.0: "d8c9e6000b7de56023d8b7f32b21f3cfffacd9dac1e8ba1e1c396aa1caceb1c4",
    1e9: "fbed7d0e1c61ba80991fe9d8ffc2754a385c2b57e0aba85529277e5648dcdcc8",
    0.001: "f8d77a5f77d8311dca00f94901a9fadba38b54b6d7dc88c53dd4cde6bfe5bb9e",
}


def odd_lines():
    """Lines of a manifest with all that a line may have: equal lengths, none, parts, odd names."""
    durations = (3.5, 2, 3.5, None, 0.1 + 0.2, 59.99, 1e-7, 12345678.901, 3.5, 0)
    lines = [
        {"audio_filepath": f"/corpus/{number}.flac", "duration": durations[number % 10]}
        for number in range(100)
    ]
    lines[7] |= {"id": 'quoted "name" \\ \n é 𝄞 \ud800'}
    lines[8] |= {"id": 7, "offset": 1}
    lines[9] |= {"offset": 0.25, "text": "nobody reads this"}
    lines[20] = {"audio": "/corpus/SET.TAR"}
    lines[21] = {"audio": "/corpus/set.parquet", "duration": 9.0}
    lines[22] = {"audio": "/corpus/a.tar.gz", "id": "container"}
    sources = [{"type": "file", "channels": [0, 1], "source": "/corpus/two.wav"}]
    recording = {"id": "r", "sources": sources, "duration": 8.0}
    lines[30] = {"id": "cut", "start": 1.5, "duration": 2.5, "channel": 1, "recording": recording}
    return lines


@pytest.fixture
def manifest(tmp_path, make_manifest):
    """A file of `odd_lines`."""
    return make_manifest(tmp_path / "m.jsonl", odd_lines())


def planned_lines(given, shard_s):
    """The lines of shards of some inputs, as they are written."""
    rows = planning._rows(given)
    return [line for _, line in planning._shards(rows, "model and settings", shard_s)]


def plain_lines(given, shard_s):
    """The same, an object a recording and nothing kept back."""

    def planned_s(one):
        if one.is_container:
            return one.state[0] / BYTES_PER_S if one.state else UNKNOWN_S
        return UNKNOWN_S if one.duration_s is None else one.duration_s

    shards = []
    held = []
    size_s = 0.0
    for one in sorted(inputs.read(given), key=planned_s, reverse=True):
        if one.is_container:
            shards.append([one])
            continue
        if held and size_s + planned_s(one) > shard_s:
            shards.append(held)
            held, size_s = [], 0.0
        held.append(one)
        size_s += planned_s(one)
    if held:
        shards.append(held)
    lines = []
    for shard in shards:
        texts = ["[" + ",".join(json.dumps(value) for value in one) + "]" for one in shard]
        text = ",".join(texts)
        name = hashlib.sha256(f"model and settings {text}".encode()).hexdigest()[:16]
        lines.append(f'{{"name":"{name}","recordings":[{text}]}}\n'.encode())
    return lines


@pytest.mark.parametrize("shard_s", [*EARLIER])
def test_a_plan_is_that_of_plain_code_byte_for_byte(manifest, talks, make_tar, shard_s):
    make_tar(talks / "b" / "set.tar", {"x.wav": b"sound"})
    assert planned_lines([manifest], shard_s) == plain_lines([manifest], shard_s)
    both = [talks, manifest]  # a folder's recordings have states
    assert planned_lines(both, shard_s) == plain_lines(both, shard_s)


@pytest.mark.parametrize(("shard_s", "wanted"), EARLIER.items())
def test_a_plan_is_that_of_earlier_versions_so_that_their_folders_go_on(manifest, shard_s, wanted):
    found = hashlib.sha256(b"".join(planned_lines([manifest], shard_s))).hexdigest()
    assert found == wanted
