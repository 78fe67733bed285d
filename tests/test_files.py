"""Errors if asrkit cannot write its files."""

import numpy as np
import pytest
import soundfile

from asrkit import files
from asrkit.data import corpora
from asrkit.data.corpora.published import prepare_corpora
from asrkit.workbench.lessons.start_here import demo_folder, demo_model


@pytest.mark.parametrize("home", ["ASRKIT_HOME", "HOME", ""])
@pytest.mark.parametrize(
    "door",
    [
        files.home,
        lambda: corpora.spoken_commands(train=1, progress=False),
        lambda: demo_model(seconds=1),
        lambda: demo_folder().__enter__(),
        lambda: prepare_corpora("sounds", progress=False),
    ],
    ids=["home", "speech", "model", "demo", "corpus"],
)
def test_without_a_writable_folder_the_error_names_the_variable_to_set(
    door, home, tmp_path, monkeypatch
):
    pwd = pytest.importorskip("pwd")
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    (tmp_path / "sounds").mkdir()
    soundfile.write(tmp_path / "sounds/a.wav", np.zeros(8000), 16_000)
    (tmp_path / "sounds/a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    for name in ("ASRKIT_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home:  # a file cannot contain a folder
        monkeypatch.setenv(home, str(tmp_path / "sounds/a.txt"))
    else:  # a user without a line in /etc/passwd

        def nobody(number):
            raise KeyError(number)

        monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(OSError, match="ASRKIT_HOME") as caught:
        door()
    assert "\n" not in str(caught.value)
