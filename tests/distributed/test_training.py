# SPDX-License-Identifier: Apache-2.0
"""train and qa train in two processes: the first one prints, and an error is told once, whichever process has it."""

import pytest
from helpers import crash, jobs, launcher

SECOND = 1  # the rank that alone has an error


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return jobs.prepare(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("name", ["train", "qa train"])
def test_an_error_is_told_once(home, tmp_path, name):
    """By all processes at once, and by one that is not the first. Then the same command trains."""
    job = jobs.JOBS[name](home, tmp_path / "work")
    job.clear()
    everywhere = launcher.launch(lambda: job("--window", 1000))
    full = crash.Operations(job.folder, 1, crash.fail_with(28))  # no space left, for the second process only
    one = launcher.launch(job, operations={SECOND: full})
    for results, message in ((everywhere, "window=1000"), (one, "disk is full")):
        text = "".join(result.output for result in results)
        assert all(result.code for result in results), text
        assert " ".join(text.split()).count(message) == 1, text
        assert text.count("error: ") == 1, text
        assert not any(result.unforeseen for result in results), text
    assert "disk is full" in one[SECOND].output
    first, second = launcher.launch(job)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert f"{job.out}: " in first.output, "the summary"
    assert str(job.out) not in second.output
