# SPDX-License-Identifier: Apache-2.0
"""Checks of plain arguments: each error names the argument, the value it got and what is accepted."""

from numbers import Integral
from typing import Any

import numpy as np


def check_count(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Refuse anything but an integer from `least` on; bools are no integers."""
    if optional and value is None:
        return
    or_none = ", or None" * optional
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer{or_none}.")
    if int(value) < least:
        raise ValueError(f"{name}={value} must be at least {least}{or_none}.")


def check_flag(name: str, value: Any, *, optional: bool = False) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool | np.bool_) and not (optional and value is None):
        raise ValueError(f"{name}={value!r} must be True or False{', or None' * optional}.")


def check_callable(name: str, value: Any, *, optional: bool = False) -> None:
    """Refuse anything but a function."""
    if not callable(value) and not (optional and value is None):
        raise ValueError(f"{name}={value!r} must be a function{', or None' * optional}.")
