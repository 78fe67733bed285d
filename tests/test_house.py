"""House rules: floors, imports, sizes, the lock file, and the set-up."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "asrkit"
BENCHMARKS = ROOT / "benchmarks"
WORKBENCH = "workbench"
FLOORS = [  # of the library, then of the workbench above it, then of the commands
    {"conflict", "rtfx"},
    {"shapes", "files", "tasks"},
    {"shapes", "files", "tasks", "rtfx"},
    {
        "compilers",
        "threads",
        "memory",
        "devices",
        "gpu_waits",
        "cuda_graphs",
        "cpu",
        "sound_files",
    },
    {"sound_headers"},
    {"sound_readers"},
    {"features", "text"},
    {"models", "losses", "decoders", "optim"},
    {"export"},
    {"data", "transcribe"},
    {"training"},
    {"workbench.machine", "workbench.tables"},
    {"workbench.records"},
    {
        "workbench.cost",
        "workbench.measure",
        "workbench.claims",
    },
    {"workbench.plots", "workbench.report", "workbench.doctor"},
    {
        "workbench.lessons",
    },
    {"cli"},
]
LAYER = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LIBRARY = set().union(*FLOORS[: LAYER["training"] + 1])
BARE = (  # what a bare GPU machine imports: it has torch, numpy and numba
    set().union(*FLOORS[: LAYER["models"] + 1])
    | {
        "workbench.machine",
        "workbench.tables",
        "workbench.records",
        "workbench.measure",
    }
    | {"workbench.doctor", "cli", "__init__", "__main__"}
)
BARE_FOLDERS = (
    "benchmarks",
    "asrkit.workbench.lessons.shared",
)  # as bare as those rooms
KERNELS = {
    "torch",
    "numpy",
    "numba",
    "llvmlite",
    "triton",
}  # a bare GPU machine: the last two come with the rest
POSIX = (
    "fcntl",
    "resource",
    "pwd",
    "grp",
    "termios",
)  # modules of Python that Windows lacks
SEPARATE = "asrkit/data/corpora/espeak_worker.py"  # a GPL program of its own

FILE_LINES = 500
FUNCTION_LINES = 60
# "asrkit/file.py" or "asrkit/file.py:function" -> why it may be longer.
LONG: dict[str, str] = {}
# Syntax nodes, statements and expressions, that a folder of asrkit/ may have; "." is its own files.
# Lower a number freely; raise one only with a reason in a comment.
NODES = {
    ".": 9_600,  # gaps of time in sound files are reported; compilers of Numba's CUDA; model files are mapped; limits of instructions; numbers of NumPy
    "cli": 5_250,  # failed recordings with some text are counted; garbage is not collected while torch is imported
    "data": 12_300,  # a limit, a rank and an epoch of the wrong kind are refused
    "decoders": 14_050,  # a predictor without state is refused; rules of timestamps in sums, room that grows
    "export": 2_109,  # a model in another dtype or optimized is refused
    "losses": 17_401,  # messages show NumPy numbers; a whole loss in Numba's CUDA; the packed joint's dropout; a tile is located once
    "models": 19_550,  # foreign modules are not saved; weights stay in the file until they are packed; int8 in 7 bits, quantized by torch first
    "training": 8_628,  # strategies of batching, float16, graphs, forms of the joint
    "transcribe": 15_750,  # gaps of time; int8 by model and CPU; features in parts; models changed in place
    "workbench": 2_421,  # doctor names the dtype of the default model
    "workbench/claims": 2_592,  # libyaml reads the claims
    "workbench/cost": 3_223,
    "workbench/lessons": 15_800,  # rungs of a CPU without bfloat16; checks of answers
    "workbench/measure": 3_895,
    "workbench/plots": 1_831,  # live figures
    "workbench/report": 5_600,  # takeaways without predictions are open; the glossary; numbers of questions
}
MOST_BENCHMARK_NODES = 25_570  # with peers of whole programs, and --only
MOST_NODES = 140_080  # of the whole package: see the rows
# Modules of asrkit that importing a lesson may load: fewer if it neither transcribes nor trains.
LESSON_MODULES, MORE_MODULES = 60, 127
TRANSCRIBES = {
    "batched_ctc_frontend", "batching", "bf16_casting", "cost", "cuda_graphs", "jasper", "policies", "whisper_parts",
    "start_here", "file_recognizer", "frontends", "ladder", "one_utterance", "precision", "scripted",
}  # fmt: skip
SLACK = 0.97  # share of its number that a folder has at least, or the number is lowered
LESSONS = {path.stem[3:] for path in (ROOT / "notebooks").glob("*.ipynb")}

EXTRAS = (
    "notebooks",
    "synth",
    "dev",
)  # what the lock holds; `dev` has all that `cuda` names
# Spelled in two parts so that this file does not contain them.
FORBIDDEN = ["/wo" + "rk/", "/ro" + "ot/", "/fa" + "rm/", "/op" + "t/", "/ho" + "me/", "/Us" + "ers/", "/tm" + "p/venv",
             "../sha" + "red", "file:" + "///"]  # fmt: skip


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def benchmark_sources() -> list[Path]:
    """Every Python file of the benchmarks."""
    return sorted(BENCHMARKS.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def relative(path: Path) -> str:
    """`path` from the repository's root, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def room(path: Path) -> str:
    """The file or folder directly under asrkit/, or under asrkit/workbench/, that `path` belongs to."""
    return room_of(
        [part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts]
    )


def room_of(parts: list[str]) -> str:
    """The room of a dotted name's parts below asrkit: `losses`, `workbench.records`."""
    return ".".join(parts[:2] if parts[0] == WORKBENCH else parts[:1])


def imported(text: str, module: str) -> list[tuple[str, bool, int]]:
    """(dotted name, whether it runs when the module is imported, line) for every import in `text`."""
    found = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, runs, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            stem = ".".join(filter(None, (base, node.module)))
            found.extend(
                (f"{stem}.{alias.name}", runs, node.lineno) for alias in node.names
            )
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, runs and not inside)

    visit(ast.parse(text), True)
    return found


def layer_problems(text: str, module: str) -> list[str]:
    """Imports of `module` that point up or sideways, or that a bare machine could not serve."""
    here = room_of(module.split(".")[1:] or ["__init__"])
    if module.startswith("benchmarks"):
        here = "benchmarks"
    problems = []
    for name, runs, line in imported(text, module):
        top, *rest = name.split(".")
        if top == "asrkit":
            there = room_of(rest or [""])
            if (
                there in LAYER
                and here in LAYER
                and there != here
                and LAYER[there] >= LAYER[here]
            ):
                problems.append(
                    f"{module}:{line} imports {there}, which is not below {here}"
                )
            if "espeak_worker" in rest:
                problems.append(
                    f"{module}:{line} imports the GPL program; start it as a process"
                )
        elif top == "benchmarks":
            if not module.startswith("benchmarks"):
                problems.append(
                    f"{module}:{line} imports benchmarks, which no wheel has"
                )
        elif (
            runs
            and (here in BARE or module.startswith(BARE_FOLDERS))
            and top not in KERNELS
            and top not in sys.stdlib_module_names
        ):
            problems.append(
                f"{module}:{line} imports {top} at the top; import it in the function that needs it"
            )
    return problems


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def size_problems(text: str, name: str) -> list[str]:
    """Files and functions longer than the house allows, and public names without a docstring."""
    tree = ast.parse(text)
    sizes = {name: (text.count("\n"), FILE_LINES)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            sizes[f"{name}:{node.name}"] = (body_lines(node), FUNCTION_LINES)
    problems = []
    for where, (size, limit) in sizes.items():
        if (size > limit) != (where in LONG):
            problems.append(f"{where} has {size} lines")
    for node in [tree, *tree.body]:
        public = isinstance(node, ast.Module) or not getattr(
            node, "name", "_"
        ).startswith("_")
        named = isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        if public and named and not ast.get_docstring(node):
            problems.append(
                f"{name}: {getattr(node, 'name', 'the module')} has no docstring"
            )
    return problems


def count_nodes(path: Path) -> int:
    """Statements and expressions of a file, docstrings left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
    docstring_nodes = 2 * sum(doc is not None for doc in docs)
    return (
        sum(isinstance(node, ast.stmt | ast.expr) for node in nodes) - docstring_nodes
    )


def folder(path: Path) -> str:
    """The folder of asrkit/, or of asrkit/workbench/, that contains a file; "." for none."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    depth = 2 if parts[:1] == (WORKBENCH,) else 1
    return "/".join(parts[:depth]) or "."


def drawn_rooms() -> set[str]:
    """Files and folders of the package that the picture in CONTRIBUTING.md draws."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = text.partition("    asrkit/\n")[2].partition("\n\n")[0]
    folders: list[str] = []
    drawn = set()
    for line in picture.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 3
        names = re.match(r" +((?:[\w.]+/? )*[\w.]+/?)(?:  |$)", line)
        for name in names[1].split():
            folders[depth:] = [name.rstrip("/")]
            drawn.add("/".join(folders))
    return drawn


def test_a_lesson_has_the_name_of_its_notebook():
    inside = (PACKAGE / "workbench" / "lessons").iterdir()
    found = {path.stem for path in inside if not path.name.startswith("__")}
    assert found <= LESSONS | {"shared"}, found - LESSONS


def test_the_picture_of_the_house_equals_the_tree():
    drawn = drawn_rooms()
    missing = [name for name in drawn if not (PACKAGE / name).exists()]
    assert not missing, f"CONTRIBUTING.md draws what is not there: {missing}"
    folders = {relative(path.parent).partition("/")[2] for path in sources()} - {""}
    folders -= {f"workbench/lessons/{name}" for name in LESSONS}
    rooms = {
        room(path).replace(".", "/") for path in sources() if path.stem[:2] != "__"
    }
    files = {f"{name}.py" for name in rooms if (PACKAGE / f"{name}.py").exists()}
    assert folders | files <= drawn, (
        f"CONTRIBUTING.md lacks {sorted((folders | files) - drawn)}"
    )


def test_every_room_stands_on_a_floor():
    rooms = {room(path) for path in sources()} - {
        "__init__",
        "__main__",
        "workbench.__init__",
    }
    assert rooms <= set(LAYER), f"give {sorted(rooms - set(LAYER))} a floor in FLOORS"


def test_imports_point_down():
    problems = []
    for path in [*sources(), *benchmark_sources()]:
        problems += layer_problems(path.read_text(encoding="utf-8"), module_of(path))
    assert not problems, "\n".join(problems)


def test_files_and_functions_are_short_and_documented():
    problems = []
    for path in [*sources(), *benchmark_sources()]:
        problems += size_problems(path.read_text(encoding="utf-8"), relative(path))
    assert not problems, "\n".join(problems)


def test_each_folder_has_the_nodes_of_its_row():
    found = Counter[str]()
    for path in sources():
        found[folder(path)] += count_nodes(path)
    rows = {}
    for name, count in sorted(found.items()):
        bound = NODES.get(name, 0)
        if not SLACK * bound <= count <= bound:
            rows[name] = -(-count // 50) * 50
    table = "\n".join(f'    "{name}": {bound:_},' for name, bound in rows.items())
    assert not rows, (
        "the size of these folders is not that of NODES. Delete, or write these rows there; "
        f"add a reason to a row that rises:\n{table}"
    )
    assert NODES.keys() == found.keys(), f"no such folder: {NODES.keys() - found}"
    total = sum(NODES.values())
    assert total <= MOST_NODES, f"NODES allows {total:,} in all: lower some"


def test_the_benchmarks_are_within_their_bound():
    assert sum(map(count_nodes, benchmark_sources())) <= MOST_BENCHMARK_NODES


COUNT_MODULES = """
import importlib, os, sys
import lhotse, matplotlib.pyplot, numba, pandas, torch  # once for all lessons, which share nothing else
for lesson in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(lesson)
        print(lesson, sum(name.split(".")[0] == "asrkit" for name in sys.modules), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, lesson
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_importing_a_lesson_loads_few_modules():
    lessons = sorted(
        module_of(path).removesuffix(".__init__")
        for path in (PACKAGE / WORKBENCH / "lessons").rglob("*.py")
    )
    assert "asrkit.workbench.lessons.loss_kernels" in lessons
    command = [sys.executable, "-c", COUNT_MODULES, *lessons]
    done = subprocess.run(command, capture_output=True, text=True)
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert [*counts] == lessons, done.stderr
    for lesson, count in counts.items():
        more = lesson.rpartition(".")[2] in TRANSCRIBES
        most = MORE_MODULES if more else LESSON_MODULES
        assert int(count) <= most, f"{lesson}: {count}"


def test_the_gpl_program_imports_nothing_of_asrkit():
    path = ROOT / SEPARATE
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: GPL-3.0-or-later")
    assert not [
        name
        for name, *_ in imported(text, "espeak_worker")
        if name.split(".")[0] == "asrkit"
    ]
    assert (
        SEPARATE in (ROOT / "NOTICE").read_text()
        and (ROOT / "LICENSES/GPL-3.0-or-later.txt").exists()
    )


def requirements(*lines: str) -> set[str]:
    """Canonical names of the requirements in `lines` and of all their dependencies, as installed."""
    seen: set[tuple[str, str]] = set()
    todo = [*map(Requirement, lines)]
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        for extra in {"", *need.extras} - {
            extra for known, extra in seen if known == name
        }:
            seen.add((name, extra))
            below = map(Requirement, importlib.metadata.requires(name) or ())
            todo += [
                r
                for r in below
                if r.marker is None or r.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in seen}


BARE_IMPORT = """
import sys, threading, os
blocked = set(sys.argv[1].split(","))
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked: raise ModuleNotFoundError(f"No module named {name!r} on this bare machine")
sys.meta_path.insert(0, Absent())
import importlib, torch
for name in sys.argv[4].split(","): importlib.import_module(name)
for name in sys.argv[3].split(","): sys.modules[name] = None
for name in {"getloadavg", "sched_getaffinity", "getuid", "register_at_fork"} & {*dir(os)}: delattr(os, name)
def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    return (threading.active_count(), tasks, torch.get_num_threads(), torch.get_num_interop_threads(),
            torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.cuda.is_initialized(),
            torch.initial_seed(), torch.get_float32_matmul_precision(), dict(os.environ))
before = state()
def watch(event, args):
    if event in {"subprocess.Popen", "socket.connect", "os.mkdir", "os.rename"}:
        print("probe:", event, args[:2], flush=True)
        os._exit(3)
sys.addaudithook(watch)
sys.dont_write_bytecode = True
for name in sys.argv[2].split(","): importlib.import_module(name)
assert state() == before, (before, state())
"""


NEEDED = ("torch", "numpy", "numba")  # torchaudio where it is used; lhotse looks for it


@pytest.mark.parametrize(
    ("rooms", "packages"),
    [
        (
            BARE | {"training", "benchmarks"},
            NEEDED,
        ),  # the suite `training` measures steps on a bare machine too
        (
            LIBRARY - BARE,
            (*NEEDED, "torchaudio", "urllib3", "lhotse", "soundfile", "tqdm"),
        ),
    ],
    ids=["bare", "data"],
)
def test_importing_asrkit_decides_nothing_and_needs_few_packages_and_no_posix(
    rooms, packages
):
    allowed = requirements(*packages, *KERNELS)
    owners = importlib.metadata.packages_distributions()
    blocked = {
        top
        for top, names in owners.items()
        if not {canonicalize_name(n) for n in names} & allowed
    } - {"asrkit", "benchmarks"}
    assert {"jiwer", "matplotlib", "sentencepiece"} <= blocked
    modules = ["asrkit"]
    for path in [*sources(), *benchmark_sources()]:
        dotted = module_of(path).removesuffix(".__init__")
        place = "benchmarks" if dotted.startswith("benchmarks") else room(path)
        waits = path.stem in (
            "numba_cpu",
            "numba_cuda",
            "triton",
            "espeak_worker",
        )  # for an `impl` that names them; kernels make a cache folder
        if place in rooms - {"__init__", "__main__"} and not waits:
            modules.append(dotted)
    lists = [",".join(names) for names in (blocked, modules, POSIX, packages)]
    done = subprocess.run(
        [sys.executable, "-c", BARE_IMPORT, *lists],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lock_has_an_exact_pin_of_each_package_that_is_needed_and_of_no_other():
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = whole["project"]
    declared = [*project["dependencies"], *whole["build-system"]["requires"]]
    for extra in EXTRAS:
        declared += project["optional-dependencies"][extra]
    pins = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; .+)?", line), line
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                pins[pin.name] = next(iter(pin.specifier)).version
    for need in map(Requirement, declared):
        version = pins.get(canonicalize_name(need.name), "none")
        assert need.specifier.contains(version), (
            f"{need}: the lock has {version}; `make lock`"
        )
    # of two versions on the path the first counts: setuptools appends its own copies
    found = reversed([*importlib.metadata.distributions()])
    installed = {canonicalize_name(one.name): one.version for one in found}
    if pins.items() <= installed.items():
        assert pins.keys() == requirements(*declared)
    else:
        pytest.skip("packages here are not the lock's; `make test` has them all")


def test_the_conda_environment_and_the_commands_of_ci_are_those_of_the_makefile():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["dependencies"][-1] == {"pip": ["-r requirements.lock", "-e ."]}
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-4:] == [
        "make check",
        "make peers",
        "make test",
        "make test-live",
    ]
    assert "\n      - run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.mark.parametrize(
    "reason, passes",
    [("needs a CPU with AVX2", True), ("needs Ray: make peers", False)],
)
def test_ci_fails_for_a_skip_that_can_be_mended(
    pytestconfig, monkeypatch, reason, passes
):
    conftest = str(ROOT / "tests/conftest.py")
    monkeypatch.setenv("FAIL_ON_SKIP", "1")
    found = pytestconfig.pluginmanager.get_plugin(conftest).avoidable([reason])
    assert found == ([] if passes else [reason])


def test_no_file_names_a_path_of_somebodys_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout: which files are the project's is not known")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except UnicodeDecodeError:
            continue  # a picture or a compressed table
        found += [f"{name}: {bad}" for bad in FORBIDDEN if bad in text]
    assert found == []
