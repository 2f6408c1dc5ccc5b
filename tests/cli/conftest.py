# SPDX-License-Identifier: Apache-2.0
"""A model, texts and training runs for the tests of the command line."""

import os
import signal

import pytest
from helpers import prose
from helpers.commands import fail, succeed
from helpers.training_runs import TRAIN

from carryforward.training.callbacks import ProgressBarCallback


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A folder with a model, texts and a cache of their tokens."""
    folder = tmp_path_factory.mktemp("home")
    prose.save_model(folder / "model")
    prose.save_topics(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYFORWARD_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="session")
def trained(home):
    """A finished run, made once: only to be read."""
    result = succeed("train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", home / "run")
    assert result.out.startswith(f"{home / 'run'}: 6"), result.out
    assert "word perplexity" in result.out
    return home / "run"


@pytest.fixture
def train(home, tmp_path):
    """The arguments of a training run in a folder of its own, which is the last one."""
    return ["train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", tmp_path / "own"]


@pytest.fixture
def interrupted(monkeypatch):
    """Run a command that gets a Ctrl-C in its third step. Returns its message."""

    def run_interrupted(*arguments):
        show = ProgressBarCallback.on_step_end

        def on_step_end(self, args, state, *rest, **kwargs):
            show(self, args, state, *rest, **kwargs)
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(ProgressBarCallback, "on_step_end", on_step_end)
            return fail(*arguments, code=130)

    return run_interrupted
