"""The documents about asrkit: commands, links, tables and the citation have to be correct."""

import importlib.util
import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from asrkit.cli import COMMANDS, parsers
from asrkit.workbench import records
from asrkit.workbench.claims import LEGEND, load_claims
from asrkit.workbench.claims.answers import OUTCOMES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
GUIDES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").glob("*.md")
    if path.name != "commands.md"  # written from the parser itself
)
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/commands.md",
    "figures/README.md",
]
PAGES += ["data/published/README.md", *GUIDES]
MIB = 2**20
LOSS = {"shape": [4, 200, 101, 1024], "dtype": "float32"}
DECODING = {"shape": [32, 375, 640, 1025], "dtype": "float32"}
ENCODER = {"shape": [1, 1000, 512, 17]}
BATCHING = {"set": "web_like", "ranks": 8, "utterances": 150_000}
LIBRISPEECH = {"set": "librispeech_train_clean_100", "ranks": 8}
JOINT_ON_A_GPU = {"shape": [32, 200, 101, 640, 1025], "device": "cuda"}
DECODING_ON_A_GPU = {
    "shape": [32, 187, 640, 1025],
    "dtype": "float32",
    "device": "cuda",
}
RECOGNISER = {"shape": [128, 1000, 1024, 24]}
RESULTS = [  # text of the README, factor of its unit, and the record's what, implementation, metric and parameters
    ("57 ms", 1, "rnnt-loss", "numba_cpu_overwrite", "cpu_time", LOSS),
    ("1.5 MiB", 1 / MIB, "rnnt-loss", "numba_cpu_overwrite", "peak_memory", LOSS),
    ("61 ms", 1, "rnnt-loss", "numba_cpu", "cpu_time", LOSS),
    ("317 MiB", 1 / MIB, "rnnt-loss", "numba_cpu", "peak_memory", LOSS),
    ("1.1 s", 1e-3, "rnnt-loss", "fast_rnnt", "cpu_time", LOSS),
    ("1276 MiB", 1 / MIB, "rnnt-loss", "fast_rnnt", "peak_memory", LOSS),
    ("4.6 s", 1e-3, "rnnt-loss", "torchaudio", "cpu_time", LOSS),
    ("631 MiB", 1 / MIB, "rnnt-loss", "torchaudio", "peak_memory", LOSS),
    ("15.9 s", 1e-3, "rnnt-loss", "nemo_numba", "cpu_time", LOSS),
    ("956 MiB", 1 / MIB, "rnnt-loss", "nemo_numba", "peak_memory", LOSS),
    ("1.31 s", 1e-3, "rnnt-greedy", "windowed_looping", "cpu_time", DECODING),
    ("2.70 s", 1e-3, "rnnt-greedy", "nemo_label_looping", "cpu_time", DECODING),
    ("95.2 %", 100, "batching", "balanced", "utilisation", BATCHING),
    ("67.5 %", 100, "batching", "lhotse_1d", "utilisation", BATCHING),
    ("26.0 %", 100, "batching", "random_seconds", "utilisation", BATCHING),
    ("96.0 %", 100, "batching", "balanced", "utilisation", LIBRISPEECH),
    ("85.9 %", 100, "batching", "lhotse_1d", "utilisation", LIBRISPEECH),
    (
        "11.7 ms",
        1,
        "rnnt-loss-joint",
        "lean_triton_bfloat16",
        "latency",
        JOINT_ON_A_GPU,
    ),
    (
        "628 MiB",
        1 / MIB,
        "rnnt-loss-joint",
        "lean_triton_bfloat16",
        "peak_memory",
        JOINT_ON_A_GPU,
    ),
    ("62.0 ms", 1, "rnnt-loss-joint", "torchaudio_bfloat16", "latency", JOINT_ON_A_GPU),
    (
        "7437 MiB",
        1 / MIB,
        "rnnt-loss-joint",
        "torchaudio_bfloat16",
        "peak_memory",
        JOINT_ON_A_GPU,
    ),
    (
        "11.2 ms",
        1,
        "rnnt-greedy",
        "windowed_looping_full",
        "latency",
        DECODING_ON_A_GPU,
    ),
    (
        "43.3 ms",
        1,
        "rnnt-greedy",
        "nemo_label_looping_graphs",
        "latency",
        DECODING_ON_A_GPU,
    ),
    ("81 ms", 1, "headline-full", "graph", "latency", RECOGNISER),
]
ENGINES = {
    "120 ms": "optimized_int8",
    "ONNX Runtime 1.32: 126 ms": "onnxruntime_int8",
    "OpenVINO 2026.4: 124 ms": "openvino_int8",
    "168 ms;": "optimized_bfloat16",
    "OpenVINO: 150 ms": "openvino_bfloat16",
    "302 ms": "optimized_float32",
    "285 ms": "openvino_float32",
    "308 ms in float32": "onnxruntime_float32",
}
RESULTS += [
    (sentence, 1, f"engines-{impl.rpartition('_')[2]}", impl, "latency", ENCODER)
    for sentence, impl in ENGINES.items()
]
TRANSCRIPTION = {
    "122 times": "asrkit_int8",
    "91 times": "asrkit_bfloat16",
    "53 times": "asrkit_float32",
    "59 times": "openvino_ctc_int8",
    "48 times": "sherpa_onnx_ctc_int8",
    "45 times": "sherpa_onnx_ctc_float32",
    "38 times": "onnx_asr_ctc_int8",
}
RESULTS += [
    (sentence, 1, "files-ctc", program, "rtfx", {})
    for sentence, program in TRANSCRIPTION.items()
]
RESULTS += [
    ("77 times", 1, "long-whisper", "asrkit_bfloat16", "rtfx", {}),
    ("34 times", 1, "long-whisper", "faster_whisper_int8", "rtfx", {}),
    ("61 times", 1, "long-whisper", "faster_whisper_batched_int8", "rtfx", {}),
    ("42 times", 1, "long-whisper", "openvino_genai_bfloat16", "rtfx", {}),
    ("12.0 %", 100, "long-whisper", "asrkit_bfloat16", "wer", {}),
    ("12.5 %", 100, "long-whisper", "faster_whisper_int8", "wer", {}),
    ("29.2 %", 100, "long-whisper", "faster_whisper_batched_int8", "wer", {}),
    ("12.4 %", 100, "long-whisper", "openvino_genai_bfloat16", "wer", {}),
]


def texts(pages):
    """The pages' text, one after another."""
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)


UNWRAPPED = re.sub(
    r" \\\n *", " ", texts(["README.md", *GUIDES])
)  # a command of two lines is one
SHELL = re.findall(
    r"^    (?:make \w+ && )?(asrkit .+?)(?:\s+#.*)?$", UNWRAPPED, re.MULTILINE
)
INLINE = re.findall(r"`(asrkit [a-z][^`…]*)`", UNWRAPPED)
MAKE_COMMANDS = re.findall(
    r"^    make (\w+)(?: ARGS=\"(.*?)\")?", UNWRAPPED, re.MULTILINE
)


def test_the_page_of_commands_is_up_to_date():
    document = runpy.run_path(str(ROOT / "docs/commands.py"))["document"]
    assert (ROOT / "docs/commands.md").read_text(encoding="utf-8") == document(), (
        "run `make docs`"
    )


def test_every_example_of_the_help_can_be_typed():
    lines = [example for command in COMMANDS.values() for example in command.examples]
    assert len(lines) > 20 and all(command.examples for command in COMMANDS.values())
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        assert words[0] == "asrkit"
        assert parsers()[""].parse_args(words[1:]).command


@pytest.mark.parametrize("line", sorted({*SHELL, *INLINE}))
def test_every_command_in_the_readme_and_the_guides_can_be_typed(line):
    words = shlex.split(line)[1:]
    # a name alone is not a complete command
    if " ".join(words) not in {*COMMANDS, "data", "--version"}:
        parsers()[""].parse_args(words)


@pytest.mark.parametrize("target, arguments", sorted(set(MAKE_COMMANDS)))
def test_every_make_command_names_a_target_and_takes_its_arguments(target, arguments):
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.M)
    assert recipe, target
    if arguments:
        (command,) = re.findall(r"/asrkit (\w+) \$\(ARGS\)", recipe[1])
        parsers()[""].parse_args([command, *shlex.split(arguments)])


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_to_files_that_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    for target in linked + re.findall(r'(?:href|src)="([^"]+)"', text):
        assert (
            target.startswith("https:") or ((ROOT / page).parent / target).exists()
        ), target


def test_the_readme_shows_every_notebook_with_its_question():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        opening = json.loads(path.read_text("utf-8"))["cells"][0]["source"]
        question = "".join(opening).splitlines()[0].removeprefix("# ")
        (shown,) = re.findall(rf".*notebooks/{path.name}.*", README)
        assert f'src="figures/{path.stem}.svg"' in shown
        assert path.stem.startswith("00") or question in shown


def test_the_readme_is_read_in_three_minutes():
    assert len(README.splitlines()) <= 120


@pytest.fixture(scope="module")
def linked_records():
    """The records that the README links to."""
    paths = set(re.findall(r"\]\((data/records/\w+/bench.jsonl)\)", README))
    return [record for path in sorted(paths) for record in records.read(ROOT / path)]


@pytest.mark.parametrize("sentence, factor, what, impl, metric, params", RESULTS)
def test_the_readme_agrees_with_the_records(
    sentence, factor, what, impl, metric, params, linked_records
):
    number = re.search(r"[\d.]+(?= (?:s|ms|MiB|%|times))", sentence)[0]
    decimals = len(number.partition(".")[2])
    recorded = {
        f"{record['value'] * factor:.{decimals}f}"
        for record in linked_records
        if (record["what"], record["impl"], record["metric"]) == (what, impl, metric)
        and params.items() <= record["params"].items()
    }
    assert sentence in README and number in recorded


def test_captions_count_what_the_picture_of_decoding_shows():
    path = ROOT / "figures" / "label_looping.py"
    spec = importlib.util.spec_from_file_location("label_looping_picture", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    _, titles = script.draw()
    counted = [
        re.findall(r"[\d,]+(?= calls| rows| of the predictor)", title)
        for title in titles
    ]
    frame, label, windowed = counted
    readme, sentence = (
        re.sub(r"\s+", " ", text) for text in (README, texts(["figures/README.md"]))
    )
    for words in (
        f"needs {windowed[0]} calls instead of {frame[0]} or {label[0]}",
        f"of {windowed[1]} rows in all instead of {frame[1]} or {label[1]}",
        f"{label[2]} instead of {frame[2]}",
    ):
        assert words in readme
    for joint, _, predictor in counted:
        assert re.search(rf"{joint}( calls of the joint)? and {predictor}\b", sentence)
    assert (
        f"{windowed[1]} rows of the joint instead of {frame[1]} and {label[1]}"
        in sentence
    )


def test_the_index_of_the_guides_lists_them_all():
    listed = set(
        re.findall(r"^\| \[(\w+\.md)\]", texts(["docs/README.md"]), re.MULTILINE)
    )
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} - {
        "README.md"
    }


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / ".github/workflows").glob("*.yml")),
    ids=lambda path: path.name,
)
def test_a_workflow_can_be_read_and_runs_commands_that_are_there(path):
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert flow["name"] == path.stem and flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        for step in job["steps"]:
            for target, typed in re.findall(
                r"\bmake ([a-z]+)(?: ARGS=\"(.*)\")?", step.get("run", "")
            ):
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
                assert target != "report" or parsers()[""].parse_args(
                    [target, *shlex.split(typed)]
                )


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert cited["version"] == project["version"] and [*cited["license"]] == project[
        "license"
    ].split(" AND ")
    assert {"cff-version", "message", "title", "authors", "type"} <= {*cited}


def test_each_test_that_a_promise_names_exists():
    text = (ROOT / "docs/robustness.md").read_text(encoding="utf-8")
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and "Promise" not in line
    ]
    named = [re.findall("`(test_[a-z0-9_]+)`", row) for row in rows]
    assert len(rows) > 10 and all(named), "a promise without a test"
    code = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")
    )
    defined = set(re.findall(r"(?m)^def (test_\w+)", code))
    assert set().union(*named) <= defined


def test_the_guide_to_the_report_counts_the_claims_and_explains_every_verdict():
    claims = load_claims()
    aside = sum(bool(claim.appendix) for claim in claims)
    page = texts(["docs/report.md"])
    assert f"\n{len(claims) - aside} claims of five documents" in page
    assert f" {aside} more in an appendix " in page
    table = page.partition("| Verdict | Meaning |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| ([a-z, -]+?) \|", table, re.MULTILINE)) == set(LEGEND)
    words = " ".join(page.split())
    assert [outcome for outcome in OUTCOMES if f"*{outcome}*" not in words] == []
