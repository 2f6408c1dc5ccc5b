# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, over quota or read-only ends a command with one sentence, and what was saved stays whole."""

import errno
import random
import resource

import pytest
from helpers import campaigns, crash
from helpers.jobs import DIFFERENT

FAST = 3  # operations of each command
ERRORS = {"full": errno.ENOSPC, "over quota": errno.EDQUOT, "too large": errno.EFBIG, "read-only": errno.EROFS}
COMMANDS = [name for name in DIFFERENT if name not in ("state", "tokenise")]
SIZES = (0, 1_000, 4_096, 20_000, 60_000, 120_000)  # bytes that a file may have


def problem_of(of, result):
    """What is wrong with a command that could not write, or nothing. It may have had nothing more to write."""
    if result.unforeseen:
        return f"traceback: {result}"
    if result.code not in (0, 1):
        return str(result)
    if result.code == 1 and not any(line.startswith("error: ") for line in result.output.splitlines()):
        return f"no message: {result}"
    if (announced := crash.run(of.job.load_announced)).code:
        return f"what was announced cannot be loaded: {announced}"
    return of.finish()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_operation_that_fails_costs_anything(reference, name, report):
    of, problems = reference(name), []
    everything = [(at, why) for at in range(1, len(of.log) + 1) for why in ERRORS]
    points = campaigns.thin(everything) if campaigns.full() else sorted(random.Random(name).sample(everything, FAST))
    for at, why in points:
        of.job.clear()
        result = crash.run(of.job, of.operations(at, crash.fail_with(ERRORS[why])))
        if problem := problem_of(of, result):
            problems.append(f"{why} at {at}, {of.log[at - 1]}: {problem}")
    report(problems, len(points))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_limit_of_the_size_of_files_costs_anything(reference, name, report):
    """The limit meets native writers too, in the middle of a file."""
    of, problems = reference(name), []
    sizes = SIZES if campaigns.full() else random.Random(name).sample(SIZES, 1)
    for size in sizes:
        of.job.clear()

        def limited(size=size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            of.job()

        if problem := problem_of(of, crash.run(limited)):
            problems.append(f"{size} bytes: {problem}")
    report(problems, len(sizes))
