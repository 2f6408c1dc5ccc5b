# SPDX-License-Identifier: Apache-2.0
"""Campaigns: tests with hundreds of cases, of which the default run takes a sample."""

import os


def full() -> bool:
    """Whether to run all cases: CARRYFORWARD_CAMPAIGNS=1."""
    return bool(os.environ.get("CARRYFORWARD_CAMPAIGNS"))
