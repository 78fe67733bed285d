"""The report and papermill by hand where people run them: odd paths and locales, users without a name, settings of their own, folders that cannot be written."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from asrkit.cli import main
from asrkit.cli.report import parse_value
from asrkit.files import HERE
from asrkit.workbench.report import jobs_of

ROOT = HERE.parent
NOTEBOOK = [
    """\
import os
import torch
from asrkit.losses import rnnt_loss
from asrkit.memory import peak_memory
from asrkit.workbench import plots""",
    "steps: int = 2",
    """\
logits = torch.zeros(1, 4, 3, 5, requires_grad=True)
sizes = (torch.ones(1, 2, dtype=torch.int64), torch.tensor([4]), torch.tensor([2]))
rnnt_loss(logits, *sizes)  # compiled by Numba
torch.optim.Adam([logits]).zero_grad()  # loads torch's compiler
peak_memory(lambda: torch.zeros(10))
steps
len(os.sched_getaffinity(0))""",
    """\
figure, ax = plots.canvas("ü")
ax.plot([1, 2], [3, 4])
ax.annotate("there", (1, 3))
plots.show(figure, "A line that climbs from three to four")""",
]
READ_ONLY = (
    'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$PWD" && exec "$@"'
)
FULL = (
    'mount -t tmpfs -o size=1m none "$0" && export TMPDIR="$0" && '
    '{ head -c 2M /dev/zero > "$0/filled" 2> /dev/null; exec "$@"; }'
)
MOUNTS = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
NAMELESS = ["unshare", "--user", "--map-user=12345"]


def needs(command):
    """Skip where a command that starts another one does not work."""
    if not shutil.which(command[0]):
        pytest.skip(f"needs a namespace: no {command[0]}")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs a namespace: {' '.join(tried.stderr.split())}")


# Name -> a function of an empty folder that returns the command, its variables and the checkout.
def an_odd_path(folder):
    checkout = folder / "Ärger mit Räumen {1}"
    for name in ("asrkit", "data"):
        shutil.copytree(ROOT / name, checkout / name)
    return [], {}, checkout


def a_locale_of_ascii(_):
    return [], {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}, ROOT


def a_read_only_checkout(_):
    return [*MOUNTS, READ_ONLY, str(ROOT)], {}, ROOT


def no_folder_for_numba(_):
    return [*MOUNTS, READ_ONLY, str(ROOT)], {"XDG_CACHE_HOME": "/dev/null/none"}, ROOT


def a_full_tmpdir(folder):
    return [*MOUNTS, FULL, str(folder)], {}, ROOT


def a_read_only_tmp(folder):
    return [*MOUNTS, READ_ONLY, "/tmp"], {"TMPDIR": str(folder)}, ROOT


def no_name_and_no_home(_):
    return NAMELESS, {"HOME": None, "USER": None, "LOGNAME": None}, ROOT


def no_name_and_a_read_only_home(folder):
    folder.chmod(0o555)
    return NAMELESS, {"HOME": str(folder), "USER": None, "LOGNAME": None}, ROOT


def one_core(_):
    return ["taskset", "-c", str(min(os.sched_getaffinity(0)))], {}, ROOT


def settings_of_ones_own(folder):
    return [], hostile_settings(folder), ROOT


def hostile_settings(folder):
    """Variables of a user whose profile and matplotlibrc change everything."""
    profile = folder / "ipython/profile_default"
    (profile / "startup").mkdir(parents=True)
    (profile / "startup/first.py").write_text("print('profile')")
    every = "c.InteractiveShell.ast_node_interactivity = 'all'\n"
    (profile / "ipython_config.py").write_text(every)
    (folder / "startup.py").write_text("print('startup')")
    (folder / "matplotlibrc").write_text("text.usetex: True\naxes.facecolor: black\n")
    return {
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONSTARTUP": str(folder / "startup.py"),
        "MATPLOTLIBRC": str(folder / "matplotlibrc"),
    }


PLACES = {  # -> the message on stderr
    an_odd_path: "",
    a_locale_of_ascii: "",
    a_read_only_checkout: "",
    no_folder_for_numba: "NUMBA_CACHE_DIR",
    a_full_tmpdir: "",
    a_read_only_tmp: "",
    no_name_and_no_home: "",
    no_name_and_a_read_only_home: "MPLCONFIGDIR",
    one_core: "",
    settings_of_ones_own: "",
}


def write(path):
    """The notebook."""
    cells = [new_code_cell(source) for source in NOTEBOOK]
    cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def outputs(path):
    """Text on stderr of a notebook that has run, and the rest as text."""
    cells = nbformat.read(path, 4).cells
    found = [one for cell in cells for one in cell.get("outputs", [])]
    errors = "".join(one.text for one in found if one.get("name") == "stderr")
    texts = [one.data["text/plain"] for one in found if "data" in one]
    rest = "".join(one.text for one in found if one.get("name") == "stdout")
    return errors, [*texts, *filter(None, [rest])]


def start(command, variables, checkout, **how):
    """Run a command with environment variables; those that are None are removed."""
    own = {
        "PYTEST_CURRENT_TEST": None,  # hides what libraries print from ipykernel
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(checkout),
        **variables,
    }
    env = {
        name: value for name, value in (os.environ | own).items() if value is not None
    }
    return subprocess.run(command, env=env, capture_output=True, text=True, **how)


@pytest.fixture
def elsewhere():
    """An empty folder outside /tmp."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.live
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_report_runs_anywhere_or_says_what_it_lacks(place, tmp_path, elsewhere):
    (folder := elsewhere / "place").mkdir()
    before, variables, checkout = place(folder)
    if before:
        needs(before)
    there = elsewhere if checkout == ROOT else checkout
    notebook, out = write(there / "mine.ipynb"), there / "reports"
    command = [*before, sys.executable, "-m", "asrkit", "report", str(notebook)]
    done = start(
        [*command, "--out", str(out), "--no-progress"],
        {"ASRKIT_HOME": str(tmp_path), **variables},
        checkout,
        cwd=checkout,
    )
    assert (done.returncode, done.stderr) == (0, "")
    errors, rest = outputs(out / "latest/runs/mine.ipynb")
    cores = 1 if place is one_core else len(os.sched_getaffinity(0))
    assert rest == [str(cores), "A line that climbs from three to four"]
    lacks = PLACES[place]
    assert lacks in errors and bool(lacks) == bool(errors)
    folder.chmod(0o755)


@pytest.mark.live
def test_papermill_by_hand_runs_a_notebook_from_anywhere_to_anywhere(tmp_path):
    settings = hostile_settings(tmp_path) | {"IPYTHONDIR": str(tmp_path / "none")}
    asked = ["-p", "repeats", "3", "-p", "nothing", "1"]
    done, out = papermill("07_cuda_graphs", tmp_path, asked, settings)
    assert done.returncode == 0
    assert "Passed unknown parameter: nothing" in done.stderr
    errors, rest = outputs(out)
    assert errors == "" and any("launches" in text for text in rest)


@pytest.mark.live
def test_papermill_by_hand_with_a_wrong_type_ends_with_one_line(tmp_path):
    done, _ = papermill("07_cuda_graphs", tmp_path, ["-p", "repeats", "three"], {})
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ValueError: repeats: expected a whole number in")
    assert last.endswith("got 'three'.")


def papermill(name, folder, asked, variables):
    """Run a notebook of the series by papermill's own command, in another folder."""
    (folder / "there").mkdir()
    out = folder / "there/out.ipynb"
    command = [sys.executable, "-m", "papermill", str(ROOT / f"notebooks/{name}.ipynb")]
    settings = {"ASRKIT_HOME": str(folder / "home"), **variables}
    return start([*command, str(out), *asked], settings, ROOT, cwd=folder), out


def test_a_user_without_a_name_gets_one_and_a_home():
    needs(NAMELESS)
    code = "import asrkit, getpass, os; print(getpass.getuser(), os.environ['HOME'])"
    before, variables, checkout = no_name_and_no_home(None)
    done = start([*before, sys.executable, "-c", code], variables, checkout)
    assert done.stdout == "uid12345 /\n"


@pytest.mark.parametrize(("typed", "message"), [
    ("seconds three", "parameters: expected float as seconds of mine.ipynb, got 'three'."),
    ("seconds True", "parameters: expected float as seconds of mine.ipynb, got True."),
    ("count 2.5", "parameters: expected int as count of mine.ipynb, got 2.5."),
    ("count None", "parameters: expected int as count of mine.ipynb, got None."),
    ("number x", "parameters: expected float as number of mine.ipynb, got 'x'."),
    ("flag 0", "parameters: expected bool as flag of mine.ipynb, got 0."),
    ("day 2024", "parameters: expected str as day of mine.ipynb, got 2024."),
    ("name 1", "parameters: expected str as name of mine.ipynb, got 1."),
    ("limit [1]", "parameters: expected int | None as limit of mine.ipynb, got [1]."),
    ("sizes 3", "parameters: expected list as sizes of mine.ipynb, got 3."),
    ("nothing 1", "parameters: expected one of ['count', 'day', 'flag', 'free', 'limit', 'name', 'number', 'seconds', 'sizes'], got ['nothing']."),
])  # fmt: skip
def test_a_parameter_of_another_type_is_one_line(typed, message, declares, capsys):
    assert main(["report", declares, "-p", *typed.split()]) == 2
    assert capsys.readouterr().err.strip() == f"asrkit report: {message}"


@pytest.mark.parametrize(("typed", "value"), [
    ("seconds 3", 3),
    ("seconds 1e-3", 0.001),
    ("count 7", 7),
    ("number .5", 0.5),
    ("flag False", False),
    ("flag true", True),
    ("day \"2024\"", "2024"),
    ("limit None", None),
    ("limit 3", 3),
    ("sizes [3]", [3]),
    ("free [1]", [1]),
])  # fmt: skip
def test_a_parameter_of_its_type_is_taken(typed, value, declares):
    name, text = typed.split()
    (job,) = jobs_of([Path(declares)], {name: parse_value(text)})
    assert repr(job.parameters) == repr({name: value})


@pytest.fixture
def declares(tmp_path, monkeypatch):
    """A notebook with parameters of every type, with and without annotations."""
    monkeypatch.chdir(tmp_path)
    cell = new_code_cell(
        "seconds: float = 3.0  # of each\ncount: int = 2\nnumber = 4\nflag = False\n"
        "day: 'str' = '2024-09-21'\nname = 'a # b'\nlimit: int | None = None\n"
        "sizes = [1, 2]\nfree = None"
    )
    cell.metadata["tags"] = ["parameters"]
    nbformat.write(new_notebook(cells=[cell]), "mine.ipynb")
    return "mine.ipynb"
