import pytest

from asrkit.transcribe.bulk import progress
from asrkit.transcribe.bulk.progress import Progress


def test_hours_rtfx_errors_and_the_time_left_are_of_what_this_run_does():
    with Progress(10 * 3600.0, 2 * 3600.0, show=False) as one:
        assert one.text(1.0) == "2.0 of 10.0 h, RTFx 0, 0 errors, ? left"
        for _ in range(4):
            one.heard(900.0, 0)
        one.finished(3600.0)
        one.heard(3600.0, 1)
        assert one.text(10.0) == "4.0 of 10.0 h, RTFx 720, 1 errors, 00:30 left"
        one.finished(1800.0)  # the plan had guessed less
        assert one.text(10.0) == "3.5 of 10.0 h, RTFx 720, 1 errors, 00:43 left"


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    for show in (False, True):
        with Progress(7200.0, 0.0, show=show) as one:
            one.heard(3600.0, 1)
    line = capsys.readouterr().err
    assert line.startswith("1.0 of 2.0 h, RTFx ") and line.count("\n") == 1


@pytest.mark.parametrize("total_s", [0.0, 1e-9])
def test_a_plan_without_length_is_no_division_by_zero(total_s):
    with Progress(total_s, 0.0, show=True) as one:
        one.heard(0.0, 1)
        one.finished(0.0)
        assert "1 errors" in one.text(0.0)
