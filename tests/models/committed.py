"""Numbers of a peer that were committed (tests/golden), and what that peer says today."""

import torch


def expect_the_same(said, kept, rounded, close):
    """AssertionError unless a peer says what is committed.

    said, kept: {"peer": version, case: {name: numbers}}, today and as committed.
    rounded: names of what another processor rounds otherwise.
    close: tolerances of these.
    """
    assert said.keys() == kept.keys()
    assert said["peer"] == kept["peer"]
    for case in kept.keys() - {"peer"}:
        assert said[case].keys() == kept[case].keys()
        for name, wanted in kept[case].items():
            if name in rounded:
                found = torch.tensor(said[case][name])
                torch.testing.assert_close(found, torch.tensor(wanted), **close)
            else:
                assert said[case][name] == wanted, (case, name)
