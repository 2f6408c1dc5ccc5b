# SPDX-License-Identifier: Apache-2.0
"""Jobs that were never stopped, to compare with."""

import os
import sys
from functools import cache
from typing import Any, NamedTuple

import pytest
from helpers import campaigns, crash, jobs


class Reference(NamedTuple):
    """A job that was never stopped: its file operations, and the files it left."""

    job: jobs.Job
    log: list[str]
    contents: dict[str, Any]

    def operations(self, at: int, act: Any) -> crash.Operations:
        return crash.Operations(self.job.folder, at, act)

    def numbers(self, *parts: str) -> list[int]:
        """The numbers of the operations on paths that contain one of these."""
        return [i for i, line in enumerate(self.log, start=1) if any(part in line for part in parts)]

    def differences(self) -> str:
        """What the files there are now have not in common with those of the job that was never stopped."""
        now = self.job.contents()
        groups = {
            "left over": now.keys() - self.contents.keys(),
            "missing": self.contents.keys() - now.keys(),
            "different": {path for path in now.keys() & self.contents.keys() if now[path] != self.contents[path]},
        }
        return "; ".join(f"{what}: {', '.join(sorted(paths))}" for what, paths in groups.items() if paths)

    def finish(self) -> str:
        """Run the job again, after it was stopped. Returns what is wrong afterwards, or nothing."""
        again = crash.run(self.job)
        refused = self.job.out.name == "added" and again.code == 2  # `add` was done already, and is not done again
        return self.differences() if again.code == 0 or refused else str(again)


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The reference of a job, by its name."""
    if sys.platform != "linux":
        pytest.skip("the jobs are forked, and their file operations read from /proc")
    home = jobs.prepare(tmp_path_factory.mktemp("home"))

    @cache
    def reference_of(name: str, *more: Any) -> Reference:
        """Jobs that are compared have the same path: it is written to their files."""
        folder = home.parent / "jobs" / name.replace(" ", "-")
        job = jobs.JOBS[name](home, folder)
        job.clear()
        result = crash.run(lambda: job(*more), crash.Operations(folder))
        assert result.code == 0, result.output
        return Reference(job, result.log, job.contents())

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
        yield reference_of


@pytest.fixture
def report(request, capsys):
    """A function that fails if there are problems, given as lines; the full form prints how many of how many."""

    def report_problems(problems: list[str], tried: int) -> None:
        campaigns.record(request.node.name, tried, len(problems))
        if campaigns.full():
            with capsys.disabled():
                print(f"\n{request.node.name}: {tried} points, {len(problems)} lost")
        assert not problems, f"{len(problems)} of {tried}:\n" + "\n".join(problems)

    return report_problems
