# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: no network, one thread (tiny models are slower with more), fixed seeds."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
from helpers import tiny

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run in the background
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def saved(tmp_path):
    """The folder of a saved recurrent model."""
    tiny.recurrent("gpt2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"
