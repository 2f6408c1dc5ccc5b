# SPDX-License-Identifier: Apache-2.0
"""Read .npz files that may be damaged."""

import struct
import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np


def read_arrays(path: Path, remedy: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, without pickles; `remedy` is a sentence that says what to do if it is damaged."""
    damage = (ValueError, KeyError, EOFError, BadZipFile, zlib.error, struct.error, NotImplementedError, TypeError,
              SyntaxError, OverflowError, MemoryError, RuntimeError, AttributeError)  # fmt: skip
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from error
    except damage as error:
        raise ValueError(f"{path} is damaged ({str(error) or type(error).__name__}). {remedy}") from error
