# SPDX-License-Identifier: Apache-2.0
"""Campaigns: tests with hundreds of cases, of which the default run takes a sample.

CARRYFORWARD_CAMPAIGNS=all runs all cases, CARRYFORWARD_CAMPAIGNS=N at most N of each long series.
CARRYFORWARD_CAMPAIGNS_OUT=FILE collects how many were tried and failed, a line of JSON a test; see
benchmarks/campaigns.py.
"""

import json
import os
from collections.abc import Sequence
from typing import TypeVar

Point = TypeVar("Point")


def full() -> bool:
    """Whether more than a sample is asked for."""
    return bool(os.environ.get("CARRYFORWARD_CAMPAIGNS"))


def thin(points: Sequence[Point]) -> list[Point]:
    """The points to try in the full form: all of them, or as many as were asked for, evenly spread."""
    asked = os.environ.get("CARRYFORWARD_CAMPAIGNS", "all")
    if asked == "all" or len(points) <= int(asked):
        return list(points)
    return [points[i * len(points) // int(asked)] for i in range(int(asked))]


def record(name: str, tried: int, failed: int) -> None:
    """Add the result of a test to the collected ones, if they are collected."""
    if out := os.environ.get("CARRYFORWARD_CAMPAIGNS_OUT"):
        with open(out, "a") as file:
            file.write(json.dumps({"name": name, "tried": tried, "failed": failed}) + "\n")
