# SPDX-License-Identifier: Apache-2.0
"""What 100 GB of text cost: the page follows from the results of the benchmarks."""

import dataclasses
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("benchmarks are not part of a source distribution", allow_module_level=True)


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("corpus_cost")


@pytest.fixture
def measured(cost):
    return cost.Measured(0.25, tokenise=1e6, parse=1e8, embed=1e5, score=1e6, train=2e5, commits=("c",))


def test_the_page_is_made_of_the_results(cost):
    assert cost.section(cost.read()) in cost.PAGE.read_text(), "run `python benchmarks/corpus_cost.py`"


def test_the_parts_of_an_epoch(cost, measured):
    """25 billion tokens; 40,690 steps of eight times 76,800, each with 7/4 of 496 MB over a link of 25 GB/s."""
    machine = cost.Machine(gpus=8, cores=100)
    parts = {name: 3600 * hours for name, hours in cost.hours("train", machine, measured).items()}
    assert parts == {
        "tokenising": pytest.approx(1000), "reading": pytest.approx(50), "GPU": pytest.approx(15625),
        "gradients": pytest.approx(25e9 / 614_400 * 7 / 4 * 0.496 / 25), "disk": pytest.approx(100),
    }  # fmt: skip


def test_what_each_number_of_gpus_changes(cost, measured):
    one, eight = (cost.Machine(gpus, cores=16) for gpus in (1, 8))
    for job in ("embed", "score", "train"):
        few, many = (cost.hours(job, machine, measured) for machine in (one, eight))
        assert few["GPU"] == pytest.approx(8 * many["GPU"])
        assert few["gradients"] == 0 < many["gradients"] or job != "train"
        assert few["reading"] == many["reading"]
    slower = dataclasses.replace(measured, tokenise=1e3)
    assert "tokenising (" in cost.section(slower)
    assert "tokenising (" not in cost.section(measured)


def test_the_page_says_when_reading_takes_as_long_as_the_gpus(cost, measured):
    """100 GB at 100 MB/s are 1,000 s; 25 billion tokens at 100,000 a second are 250,000 s of one GPU."""
    assert "With 250 GPUs" in cost.section(measured)
