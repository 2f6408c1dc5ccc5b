# SPDX-License-Identifier: Apache-2.0
"""One Ctrl-C ends a command, wherever it arrives; TERM and HUP end the step and save first."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import campaigns, crash

INTERRUPTED = 130
KILLED_BY_INTERRUPT = -signal.SIGINT  # before the command line was imported; a shell shows 130 too
ENDLESS = ["--train-tokens", 10**9, "--eval-tokens", 10**9]  # ends by a signal only
# An object that is destroyed while the model is loaded: exceptions in `__del__` are ignored, KeyboardInterrupt too.
DESTROYED = """
import signal, sys
from carryforward.cli.main import main

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        sum(range(1000))

def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("model/config.json") and objects:
        objects.pop()

objects = [Interrupted()]
sys.addaudithook(hook)
main()
"""


class InterruptAt:
    """An audit hook that sends a Ctrl-C when the n-th file is opened, whatever it is."""

    def __init__(self, number: int):
        self.number, self.count = number, 0

    def __call__(self, event, arguments):
        if event == "open":
            self.count += 1
            if self.count == self.number:
                os.kill(os.getpid(), signal.SIGINT)


def files_opened_before_training(job):
    """How many files a run opens before its first step."""
    counter = InterruptAt(-1)

    def counted():
        sys.addaudithook(counter)
        sys.addaudithook(_report_first_checkpoint)
        job()

    def _report_first_checkpoint(event, arguments):
        if event == "os.mkdir" and "checkpoint-" in str(arguments[0]):
            print(f"opened {counter.count}")
            os._exit(0)

    job.clear()
    return int(crash.run(counted).output.split()[-1])


def test_an_interrupt_while_a_run_starts_is_not_swallowed(reference, report):
    of = reference("train")
    last, choose = files_opened_before_training(of.job), random.Random(0)
    numbers = campaigns.thin(range(1, last)) if campaigns.full() else sorted(choose.sample(range(1, last), 3))
    problems = []
    for number in numbers:

        def interrupted(number=number):
            sys.addaudithook(InterruptAt(number))
            of.job()

        of.job.clear()
        result = crash.run(interrupted)
        problem = of.finish() if result.code == INTERRUPTED and not result.unforeseen else str(result)
        if problem:
            problems.append(f"file {number}: {problem}")
    report(problems, len(numbers))


def command(of, *program):
    """Start a run that does not end by itself, in a new interpreter."""
    of.job.clear()
    arguments = [*of.job.arguments(), *ENDLESS]
    environment = os.environ | {"CARRYFORWARD_CACHE": str(of.job.folder / "cache"),
                                "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    return subprocess.Popen([sys.executable, *program, *map(str, arguments)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def test_an_interrupt_inside_del_is_not_swallowed(reference):
    process = command(reference("train"), "-c", DESTROYED)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, output


@pytest.mark.parametrize("seed", range(20 if campaigns.full() else 1))
def test_an_interrupt_at_any_moment_ends_a_command(reference, seed):
    process = command(reference("train"), "-m", "carryforward")
    moment = random.Random(seed).uniform(0.3, 4)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (INTERRUPTED, KILLED_BY_INTERRUPT), output


@pytest.mark.parametrize("name", ["train", "qa train"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_in_training_ends_the_step_and_saves(reference, name, number):
    of = reference(name)
    saving = of.numbers("checkpoint-")
    saving = campaigns.thin(saving) if campaigns.full() else [saving[0]]
    for at in saving:
        of.job.clear()
        result = crash.run(of.job, of.operations(at, crash.send(number)))
        assert result.code in (INTERRUPTED, 128 + number), result
        assert "To resume, run the same command again" in " ".join(result.output.split())
        assert list(Path(of.job.out).glob("checkpoint-*/complete.json"))
        assert not of.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_while_embedding_keeps_the_parts(reference, number):
    of = reference("embed npy")
    at = of.numbers("part-00000002")[0]
    of.job.clear()
    result = crash.run(of.job, of.operations(at, crash.send(number)))
    assert result.code != 0, result
    assert not of.job.out.exists()
    assert len(list(of.job.folder.rglob("part-*.json"))) >= 2
    again = crash.run(of.job, crash.Operations(of.job.folder))
    assert again.code == 0, again
    assert not [line for line in again.log if line.startswith("open") and "part-00000000" in line], "not embedded again"
    assert not of.differences()
