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


def test_a_check_that_fails_is_recorded():
    def fails(name, memory):
        raise AssertionError("losses differ\nby 1")

    assert all_types._outcome(fails, "granite", "kv") == "AssertionError: losses differ by 1"
    assert all_types._outcome(lambda *_: None, "granite", "kv") == all_types.HOLDS
