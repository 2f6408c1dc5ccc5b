# SPDX-License-Identifier: Apache-2.0
"""Two processes on one output: the second is refused while the first is at work, and nothing is mixed."""

import pytest
from helpers import campaigns, crash

# a job, the part of a path that it uses while it works, and options that make its output another one
WORK = {
    "train": ("checkpoint-", ["--seed", 1]),
    "qa train": ("checkpoint-", ["--seed", 1]),
    "embed parquet": ("part-", ["--overlap", 1]),
    "embed npy": ("part-", ["--overlap", 1]),
}


def held_points(of, part):
    """Operations at which the first process is held: the first and the last one on its work, or all."""
    numbers = of.numbers(part)
    return campaigns.thin(numbers) if campaigns.full() else [numbers[0], numbers[-1]]


def hold(of, at):
    """Start the job and hold it before an operation."""
    of.job.clear()
    gate = crash.Gate()
    first = crash.Child(of.job, of.operations(at, gate))
    gate.wait()
    return first, gate


def assert_refused(result, out, same):
    """By the lock or, if its settings are not those of the first process, for that."""
    message = " ".join(result.output.split())
    assert result.code == 2, result
    assert str(out) in message
    assert "another process" in message or ("other settings" in message and not same), message
    assert not result.unforeseen


@pytest.mark.parametrize("name", WORK)
def test_the_second_is_refused_and_the_first_ends_as_if_alone(reference, name):
    of = reference(name)
    part, other = WORK[name]
    for number, at in enumerate(held_points(of, part)):
        options = other if number % 2 else []
        first, gate = hold(of, at)
        second = crash.run(lambda more=options: of.job(*more))
        gate.open()
        done = first.wait()
        assert_refused(second, of.job.out, same=not options)
        assert done.code == 0, done
        assert not of.differences()


@pytest.mark.parametrize("name", WORK)
def test_the_lock_dies_with_its_process(reference, name):
    of = reference(name)
    for at in held_points(of, WORK[name][0])[-1:]:
        first, _ = hold(of, at)
        first.kill()
        assert first.wait().code < 0
        assert not of.finish()


def test_of_two_that_add_to_one_folder_one_does_it(reference):
    of = reference("add")
    numbers = of.numbers("added")
    for at in campaigns.thin(numbers) if campaigns.full() else (numbers[0], numbers[-1]):
        first, gate = hold(of, at)
        second = crash.run(of.job)
        gate.open()
        results = [first.wait(), second]
        assert sorted(result.code for result in results) == [0, 2], [str(result) for result in results]
        assert not any(result.unforeseen for result in results)
        assert not of.differences()


@pytest.mark.parametrize("name", ["state", "tokenise"])
def test_two_that_write_the_same_both_succeed(reference, name):
    of = reference(name)
    for at in range(1, len(of.log) + 1):
        first, gate = hold(of, at)
        second = crash.run(of.job)
        gate.open()
        results = [first.wait(), second]
        assert [result.code for result in results] == [0, 0], [str(result) for result in results]
        assert not of.differences(), of.log[at - 1]
