# SPDX-License-Identifier: Apache-2.0
"""The fixture of tests that capture windows."""

import pytest
from helpers.fast_path import run_again

from carryforward.engine import cuda_graphs, graph_cache


@pytest.fixture
def recordings(monkeypatch):
    """Recordings on a CPU, made at the second window of a kind, and counted."""
    made = []
    monkeypatch.setattr(graph_cache, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda function, times=1: function())
    monkeypatch.setattr(cuda_graphs.GradientAccumulator, "pool", lambda self, shared=True: None)
    monkeypatch.setattr(
        cuda_graphs, "record", lambda function, pool: made.append(function) or run_again(function, pool)
    )
    return made
