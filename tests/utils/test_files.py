# SPDX-License-Identifier: Apache-2.0
"""Files and folders appear complete or not at all, and leftovers of killed processes are removed."""

import contextlib
import multiprocessing
import os

import pytest

from carryforward.utils import files
from carryforward.utils.locks import LOCK

pytestmark = pytest.mark.usefixtures("fsync")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_or_stays(tmp_path):
    path = tmp_path / "result.json"
    files.write_json(path, {"a": "\ud800ä"})
    assert path.read_bytes() == b'{\n "a": "\\ud800\\u00e4"\n}\n'
    with contextlib.suppress(RuntimeError), files.atomic_write(path) as temporary:
        temporary.write_text("half")
        assert temporary.suffix == ".json"
        raise RuntimeError
    assert path.read_bytes().startswith(b"{")
    files.write_text(path, "a\r\n\n")
    assert path.read_bytes() == b"a\r\n\n"
    assert names(tmp_path) == ["result.json"]


def test_a_new_folder_appears_complete(tmp_path):
    target = tmp_path / "parent" / "model"
    with files.atomic_folder(target) as staging:
        (staging / "config.json").write_text("{}")
        assert not target.exists()
    assert names(target) == ["config.json"]
    with pytest.raises(RuntimeError), files.atomic_folder(tmp_path / "other") as staging:
        raise RuntimeError
    assert names(tmp_path) == ["parent"]
    assert names(tmp_path / "parent") == ["model"]


def test_in_an_existing_folder_the_config_is_replaced_last(tmp_path, monkeypatch):
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.fp16.safetensors", "notes.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "old").write_text("old")
    replaced, replace = [], os.replace
    monkeypatch.setattr(files.os, "replace", lambda new, path: (replaced.append(path.name), replace(new, path)))
    with files.atomic_folder(tmp_path) as staging:
        for name in ("config.json", "model.safetensors", "vocab.txt"):
            (staging / name).write_text("new")
        (staging / "templates").mkdir()
    assert replaced == ["model.safetensors", "templates", "vocab.txt", "config.json"]
    assert names(tmp_path) == [
        "config.json", "model.fp16.safetensors", "model.safetensors", "notes.txt", "templates", "vocab.txt"
    ]  # fmt: skip
    assert names(tmp_path / "templates") == []


@pytest.mark.parametrize("name", ["model", "model [1]*"])
def test_temporary_folders_of_killed_processes_are_deleted(tmp_path, name):
    left, deleted, other, foreign = (
        tmp_path / leftover
        for leftover in (f".{name}.0123abcd.tmp", f".{name}.0123abce.deleted", ".other.0123abcf.tmp", f".{name}.x.tmp")
    )
    for folder in (left, deleted, other, foreign):
        (folder / "sub").mkdir(parents=True)
    with files.staging_folder(tmp_path, name) as in_use:
        with files.atomic_folder(tmp_path / name) as staging:
            (staging / "a").write_text("a")
        assert in_use.exists()
        assert names(tmp_path) == sorted([in_use.parent.name, other.name, foreign.name, name])
    files.clear_leftovers(tmp_path)
    assert names(tmp_path) == sorted([foreign.name, name])


def test_a_folder_is_replaced_and_an_interrupted_deletion_is_finished(tmp_path, monkeypatch):
    new, folder = tmp_path / "new", tmp_path / "checkpoint-1"
    for path, text in ((new, "new"), (folder, "old")):
        path.mkdir()
        (path / "a").write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda path, **kwargs: None)  # killed before anything is deleted
        files.replace_folder(new, folder)
    assert (folder / "a").read_text() == "new"
    assert len(names(tmp_path)) == 2
    files.clear_leftovers(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]


class Killed(BaseException):
    """Stands for the end of the process: no clean-up follows."""


@pytest.mark.parametrize("moves", range(10))
def test_a_model_is_replaced_whole_however_often_that_is_interrupted(tmp_path, monkeypatch, moves):
    """Files of two models are never found together with a config.json; the replacement is finished later."""
    folder = tmp_path / "model"
    old = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "mine.txt")
    new = ("config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "vocab.txt")
    _write(folder, old, "old")
    with monkeypatch.context() as patch:
        _die_after(patch, moves)
        with contextlib.suppress(Killed):
            with files.atomic_folder(folder) as staging:
                _write(staging, new, "new")
            assert moves == 9, "it was not interrupted"
    if (folder / "config.json").exists():
        content = {path.read_text() for path in folder.glob("[!.]*") if path.name != "mine.txt"}
        assert content in ({"old"}, {"new"})
    with monkeypatch.context() as patch:
        _die_after(patch, 1)
        with contextlib.suppress(Killed):
            files.finish_replacement(folder)
    files.finish_replacement(folder)
    files.clear_leftovers(folder)
    with files.lock_output(folder / files._MOVING, folder):
        pass  # as the next save does: the lock's file is taken over, and removed
    expected = old if moves == 0 else sorted([*new, "mine.txt"])
    assert names(folder) == sorted(expected)
    assert len({path.read_text() for path in folder.iterdir() if path.name != "mine.txt"}) == 1


def _write(folder, file_names, text):
    folder.mkdir(exist_ok=True)
    for name in file_names:
        (folder / name).write_text(text)


def _die_after(patch, operations):
    """Let so many renames and deletions of files be done; nothing is cleaned up at the next one."""
    count = 0

    def counted(function):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count > operations:
                raise Killed
            return function(*args, **kwargs)

        return run

    patch.setattr(files.os, "replace", counted(os.replace))
    patch.setattr(files.Path, "rename", counted(files.Path.rename))
    patch.setattr(files.Path, "unlink", counted(files.Path.unlink))
    patch.setattr(files.shutil, "rmtree", lambda path, **kwargs: None)


def test_files_are_synced_before_and_folders_after_a_rename(tmp_path, monkeypatch):
    calls, sync, replace = [], files._sync, os.replace
    monkeypatch.setattr(files, "_sync", lambda path: (calls.append(("sync", path.name)), sync(path)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (calls.append(("rename", b.name)), replace(a, b)))
    with files.atomic_folder(tmp_path / "model") as staging:
        (staging / "a").write_text("a")
    files.write_text(tmp_path / "b", "b")
    assert calls == [
        ("sync", "a"), ("sync", "model"), ("rename", "model"), ("sync", tmp_path.name),
        ("sync", "b"), ("rename", "b"), ("sync", tmp_path.name),
    ]  # fmt: skip


def test_a_folder_is_vacant_if_it_holds_nothing_but_leftovers(tmp_path):
    for name in (".run.json.0123abcd.tmp/run.json", ".saving/checkpoint-1/model.safetensors", f"search/trial-1/{LOCK}"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    assert files.is_vacant(tmp_path)
    (tmp_path / "search" / "notes.txt").write_text("mine")
    assert not files.is_vacant(tmp_path)


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127])
def test_the_longest_names_can_be_written(tmp_path, name):
    files.write_text(tmp_path / name, "text")
    assert names(tmp_path) == [name]


def test_a_link_to_a_folder_is_deleted_and_not_what_is_in_it(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    files.delete_folder(tmp_path / "checkpoint-1")
    assert names(tmp_path) == ["elsewhere"]
    assert names(tmp_path / "elsewhere") == ["file"]


def test_two_that_save_to_one_folder_take_turns(tmp_path, monkeypatch):
    """The second one's files are moved after the first one's, config.json included."""
    folder, move, other = tmp_path / "model", files._move_into_place, []
    _write(folder, ("config.json", "model.safetensors"), "old")

    def save(text):
        with files.atomic_folder(folder) as staging:
            _write(staging, ("config.json", "model.safetensors"), text)

    def interrupted(ready, target):
        if not other:
            other.append(multiprocessing.get_context("fork").Process(target=save, args=("second",)))
            other[0].start()
            other[0].join(0.5)
            assert other[0].is_alive(), "it did not wait"
        move(ready, target)

    monkeypatch.setattr(files, "_move_into_place", interrupted)
    save("first")
    other[0].join(30)
    assert {path.read_text() for path in folder.iterdir()} == {"second"}


def test_sealed_json_tells_of_damage(tmp_path):
    path = tmp_path / "run.json"
    files.write_sealed_json(path, {"a": 1.5, "b": ["ä"]})
    assert files.read_sealed_json(path) == {"a": 1.5, "b": ["ä"]}
    intact = path.read_bytes()
    for damaged in (intact.replace(b"1.5", b"1.7"), intact[:-5], b"", b"[]", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run.json is (damaged|not valid JSON|not UTF-8)"):
            files.read_sealed_json(path)
