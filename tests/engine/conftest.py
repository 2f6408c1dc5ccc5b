# SPDX-License-Identifier: Apache-2.0
"""The fixture of tests that capture windows."""

import pytest
from helpers.fast_path import capture_on_cpu

from carryforward.engine import cuda_graphs, graph_cache


@pytest.fixture
def captures(monkeypatch):
    """Capture on the CPU, from the second window of a shape on. The list of captured functions."""
    functions = []
    monkeypatch.setattr(graph_cache, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda function, times=1: function())
    monkeypatch.setattr(cuda_graphs.GradientAccumulator, "pool", lambda self, shared=True: None)
    monkeypatch.setattr(
        cuda_graphs, "capture", lambda function, pool: functions.append(function) or capture_on_cpu(function, pool)
    )
    return functions
