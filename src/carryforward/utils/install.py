# SPDX-License-Identifier: Apache-2.0
"""The sentence that says how to install what an optional feature needs."""

# The packages of each extra, as pyproject.toml has them. By their names they can be installed however carryforward was:
# from a checkout, a wheel or an index.
PACKAGES = {
    "figures": ("matplotlib>=3.8",),
    "hub": ("datasets>=3",),
    "parquet": ("pyarrow>=15",),
    "topics": ("scikit-learn>=1.5", "scipy>=1.11"),
    "ray": ("ray[data]>=2.40", "pyarrow>=15"),
    "sentences": ("sentence-transformers>=6",),
}


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra.

    >>> install_hint("parquet")
    'pip install "pyarrow>=15"'
    """
    return " ".join(["pip install", *(f'"{package}"' for package in PACKAGES[extra])])
