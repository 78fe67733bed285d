import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from asrkit.files import lock
from asrkit.transcribe import BeamOptions, PipelineConfig, WindowOptions
from asrkit.transcribe.bulk import Task, load_plan, plan, planning
from asrkit.transcribe.bulk.planning import PLAN
from asrkit.transcribe.bulk.tasks import as_json, from_json


@pytest.fixture
def lines(tmp_path, make_manifest):
    """A manifest of 200 recordings of 1 to 200 s, which nobody opens, and two tars."""
    rows = [{"audio": f"{n}.wav", "duration": 1.0 + n * 37 % 200} for n in range(200)]
    return make_manifest(
        tmp_path / "m.jsonl", [*rows, {"audio": "a.tar"}, {"audio": "b.tar"}]
    )


def test_a_plan_has_every_recording_once_longest_first_in_shards_of_some_hours(
    lines, task, tmp_path
):
    made = plan(lines, task, tmp_path / "out", shard_h=0.25)
    held = [made.recordings(shard) for shard in made.shards]
    plain = [[one for one in shard if not one.is_container] for shard in held]
    lengths = [one.duration_s for shard in plain for one in shard]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == 200
    ids = [one.id for shard in held for one in shard]
    assert sorted(ids) == sorted([*(f"{n}.wav" for n in range(200)), "a.tar", "b.tar"])
    assert [len(shard) for shard in held if shard[0].is_container] == [1, 1]
    assert all(sum(one.duration_s for one in shard) <= 900 for shard in plain)
    assert [shard.recordings for shard in made.shards] == [*map(len, held)]
    assert len({shard.name for shard in made.shards}) == len(made.shards) > 20


@pytest.mark.parametrize(
    ("device", "hours", "wanted_h"),
    [
        ("cpu", 400, 0.5),
        ("cuda:1", 400, 10),
        ("cpu", 5, 0.25),
        ("cpu", 0.1, 1 / 60),
        ("cpu", 1e6, 20),
    ],
)
def test_where_nobody_says_a_shard_is_minutes_of_work(device, hours, wanted_h):
    assert planning.usual_shard_h(hours * 3600, device) == pytest.approx(wanted_h)


def test_the_same_plan_is_found_again_without_a_look_at_weights_or_recordings(
    lines, task, tmp_path, monkeypatch
):
    made = plan(lines, task, tmp_path / "out", shard_h=0.25)
    for name in ("load", "_rows"):
        monkeypatch.setattr(planning, name, lambda *args: 1 / 0)
    assert plan(lines, task, tmp_path / "out") == made == load_plan(tmp_path / "out")
    other = replace(task, windows=replace(task.windows, batch_s=9.0, readers=2))
    assert plan(lines, other, tmp_path / "out") == made  # neither changes a text


def test_a_touched_manifest_or_model_gives_the_same_plan(lines, model, tmp_path):
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(model.read_bytes())
    task = Task(model=copied)
    made = plan(lines, task, tmp_path / "out")
    for path in (lines, copied):
        os.utime(path, ns=(1, 1))
        assert plan(lines, task, tmp_path / "out") == made


def changed_manifest(lines, task):
    with lines.open("a") as file:
        file.write('{"audio": "new.wav", "duration": 3}\n')
    return task, "other recordings"


def changed_model(lines, task):
    other = bytearray(task.model.read_bytes())
    other[-1] ^= 1
    path = lines.parent / "other.safetensors"
    path.write_bytes(other)
    return replace(task, model=path), "another model"


def changed_window(lines, task):
    windows = replace(task.windows, window_s=20.0)
    return replace(task, windows=windows), "other settings"


def changed_beam(lines, task):
    return replace(
        task, config=PipelineConfig(search=BeamOptions(beam=2))
    ), "other settings"


@pytest.mark.parametrize(
    "change", [changed_manifest, changed_model, changed_window, changed_beam]
)
def test_another_plan_in_the_same_folder_is_refused_and_changes_nothing(
    change, lines, task, tmp_path
):
    made = plan(lines, task, tmp_path / "out")
    other, said = change(lines, task)
    with pytest.raises(
        ValueError, match=f"^out: .* was begun with .*{said}.* Name another folder"
    ) as error:
        plan(lines, other, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert load_plan(tmp_path / "out") == made
    assert made.recordings(made.shards[-1])


def test_names_of_shards_depend_on_model_settings_and_recordings(lines, task, tmp_path):
    def names(task, out):
        return {
            shard.name
            for shard in plan(lines, task, tmp_path / out, shard_h=0.25).shards
        }

    first = names(task, "a")
    assert names(task, "b") == first
    assert not names(changed_window(lines, task)[0], "c") & first
    before = len(first)
    changed_manifest(lines, task)
    assert 0 < len(names(task, "d") & first) < before + 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [{"audio": "a.wav"}, {"audio": "a.wav"}],
            "files: expected ids that are all different, got 'a.wav' twice.",
        ),
        ([], "files: expected at least one recording, got none in"),
    ],
)
def test_a_manifest_without_recordings_or_with_ids_twice_is_one_line(
    lines, said, task, tmp_path, make_manifest
):
    with pytest.raises(ValueError) as error:
        plan(make_manifest(tmp_path / "m.jsonl", lines), task, tmp_path / "out")
    assert str(error.value).startswith(said) and not (tmp_path / "out" / PLAN).exists()


def test_wrong_arguments_and_damaged_plans_are_one_line(lines, task, tmp_path):
    for hours in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="^shard_h: expected more than 0 hours"):
            plan(lines, task, tmp_path / "out", shard_h=hours)
    with pytest.raises(ValueError, match="^out: expected a folder, got"):
        plan(lines, task, lines)
    with pytest.raises(
        ValueError, match="^files: expected a folder, a manifest .* Check the path"
    ):
        plan(tmp_path / "none", task, tmp_path / "out")
    with pytest.raises(
        ValueError, match="^out: expected a folder with a plan, got no plan.json"
    ):
        load_plan(tmp_path)
    (tmp_path / "out").mkdir(exist_ok=True)
    for text in ("{", "[]", "{}", '{"shards": [], "task": {"model": "m"}}'):
        (tmp_path / "out" / PLAN).write_text(text)
        with pytest.raises(
            ValueError, match="^out: expected a plan of asrkit, got something else"
        ):
            load_plan(tmp_path / "out")
    with pytest.raises(ValueError, match="^dtype: expected one of float32"):
        Task(model=Path("m"), dtype="int8")


def test_a_file_of_shards_that_somebody_changed_is_one_line(lines, task, tmp_path):
    made = plan(lines, task, tmp_path / "out", shard_h=0.25)
    file = tmp_path / "out" / planning.SHARDS
    first = file.read_bytes().splitlines(keepends=True)[0]
    for data in (
        b"",
        first[:99],
        b"[]\n",
        b'{"name": "other"}\n',
        first.replace(b'","', b'",7]'),
    ):
        file.write_bytes(data)
        with pytest.raises(
            ValueError, match="^out: expected a plan of asrkit, got .*plan.shards"
        ):
            made.recordings(made.shards[0])
    file.write_bytes(first)
    assert len(made.recordings(made.shards[0])) == made.shards[0].recordings


def test_who_plans_waits_for_the_one_who_plans_already(lines, task, tmp_path):
    out = tmp_path / "out"
    second = threading.Thread(target=plan, args=(lines, task, out))
    with lock(out / planning.WORK / "plan"):
        second.start()
        second.join(1.0)
        assert second.is_alive() and not (out / PLAN).exists()
    second.join()
    assert load_plan(out).recordings(load_plan(out).shards[0])


@pytest.mark.parametrize(
    "task",
    [
        Task(model=Path("m")),
        Task(model=Path("m"), dtype="bfloat16", context=(70, 2), windows=WindowOptions(window_s=9.0, timestamps=True),
             config=PipelineConfig(search=BeamOptions(beam=3))),
    ],
)  # fmt: skip
def test_a_task_is_the_same_after_json(task):
    assert from_json(Task, json.loads(json.dumps(as_json(task)))) == task
    search = BeamOptions(lm=Path("words.arpa"))
    assert from_json(BeamOptions, json.loads(json.dumps(as_json(search)))) == search


def test_a_plan_names_its_files_for_processes_in_any_folder(
    lines, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(model.parent)
    (tmp_path / "words.arpa").touch()
    search = BeamOptions(lm=Path(os.path.relpath(tmp_path / "words.arpa")))
    task = Task(model=Path(model.name), config=PipelineConfig(search=search))
    made = plan(lines, task, tmp_path / "out")
    assert made.task.model == model and made.task.config.search.lm.is_absolute()
    assert plan(lines, task, tmp_path / "out") == made
