# SPDX-License-Identifier: Apache-2.0
"""Tests with a fast and a full form."""

import os


def full() -> bool:
    """Whether to run the full form of campaigns: the environment variable CARRYFORWARD_CAMPAIGNS is set."""
    return bool(os.environ.get("CARRYFORWARD_CAMPAIGNS"))
