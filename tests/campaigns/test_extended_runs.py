# SPDX-License-Identifier: Apache-2.0
"""A finished run that is continued for longer equals a run that was begun so."""

import json
import random

import pytest
from helpers import campaigns, crash

# a job, the options of its first part and of the whole, and those of both. "train" has its best checkpoint at the
# beginning, "train to the best" at the end.
RUNS = {
    "best first": ("train", ["--train-tokens", 140], ["--train-tokens", 280], []),
    "best last": ("train to the best", ["--train-tokens", 140], ["--train-tokens", 280], []),
    "epochs": ("train by epochs", ["--epochs", 0.5], ["--epochs", 1], []),
    "more than an epoch": ("train by epochs", ["--epochs", 1], ["--epochs", 1.5], ["--eval-tokens", 200]),
    "ends between validations": ("train", ["--train-tokens", 100], ["--train-tokens", 280], ["--eval-tokens", 150]),
}
FULL = campaigns.full()


def newest_checkpoint(job):
    return max(job.out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def last_state(job):
    """The log and the best metric that the newest checkpoint holds, without times."""
    state = json.loads((newest_checkpoint(job) / "trainer_state.json").read_text())
    log = [{name: value for name, value in entry.items() if "time" not in name} for entry in state["log_history"]]
    return log, {name: state[name] for name in ("best_metric", "best_global_step", "global_step", "max_steps")}


def comparable(contents, job):
    """Without earlier checkpoints: the end of the first part has one, and they know how long their run was to be."""
    newest = newest_checkpoint(job).name
    return {
        path: value
        for path, value in contents.items()
        if ("checkpoint-" not in path or newest in path) and not path.endswith(("_args.bin", "trainer_state.json"))
    }


@pytest.mark.parametrize(
    ("name", "crashed"), [*((name, False) for name in RUNS), *((name, True) for name in RUNS if FULL or "best" in name)]
)
def test_an_extended_run_equals_one_that_was_begun_so(reference, name, crashed):
    job_name, first, whole, both = RUNS[name]
    of = reference(job_name, *both, *whole)
    job = of.job
    job.clear()
    assert crash.run(lambda: job(*both, *whole)).code == 0
    expected = last_state(job)
    choose, points = random.Random(name), range(1, len(of.log) // 2) if crashed else [0]
    for at in campaigns.thin(points) if FULL else [choose.choice(points)]:
        job.clear()
        begun = crash.run(lambda: job(*both, *first))
        assert begun.code == 0, begun
        if crashed:
            how = crash.CRASHES[choose.choice([*crash.CRASHES])]
            crash.run(lambda: job(*both, *whole), of.operations(at, how))
        extended = crash.run(lambda: job(*both, *whole))
        assert extended.code == 0, extended
        assert comparable(job.contents(), job) == comparable(of.contents, job), at
        assert last_state(job) == expected, at
