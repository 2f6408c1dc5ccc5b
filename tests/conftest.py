# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: no network, one thread (tiny models are slower with more), fixed seeds."""

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
from helpers import tiny

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one by nohup
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
_FSYNC = os.fsync
if not torch.cuda.is_available():  # else every `torch.manual_seed` formats a stack for each kind of absent device
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda call, **kwargs: None


def pytest_collection_finish():
    """Collections of garbage, of which `Trainer` forces many, pass over what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def fsync(monkeypatch):
    """Files are synced to disk, as outside the tests."""
    monkeypatch.setattr(os, "fsync", _FSYNC)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def saved(tmp_path):
    """The folder of a saved recurrent model."""
    tiny.recurrent("gpt2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"
