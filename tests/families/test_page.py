# SPDX-License-Identifier: Apache-2.0
"""docs/models.md is what docs/models.json says, and tells what does not hold."""

import json

import all_types
import pytest
from helpers import families


@pytest.fixture
def results():
    return json.loads(all_types.RESULTS.read_text())


def test_the_page_is_made_of_the_results(results):
    assert all_types.PAGE.read_text() == all_types.page(results), "run `make test-families`"
    assert set(results["types"]) | set(results["not_installed"]) == set(families.ALL)


def test_what_does_not_hold_is_on_the_page(results):
    outcomes = results["types"]["granite"]["checks"]
    outcomes["streamed"]["kv"] = "AssertionError: losses differ by 1, of 2"
    assert all_types.failures(results["types"]["granite"]) == ["streamed (kv)"]
    outcomes["blocks"]["kv"] = "AssertionError: other"
    results["types"]["llama"] = {"causal": True, "in_table": True, "checks": {}, "commit": "", "refused": "a reason"}
    page = all_types.page(results)
    assert "| `granite` | discovered | streamed (kv); blocks | 25 of 27 |" in page
    assert "* `granite`: losses differ by 1, of 2\n" in page
    assert "| `llama` | refused | a reason |" in page


def test_what_is_captured_is_on_the_page(results):
    memories = dict.fromkeys(("vector", "kv", "tokens", "associative"), "captured")
    types = {
        "llama": memories, "granite": {**memories, "kv": "not captured: RuntimeError: a reason"},
        "gemma": dict.fromkeys(memories, "losses differ by 0.5 of the loss"),
        "axk1": dict.fromkeys(memories, "refused"),
    }  # fmt: skip
    graphs = {"types": {name: {"memories": one} for name, one in types.items()}, "hardware": {"gpu": "a GPU"},
              "versions": {"torch": "2", "transformers": "5"}}  # fmt: skip
    page = all_types.page(results, graphs)
    assert "on a GPU, with transformers\n5 and torch 2" in page
    for row in ("| `llama` | in the table |  | captured | 27", "| `granite` | discovered |  | not kv | 27",
                "| `gemma` | discovered |  | no | 27", "| `gpt2` | in the table |  |  | 27"):  # fmt: skip
        assert row in page
    assert "* `granite`: RuntimeError: a reason\n* `gemma`: losses differ by 0.5 of the loss\n" in page
    assert "`axk1`:" not in page


def test_a_check_that_fails_is_recorded():
    def fails(name, memory):
        raise AssertionError("losses differ\nby 1")

    assert all_types._outcome(fails, "granite", "kv") == "AssertionError: losses differ by 1"
    assert all_types._outcome(lambda *_: None, "granite", "kv") == all_types.HOLDS
