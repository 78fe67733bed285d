"""The exported folder: tokens, what is refused, and that nothing is half-written."""

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from asrkit.cli import main
from asrkit.export import is_exported, read_exported
from asrkit.export.engines import open_engine
from asrkit.export.folder import MANIFEST, Exported, write_manifest, write_tokens
from asrkit.export.packages import require
from asrkit.export.writing import _head, _metadata
from asrkit.features import FeatureConfig
from asrkit.files import new_folder
from asrkit.models import (
    AEDModel,
    Checkpoint,
    CTCConfig,
    TransducerConfig,
    make_model,
    presets,
    save_checkpoint,
)
from asrkit.text import CharTokenizer, SentencePieceTokenizer, dump_tokenizer
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


def test_tokens_are_a_piece_and_its_number_a_line_and_blank_is_last(tmp_path):
    write_tokens(tmp_path / "tokens.txt", CharTokenizer(" ab"))
    assert (tmp_path / "tokens.txt").read_bytes() == b"  0\na 1\nb 2\n<blk> 3\n"
    texts = ["one two three four five six", "seven eight nine zero one two"] * 20
    tokenizer = SentencePieceTokenizer.train(texts, vocab_size=30)
    write_tokens(tmp_path / "tokens.txt", tokenizer)
    lines = (tmp_path / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split() for line in lines] == [
        [piece, str(number)] for number, piece in enumerate([*tokenizer.pieces(), "<blk>"])
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


def test_an_incomplete_or_damaged_folder_is_one_line_with_a_remedy(exported):
    (exported / "model.onnx").write_bytes(b"not")
    with pytest.raises(
        ValueError, match=r"^model: expected model.onnx of 11 bytes in .*, got 3 bytes. Export it"
    ):
        read_exported(exported)
    (exported / "model.onnx").unlink()
    with pytest.raises(
        ValueError, match=r"^model: expected model.onnx of 11 bytes in .*, got none. Export it"
    ):
        read_exported(exported)
    manifest = json.loads((exported / MANIFEST).read_text())
    (exported / MANIFEST).write_text(json.dumps(manifest | {"version": 9}))
    with pytest.raises(
        ValueError, match=r"^model: expected an export of version 1, got 9. Is it of a newer asrkit"
    ):
        read_exported(exported)
    (exported / MANIFEST).write_text('{"version": 1, "files": {}')
    with pytest.raises(
        ValueError, match=r"^model: asrkit.json of .* is damaged .*Export it again: asrkit export.$"
    ):
        read_exported(exported)
    with pytest.raises(
        ValueError,
        match=r"^model: expected a folder of asrkit export, got .*Make one: asrkit export.$",
    ):
        read_exported(exported / "none")


@pytest.mark.parametrize("part", ["format", "model", "features", "graphs"])
def test_a_manifest_without_a_part_is_damaged(exported, part):
    manifest = json.loads((exported / MANIFEST).read_text())
    del manifest[part]
    (exported / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=f"^model: asrkit.json of .* is damaged .KeyError: '{part}'"
    ):
        read_exported(exported)


@pytest.mark.parametrize(
    "part, value",
    [
        ("format", "torch"),
        ("head", "transducer"),
        ("head", None),
        ("graphs", {"encoder": "model.onnx"}),
        ("graphs", {"model": "other.onnx"}),
        ("tokenizer", dump_tokenizer(CharTokenizer("ab"))),
        ("features", {"bins": 64}),
        ("notes", []),
    ],
)
def test_a_manifest_with_a_part_of_another_model_is_one_line(exported, part, value):
    manifest = json.loads((exported / MANIFEST).read_text())
    (exported / MANIFEST).write_text(json.dumps(manifest | {part: value}))
    with pytest.raises(ValueError, match=f"^model: [^\n]*got {part} of another. Export it again"):
        read_exported(exported)


def test_a_file_that_was_changed_and_kept_its_size_is_one_line(exported):
    (exported / "model.onnx").write_bytes(b"NOT a graph")
    with pytest.raises(
        ValueError, match="^model: expected model.onnx in .* as it was written, got another. Export"
    ):
        read_exported(exported)


@pytest.mark.parametrize("part", ["features", "graphs", "files", "model"])
@pytest.mark.parametrize("value", [None, 7, "x", ["x"]])
def test_a_manifest_with_a_part_of_another_kind_is_damaged(exported, part, value):
    manifest = json.loads((exported / MANIFEST).read_text())
    (exported / MANIFEST).write_text(json.dumps(manifest | {part: value}))
    with pytest.raises(ValueError, match=r"^model: asrkit.json of .* is damaged \("):
        read_exported(exported)


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
        ValueError, match="^engine: expected one of 'onnxruntime', 'openvino', got 'ray'"
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


def test_models_that_no_layout_holds_are_refused():
    model = AEDModel(presets.tiny_aed())
    with pytest.raises(
        ValueError, match="^model: expected a CTC model or a transducer, got AEDModel. No layout"
    ):
        _head(model, None)
    with pytest.raises(ValueError, match="^head: expected 'ctc' of a CTC model, got 'transducer'"):
        _head(make_model(CTCConfig(vocab_size=3)), "transducer")
    without = make_model(TransducerConfig(vocab_size=3, ctc=False))
    with pytest.raises(
        ValueError, match="^head: expected 'transducer' of a model without a CTC head, got 'ctc'"
    ):
        _head(without, "ctc")
    assert _head(without, None) == "transducer"


@pytest.mark.parametrize(
    "durations, head, url",
    [
        ((), "transducer", "asrkit/rnnt"),
        ((0, 1), "transducer", "asrkit/tdt"),
        ((0, 1), "ctc", "asrkit/ctc"),
    ],
)
def test_clients_tell_kinds_of_models_apart_by_metadata(durations, head, url):
    model = make_model(TransducerConfig(vocab_size=28, durations=durations))
    checkpoint = Checkpoint(model, CharTokenizer(), {"normalization": "none"}, {})
    metadata = _metadata(checkpoint, head)
    assert all(isinstance(text, str) for text in metadata.values())
    assert metadata["url"] == url
    assert (metadata["vocab_size"], metadata["subsampling_factor"]) == ("28", "4")
    assert (metadata["normalize_type"], metadata["feat_dim"]) == ("", "80")
    assert metadata["features_hop_s"] == "0.01"
    assert ("pred_hidden" in metadata) == (head == "transducer")


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
        ValueError, match="^out: expected a folder that is not there yet or is empty, got "
    ):
        new_folder(target).__enter__()
    assert [path.name for path in target.parent.iterdir()] == ["new"]


def test_an_empty_folder_that_is_there_stays_the_same_folder(tmp_path, monkeypatch):
    empty, link = tmp_path / "empty", tmp_path / "link"
    empty.mkdir()
    link.symlink_to(empty)
    number = empty.stat().st_ino
    monkeypatch.chdir(empty)
    for path in (".", empty, link):
        with new_folder(path) as folder:
            (folder / "a").write_text("x")
            (folder / "b").mkdir()
        assert empty.stat().st_ino == number and link.is_symlink()
        assert sorted(one.name for one in Path().iterdir()) == ["a", "b"]
        (empty / "a").unlink()
        (empty / "b").rmdir()

    def taken_meanwhile():
        with new_folder(empty) as folder:
            (folder / "a").write_text("x")
            (empty / "other").touch()

    with pytest.raises(ValueError, match="^out: expected a folder that is not there yet"):
        taken_meanwhile()
    assert [one.name for one in empty.iterdir()] == ["other"]


def test_a_link_to_nothing_is_a_link_to_the_new_folder(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("deep/new")
    with new_folder(link) as folder:
        (folder / "a").write_text("x")
    assert link.is_symlink() and (tmp_path / "deep" / "new" / "a").read_text() == "x"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["a", "deep", "link", "new"]


@pytest.fixture
def small(tmp_path):
    """A CTC model as a file."""
    torch.manual_seed(0)
    model = make_model(CTCConfig(vocab_size=28)).eval()
    path = tmp_path / "small.safetensors"
    save_checkpoint(path, Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), {}))
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
    assert main(["export", "--model", str(small), "--format", format, "--out", str(out)]) == 2
    wanted = (
        "asrkit export: --format: expected one whose packages are installed, got one that needs "
        f"{missing}. Install it: pip install 'asrkit[{format}]'.\n"
    )
    assert capsys.readouterr().err == wanted
    assert not out.exists()


def refused(capsys, *arguments):
    """The one line in which `asrkit transcribe` refuses."""
    assert main(["transcribe", "talk.wav", *map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message.removeprefix("asrkit transcribe: ")


def test_transcribe_refuses_what_an_engine_cannot_do(
    exported, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    message = refused(capsys, "--model", exported)
    assert message.startswith(
        "--engine: expected one for an exported model, got torch. Pass --engine onnxruntime"
    )
    message = refused(capsys, "--model", small, "--engine", "openvino")
    assert message.startswith("--model: expected a folder of asrkit export, got ")
    message = refused(capsys, "--engine", "openvino")
    assert message.startswith(
        "--model: expected a folder of asrkit export with --engine openvino, got none. Make one"
    )
    message = refused(capsys, "--model", exported, "--engine", "openvino", "--context", 3, 3)
    assert message.startswith("--context: expected none with --engine openvino, got [3, 3]")
    if find_spec("onnxruntime") is None:
        message = refused(capsys, "--model", exported, "--engine", "onnxruntime")
        assert message.startswith("--engine: expected one whose packages are installed, got one")
    message = refused(capsys, "--model", exported, "--engine", "openvino", "--dtype", "float16")
    assert message.startswith("--dtype: expected one of 'float32', 'bfloat16', got 'float16'")
