# SPDX-License-Identifier: Apache-2.0
"""What all tests share: no network, one thread (two would fight over tiny models on busy cores), fixed seeds."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
