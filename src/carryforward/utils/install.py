# SPDX-License-Identifier: Apache-2.0
"""Optional packages: how to install what a feature needs."""

from typing import Any

# What pip installs carryforward from: "." is a clone of the repository. On release this becomes "carryforward", and
# `python docs/install_commands.py` rewrites the documentation.
SOURCE = "."
# The packages of each extra, as pyproject.toml has them. By their names they can be installed however carryforward was:
# from a checkout, a wheel or an index.
PACKAGES = {
    "figures": ("matplotlib>=3.8",),
    "hub": ("datasets>=3",),
    "parquet": ("pyarrow>=15",),
    "topics": ("scikit-learn>=1.5", "scipy>=1.11"),
    "ray": ("ray[data]>=2.40", "pyarrow>=15"),
    "lm-eval": ("lm-eval[hf]>=0.4.13",),
    "sentences": ("sentence-transformers>=6",),
}


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra.

    >>> install_hint("parquet")
    'pip install "pyarrow>=15"'
    """
    return " ".join(["pip install", *(f'"{package}"' for package in PACKAGES[extra])])


def install_command(*extras: str) -> str:
    """The command that installs carryforward itself, with extras.

    >>> install_command() == f"pip install {SOURCE}", install_command("hub", "ray").endswith('[hub,ray]"')
    (True, True)
    """
    return f'pip install "{SOURCE}[{",".join(extras)}]"' if extras else f"pip install {SOURCE}"


def import_pyarrow() -> Any:
    """Return pyarrow with `pyarrow.parquet`; raise a ValueError that says what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"a .parquet file needs pyarrow: {install_hint('parquet')}") from error
    return pyarrow
