"""The exported folder: tokens, what is refused, and that nothing is half-written."""

import json
from dataclasses import asdict, replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from asrkit.cli import main
from asrkit.export import export, is_exported, read_exported
from asrkit.export.engines import open_engine
from asrkit.export.folder import MANIFEST, Exported, write_manifest, write_tokens
from asrkit.export.packages import require
from asrkit.features import FeatureConfig
from asrkit.files import new_folder
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    LSTMEncoderConfig,
    TransducerConfig,
    make_model,
    presets,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.transcribe.engines import EngineEncoder


@pytest.fixture
def exported(tmp_path):
    """A folder with a manifest whose graph is no graph."""
    path = tmp_path / "exported"
    path.mkdir()
    (path / "model.onnx").write_bytes(b"not a graph")
    write_tokens(path / "tokens.txt", CharTokenizer())
    written = Exported(
        path=path,
        format="onnx",
        int8=False,
        head="ctc",
        config=CTCConfig(vocab_size=28),
        tokenizer=CharTokenizer(),
        features=asdict(FeatureConfig()),
        notes={"max_symbols": 5},
        graphs={"model": "model.onnx"},
        files={},
    )
    write_manifest(written)
    return path


def test_tokens_are_a_piece_and_its_number_a_line_and_blank_is_last(
    tmp_path, train_pieces
):
    write_tokens(tmp_path / "tokens.txt", CharTokenizer(" ab"))
    assert (tmp_path / "tokens.txt").read_bytes() == b"  0\na 1\nb 2\n<blk> 3\n"
    texts = ["one two three four five six", "seven eight nine zero one two"] * 20
    tokenizer = train_pieces(texts, vocab_size=30)
    write_tokens(tmp_path / "tokens.txt", tokenizer)
    lines = (tmp_path / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split() for line in lines] == [
        [piece, str(number)]
        for number, piece in enumerate([*tokenizer.pieces(), "<blk>"])
    ]


@pytest.mark.parametrize("alphabet", ["ab\t", "ab\n", "aba"])
def test_tokens_that_the_file_cannot_hold_are_refused(tmp_path, alphabet):
    with pytest.raises(ValueError, match="^tokenizer: expected pieces "):
        write_tokens(tmp_path / "tokens.txt", CharTokenizer(alphabet))


def test_what_was_written_is_read(exported):
    found = read_exported(exported)
    assert is_exported(exported) and found.acoustic == "model"
    assert found.config == CTCConfig(vocab_size=28)
    assert found.tokenizer == CharTokenizer() and found.notes == {"max_symbols": 5}
    assert set(found.files) == {"model.onnx", "tokens.txt"}


def without_format(folder):
    """Take a part out of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["format"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


CHANGED = (
    "model: expected model.onnx in .* as it was written, got another. Export it again"
)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"NOT a graph"), CHANGED),
        (
            lambda folder: (folder / "model.onnx").unlink(),
            CHANGED.replace("another", "none"),
        ),
        (
            lambda folder: (folder / MANIFEST).write_text('{"version": 9}'),
            "got 9. Is it of a newer",
        ),
        (
            lambda folder: (folder / MANIFEST).write_text('{"version": 1'),
            "asrkit.json of .* damaged",
        ),
        (
            without_format,
            "asrkit.json of .* is damaged .KeyError: 'format'.. Export it again",
        ),
        (
            lambda folder: (folder / MANIFEST).unlink(),
            "model: expected a folder of asrkit export",
        ),
    ],
)
def test_an_incomplete_or_damaged_folder_is_one_line_with_a_remedy(
    exported, damage, said
):
    damage(exported)
    with pytest.raises(
        ValueError, match=f"^model: .*{said.removeprefix('model: ')}"
    ) as error:
        read_exported(exported)
    assert "\n" not in str(error.value)


class Answering:
    """An engine that answers numbers whatever it is given."""

    def __call__(self, signal, lengths):
        frames = np.ones((len(signal), signal.shape[2] // 2, 3), np.float32)
        return frames, lengths // 2


def test_features_that_are_not_finite_become_frames_that_are_not():
    features = torch.zeros(4, 8, 5)
    features[1, 3, 2] = torch.nan
    features[2, 0, 0] = torch.inf
    features[3, 6:] = torch.nan  # padding
    encoder = EngineEncoder(Answering(), b"", time_last=False)
    encoded, lengths = encoder(features, torch.tensor([8, 8, 8, 6]))
    assert lengths.tolist() == [4, 4, 4, 3]
    assert encoded.isnan().all(2).all(1).tolist() == [False, True, True, False]
    assert encoded[[0, 3]].isfinite().all()


def test_an_engine_that_is_unknown_or_reads_another_format_is_refused(exported):
    found = read_exported(exported)
    with pytest.raises(
        ValueError,
        match="^engine: expected one of 'onnxruntime', 'openvino', got 'ray'",
    ):
        open_engine(found, "ray")
    with pytest.raises(
        ValueError, match="^dtype: expected one of 'float32', 'bfloat16', got 'float16'"
    ):
        open_engine(found, "openvino", precision="float16")
    in_ir = Exported(**{**vars(found), "format": "openvino"})
    with pytest.raises(
        ValueError,
        match="^engine: expected one that reads what .* holds, openvino, got onnxruntime",
    ):
        open_engine(in_ir, "onnxruntime")


def test_a_package_that_is_missing_is_named_with_its_extra():
    require("torch", "numpy", argument="format", extra="onnx")
    wanted = (
        "format: expected one whose packages are installed, got one that needs no_such_package. "
        "Install it: pip install 'asrkit[onnx]'."
    )
    with pytest.raises(ValueError) as caught:
        require("torch", "no_such_package", argument="format", extra="onnx")
    assert str(caught.value) == wanted


def test_int8_wants_a_cpu_with_instructions_for_it(exported, monkeypatch):
    old = {"architecture": "x86_64", "avx2": True, "avx512_vnni": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: old)
    said = r"^int8: expected a CPU with VNNI, .*, got one without \(x86_64\)\. Export without --int8\.$"
    with pytest.raises(ValueError, match=said):
        open_engine(replace(read_exported(exported), int8=True), "onnxruntime")


@pytest.mark.parametrize(
    ("config", "head", "said"),
    [
        (presets.tiny_aed(), None, "model: expected a CTC model or a transducer, got AEDModel. No layout"),
        (CTCConfig(vocab_size=3), "transducer", "head: expected 'ctc' of a CTC model, got 'transducer'"),
        (CTCConfig(vocab_size=3, encoder=LSTMEncoderConfig(width=8)), None, "model: expected an encoder without LSTMs, got LSTMEncoder"),
        (TransducerConfig(vocab_size=3, ctc=False), "ctc", "head: expected 'transducer' of a model without a CTC head, got 'ctc'"),
    ],
)  # fmt: skip
def test_models_that_no_layout_holds_are_refused(tmp_path, config, head, said):
    checkpoint = Checkpoint(make_model(config).eval(), CharTokenizer(), {}, {})
    with pytest.raises(ValueError, match=f"^{said}"):
        export(checkpoint, tmp_path / "out", format="onnx", head=head)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_made_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "new"

    def stopped():
        with new_folder(target) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stopped()
    assert [*target.parent.iterdir()] == []
    target.mkdir()
    with new_folder(target) as folder:
        (folder / "whole").write_text("x")
    assert [path.name for path in target.parent.iterdir()] == ["new"]
    assert (target / "whole").read_text() == "x"
    with pytest.raises(
        ValueError,
        match="^out: expected a folder that is not there yet or is empty, got ",
    ):
        new_folder(target).__enter__()
    assert [path.name for path in target.parent.iterdir()] == ["new"]


@pytest.fixture
def small(tmp_path):
    """A CTC model as a file."""
    torch.manual_seed(0)
    model = make_model(CTCConfig(vocab_size=28)).eval()
    path = tmp_path / "small.safetensors"
    save_checkpoint(
        path, Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), {})
    )
    return path


@pytest.mark.parametrize(
    ("format", "missing"), [("onnx", "onnx and onnxscript"), ("openvino", "openvino")]
)
def test_export_without_its_packages_says_so_and_writes_nothing(
    small, tmp_path, capsys, format, missing
):
    if find_spec(format) is not None:
        pytest.skip(f"needs an installation without {format}")
    out = tmp_path / "out"
    assert (
        main(["export", "--model", str(small), "--format", format, "--out", str(out)])
        == 2
    )
    wanted = (
        "asrkit export: --format: expected one whose packages are installed, got one that needs "
        f"{missing}. Install it: pip install 'asrkit[{format}]'.\n"
    )
    assert capsys.readouterr().err == wanted
    assert not out.exists()


def refused(capsys, *arguments):
    """The one line in which `asrkit transcribe` refuses."""
    assert (
        main(["transcribe", "--dtype", "float32", "talk.wav", *map(str, arguments)])
        == 2
    )
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message.removeprefix("asrkit transcribe: ")


def test_transcribe_refuses_what_an_engine_cannot_do(
    exported, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    message = refused(capsys, "--model", exported)
    assert message.startswith(
        "--engine: expected onnxruntime or openvino for this --model, got torch."
    )
    message = refused(capsys, "--model", small, "--engine", "openvino")
    assert message.startswith("--model: expected a folder of asrkit export, got ")
    message = refused(capsys, "--engine", "openvino")
    assert message.startswith("--engine: expected --model with it, got openvino.")
    message = refused(
        capsys, "--model", exported, "--engine", "openvino", "--context", 3, 3
    )
    assert message.startswith(
        "--context: expected none with --engine openvino, got [3, 3]"
    )
    if find_spec("onnxruntime") is None:
        message = refused(capsys, "--model", exported, "--engine", "onnxruntime")
        assert message.startswith(
            "--engine: expected one whose packages are installed, got one"
        )
    message = refused(
        capsys, "--model", exported, "--engine", "openvino", "--dtype", "float16"
    )
    assert message.startswith(
        "--dtype: expected one of 'float32', 'bfloat16', got 'float16'"
    )
