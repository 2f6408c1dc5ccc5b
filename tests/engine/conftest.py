# SPDX-License-Identifier: Apache-2.0
"""The fixture of tests that capture windows."""

from helpers.fast_path import captures

__all__ = ["captures"]
