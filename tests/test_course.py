"""The series as a course: what each notebook opens with, its questions, the glossary, references.

A question is a group of cells that begins with Markdown `**Question N.**` or `**Question N (predict).**`: a blank, tagged
`exercise`; a check, tagged `exercise` and `hide-input`; and a folded solution. Blanks, checks and solutions use the notebook's
imports, its parameters and each other only, so that this file can run them. The check of a prediction comes after the
measurement, and is the one that may use it.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch

from asrkit.workbench.lessons.shared import questions

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
README = (FOLDER.parent / "README.md").read_text("utf-8")
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OPENS_WITH = ("For", "Afterwards you can", "Before it", "Time")
QUESTION = re.compile(r"\*\*Question (\d+)( \(predict\))?\.\*\*")
TERM_LINK = re.compile(r"\]\(glossary\.md#([\w-]+)\)")
SOLUTION = re.compile(
    r"<details><summary>Solution</summary>.*```python\n(.*?)```.*</details>", re.S
)


def cells_of(path):
    """The cells of a notebook as (kind, source, tags)."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [
        (cell["cell_type"], "".join(cell["source"]), cell["metadata"].get("tags", []))
        for cell in cells
    ]


def questions_of(path):
    """The questions: number, whether it asks for a prediction, blank, check, and the code of the solution."""
    found = []
    for kind, source, tags in cells_of(path):
        if kind == "markdown" and (opened := QUESTION.match(source)):
            found.append(
                {"number": int(opened[1]), "predicts": bool(opened[2])}
                | {"blank": [], "check": [], "solution": []}
            )
        if "exercise" in tags:
            found[-1]["check" if "hide-input" in tags else "blank"].append(source)
        if kind == "markdown" and source.startswith("<details><summary>Solution"):
            found[-1]["solution"] += [
                code[1] for code in [SOLUTION.search(source)] if code
            ]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_jupyterlab_folds_the_code_of_checks_which_has_the_answers(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if {"exercise", "hide-input"} <= {*cell["metadata"].get("tags", [])}:
            assert cell["metadata"]["jupyter"] == {"source_hidden": True}, cell["id"]


def run(code, names):
    """What `code` prints; it defines its names in `names`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "<cell>", "exec"), names)
    return printed.getvalue()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_its_reader_its_aim_and_its_time(path):
    _, source, _ = cells_of(path)[0]
    assert re.findall(r"^\* \*\*(.+?):?\*\*", source, re.M) == [*OPENS_WITH]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_time_of_a_notebook_is_that_of_the_readme(path):
    shown = re.search(rf"{path.name}.*?<i>(\d+ s)</i>", README)[1]
    (stated,) = re.findall(r"read, (\d+ s) to run on two", cells_of(path)[0][1])
    assert stated == shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_asks_four_to_six_questions_and_one_prediction(path):
    asked = questions_of(path)
    assert [one["number"] for one in asked] == [*range(1, len(asked) + 1)]
    assert 4 <= len(asked) <= 6 and any(one["predicts"] for one in asked)
    for one in asked:
        assert len(one["blank"]) == len(one["check"]) == len(one["solution"]) == 1, one


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_check_accepts_the_solution_and_neither_a_blank_nor_a_wrong_answer(path):
    code = [source for kind, source, _ in cells_of(path) if kind == "code"]
    names = {}
    run(code[0], names)
    run(code[1], names)
    for one in questions_of(path):
        (blank,), (check,), (solution,) = one["blank"], one["check"], one["solution"]
        before = {*names}
        run(blank, names)
        answers = {*names} - before
        assert answers, blank
        if one["predicts"]:
            run(solution, names)
            assert all(names[name] is not None for name in answers)
            continue
        assert run(check, names).startswith("Not answered yet"), check
        run(solution, names)
        assert "Right" in run(check, names), check
        for name in answers:
            for answer in wrong_answers(names[name]):
                assert "Right" not in run(check, names | {name: answer}), check


def wrong_answers(right):
    """Answers of the kind of a right one."""
    if callable(right):
        return [lambda *_, **__: 12345.678]
    return [other for other in (12345.678, "a", "b", "c") if other != right]


def test_the_glossary_is_sorted_and_every_link_to_it_names_a_term():
    terms = re.findall(r"^### (.+)$", (FOLDER / "glossary.md").read_text("utf-8"), re.M)
    assert terms == sorted(terms, key=str.lower) and len({*terms}) == len(terms)
    anchors = {term.lower().replace(" ", "-") for term in terms}
    linked = set()
    for path in NOTEBOOKS:
        named = TERM_LINK.findall(path.read_text("utf-8"))
        assert {*named} <= anchors, path.name
        assert len(named) >= 4 and len({*named}) == len(named), path.name
        linked |= {*named}
    assert anchors == linked


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_with_three_to_six_references(path):
    _, source, _ = cells_of(path)[-1]
    assert source.startswith("## References\n")
    listed = re.findall(r"^\* \[.+?\]\(https://[^)]+\)[^:]*: .+", source, re.M)
    assert 3 <= len(listed) == source.count("\n* ") <= 6


def printed(function, *arguments, **options):
    """What a check prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*arguments, **options)
    return out.getvalue().strip()


def test_checks_say_what_is_wrong():
    assert printed(questions.check, None, 3) == "Not answered yet."
    assert printed(questions.check, 3.0, 3, "It is odd.") == "Right. It is odd."
    assert printed(questions.check, 3.1, 3, within=0.1) == "Right."
    assert printed(questions.check, "a", "b", hint="Later.") == "Not yet: 'a'. Later."
    assert printed(questions.check, [1, 2], 1) == "Not yet: [1, 2]."
    assert printed(questions.check, " B", "b") == "Right."
    assert printed(questions.check, ["a"], [1.0]) == "Not yet: ['a']."

    def double(x):
        return 4 if x == 2 else None

    cases = [((2,), 4), ((3,), 6)]
    late = "Not yet: double(3) returns None, not 6."
    assert printed(questions.check_calls, double, cases) == late
    assert printed(questions.check_calls, double, cases[1:]) == "Not answered yet."
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert printed(questions.check, half, [1, 1, 1]) == "Right."
    assert (
        printed(questions.check_calls, abs, cases)
        == "Not yet: abs(2) returns 2, not 4."
    )
    assert printed(questions.check_calls, double, cases[:1]) == "Right in 1 case."


def test_a_prediction_is_printed_beside_the_measurement():
    assert (
        printed(questions.compare, None, 3.0, "ms") == "No prediction; measured: 3 ms."
    )
    expected = "Predicted: 2 ms; measured: 3 ms, 1.50 times as much."
    assert printed(questions.compare, 2, 3.0, "ms") == expected
    assert printed(questions.compare, "a", "a") == "Measured: a, as predicted."
    assert printed(questions.compare, "a", "b") == "Measured: b, predicted was a."
