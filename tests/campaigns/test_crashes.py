# SPDX-License-Identifier: Apache-2.0
"""A job that is killed at any file operation, or loses power there, ends as if it had never been stopped.

The fast form tries some operations of each job; the full form (CARRYFORWARD_CAMPAIGNS=all) tries all of them in all
ways, and pairs of crashes.
"""

import random

import numpy as np
import pytest
from helpers import campaigns, crash
from helpers.jobs import DIFFERENT

FAST = 6  # operations of each job
PAIRS = 60


def crash_points(reference):
    """The number of an operation (one more than all: after the end) and what happens before it."""
    last = len(reference.log) + 1
    if campaigns.full():
        return campaigns.thin([(at, how) for at in range(1, last + 1) for how in crash.CRASHES])
    numbers = np.linspace(1, last, FAST).astype(int)
    hows = [*crash.CRASHES] * FAST
    return [*zip(map(int, numbers), hows, strict=False), (last, "power cut")]


def problem_after(reference, *points):
    """Crash at these points, one after the other, and finish. Returns what is wrong, or nothing."""
    job = reference.job
    job.clear()
    for at, how in points:
        result = crash.run(job, reference.operations(at, crash.CRASHES[how]))
        if result.code == 0:
            break  # it had fewer operations left
        if result.code > 0:
            return str(result)
        announced = crash.run(job.load_announced)
        if announced.code:
            return f"what was announced cannot be loaded: {announced}"
        if at > len(reference.log) and job.out.name != "cache" and (lost := reference.differences()):
            return f"finished, and then: {lost}"
    return reference.finish()


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_crash_at_any_file_operation_loses_nothing(reference, name, report):
    of, problems = reference(name), []
    points = crash_points(of)
    for at, how in points:
        if problem := problem_after(of, (at, how)):
            operation = of.log[at - 1] if at <= len(of.log) else "the end"
            problems.append(f"{how} before {at}, {operation}: {problem}")
    report(problems, len(points))


@pytest.mark.parametrize("name", ["train", "search", "qa train", "embed npy"])
def test_two_crashes_lose_nothing(reference, name, report):
    of, problems = reference(name), []
    choose = random.Random(name)
    count = PAIRS // 4 if campaigns.full() else 1
    for _ in range(count):
        pair = [(choose.randint(1, len(of.log)), choose.choice([*crash.CRASHES])) for _ in range(2)]
        if problem := problem_after(of, *pair):
            problems.append(f"{pair}: {problem}")
    report(problems, count)
