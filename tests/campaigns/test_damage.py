# SPDX-License-Identifier: Apache-2.0
"""Damage that keeps a file's size is noticed: what is damaged is passed over or made anew, or refused by name."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import campaigns, crash

from carryforward.state import State


def flip(place):
    """Flip a bit at a place between 0 and 1."""

    def damage(path):
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return damage


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


ALL = {"first bit": flip(0.02), "a bit": flip(0.5), "last bit": flip(0.98), "zeros": zero}


def damages(number):
    """Kinds of damage to a file: all of them, or one that depends on the file's number."""
    return ALL.items() if campaigns.full() else [[*ALL.items()][number % len(ALL)]]


class Stopped:
    """A job that was stopped before an operation; `restore` brings back what it left."""

    def __init__(self, of, at, store: Path):
        self.of, self.store = of, store / "stopped"
        of.job.clear()
        assert crash.run(of.job, of.operations(at, crash.kill)).code < 0
        shutil.copytree(of.job.folder, self.store)

    def restore(self):
        shutil.rmtree(self.of.job.folder)
        shutil.copytree(self.store, self.of.job.folder)

    def problem_after(self, change, path, best=False, passed_over=False):
        """Damage a file and run the job again. Returns what is wrong, or nothing.

        Args:
            best: the file is of the best checkpoint; without that the result is another one, which must be said.
            passed_over: the file is of the checkpoint to resume from, which must be named.
        """
        self.restore()
        change(path)
        result = crash.run(self.of.job)
        lines = [line for line in result.output.splitlines() if "resuming from" not in line]
        named = any(path.name in line or path.parent.name in line for line in lines)
        if result.unforeseen or result.code not in (0, 2):
            return str(result)
        if not named and (result.code == 2 or passed_over):
            return f"not named: {result}"
        return "" if result.code == 2 or (best and named) else self.of.differences()

    def problems(self, files, **kind_of_file):
        """Damage each file in some way or in all of them."""
        found = []
        for number, path in enumerate(files):
            for kind, change in damages(number):
                if problem := self.problem_after(change, path, **kind_of_file):
                    found.append(f"{path.parent.name}/{path.name}, {kind}: {problem}")
        return found


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def renames(of, part):
    """The operations that give a file or folder its final name."""
    names = [(i, line.partition(" ")[2]) for i, line in enumerate(of.log, start=1) if line.startswith("os.rename")]
    return [i for i, path in names if part in path and not re.search(r"/\.", path.removeprefix(str(of.job.folder)))]


@pytest.mark.parametrize("name", ["train", "qa train"])
def test_a_damaged_checkpoint_is_passed_over(reference, name, tmp_path, report):
    """The newest checkpoint is passed over for the one before. Without the best one the run goes on, and says so."""
    of = reference(name)
    stopped = Stopped(of, renames(of, "checkpoint-")[-1], tmp_path)
    older, newest = (files_of(folder) for folder in sorted(of.job.out.glob("checkpoint-*")))
    if not campaigns.full():
        newest, older = newest[:: 1 if name == "train" else 4], older[::4]
    else:
        newest, older = campaigns.thin(newest), campaigns.thin(older)
    sealed = [path for path in newest if path.name != "complete.json"]  # not all of its bytes matter
    problems = stopped.problems(sealed, passed_over=True)
    problems += stopped.problems([path for path in newest if path not in sealed])
    problems += stopped.problems(older, best=True)
    problems += stopped.problems([of.job.out / "run.json"])
    report(problems, len(damages(0)) * (len(newest) + len(older) + 1))


@pytest.mark.parametrize("name", ["embed npy", "embed parquet"])
def test_damaged_and_missing_parts_are_made_anew(reference, name, tmp_path, report):
    of = reference(name)
    stopped = Stopped(of, renames(of, "part-00000003.json")[-1] + 1, tmp_path)
    parts = sorted(of.job.folder.rglob("part-*"))
    assert len(parts) == 8, "four parts, of vectors and metadata"
    files, deleted = files_of(parts[0].parent), parts if campaigns.full() else parts[2:4]
    problems = stopped.problems(files)
    for path in deleted:
        if problem := stopped.problem_after(Path.unlink, path):
            problems.append(f"{path.name}, deleted: {problem}")
    report(problems, len(damages(0)) * len(files) + len(deleted))


def test_a_damaged_cache_entry_is_made_anew(reference, report):
    of = reference("tokenise")
    problems, files = [], [of.job.folder / path for path in of.contents if (of.job.folder / path).suffix]
    of.job.clear()
    tokens = crash.run(of.job).output
    for number, path in enumerate(files):
        for kind, change in damages(number):
            change(path)
            again = crash.run(of.job)
            if again.code or tokens not in again.output:
                problems.append(f"{path.name}, {kind}: {again}")
            if differences := of.differences():
                problems.append(f"{path.name}, {kind}: {differences}")
            of.job.clear()
            crash.run(of.job)
    report(problems, len(damages(0)) * len(files))


def test_a_damaged_state_is_refused_by_name(reference, report):
    of = reference("state")
    of.job.clear()
    assert crash.run(of.job).code == 0
    path, problems = of.job.out, []
    whole = path.read_bytes()
    places = campaigns.thin(range(len(whole))) if campaigns.full() else range(0, len(whole), 97)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            State.load(path)
            problems.append(f"byte {place}: loaded")
        except ValueError as error:
            if path.name not in str(error) or "\n" in str(error):
                problems.append(f"byte {place}: {error}")
        except Exception as error:
            problems.append(f"byte {place}: {type(error).__name__} {error}")
    zero(path)
    with pytest.raises(ValueError, match=path.name):
        State.load(path)
    report(problems, len(places))
