# SPDX-License-Identifier: Apache-2.0
"""Files and folders appear complete or not at all, and leftovers of killed processes are removed."""

import contextlib
import os

import pytest

from carryforward.utils import files


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
    replaced, replace = [], os.replace
    monkeypatch.setattr(files.os, "replace", lambda new, path: (replaced.append(path.name), replace(new, path)))
    with files.atomic_folder(tmp_path) as staging:
        for name in ("config.json", "model.safetensors", "vocab.txt"):
            (staging / name).write_text("new")
    assert replaced == ["model.safetensors", "vocab.txt", "config.json"]
    assert names(tmp_path) == ["config.json", "model.fp16.safetensors", "model.safetensors", "notes.txt", "vocab.txt"]


@pytest.mark.parametrize("name", ["model", "model [1]*"])
def test_staging_folders_of_killed_processes_are_deleted_after_an_hour(tmp_path, name):
    recent, old, deleted, other = (
        tmp_path / leftover for leftover in (f".{name}.1.tmp", f".{name}.2.tmp", f".{name}.3.deleted", ".other.4.tmp")
    )
    for folder in (recent, old, deleted, other):
        (folder / "sub").mkdir(parents=True)
    for folder in (old, deleted, other):
        for path in (folder / "sub", folder):
            os.utime(path, (1, 1))
    with files.atomic_folder(tmp_path / name) as staging:
        (staging / "a").write_text("a")
    assert names(tmp_path) == sorted([recent.name, other.name, name])


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
    files.finish_deletions(tmp_path, "checkpoint-*")
    assert names(tmp_path) == ["checkpoint-1"]
