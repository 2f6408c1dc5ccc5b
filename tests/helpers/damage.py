# SPDX-License-Identifier: Apache-2.0
"""Damage to files, the same every time: of their bytes, and of the values in JSON and YAML."""

import copy
import json
import os
import pickle
from pathlib import Path

HTML = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
DEEP = 3000  # levels of nesting
# what takes the place of a value
VALUES = [None, [], {}, "", "text", HTML, "../../../etc/passwd", -1, 0, 1.5, 1e308, float("nan"), True, 10**30, [None]]


class _Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def byte_damages(content: bytes, canary: Path):
    """Names and contents of damaged files, whatever their format."""
    middle = len(content) // 2
    yield "empty", b""
    yield "one byte", content[:1]
    yield "half", content[:middle]
    yield "cut by 1", content[:-1]
    yield "twice", content * 2
    yield "zeros", bytes(len(content))
    yield "zeros in the middle", content[:middle] + bytes(min(64, middle)) + content[middle + 64 :]
    yield "not UTF-8", b"\xff\xfe\x80\x81" + content
    yield "UTF-16", content.decode("latin-1").encode("utf-16")
    yield "text", b"this is no such file"
    yield "HTML", HTML.encode()
    yield "pickle", pickle.dumps(_Canary(canary))
    for number in range(8):
        place = (len(content) * (2 * number + 1)) // 16
        yield f"flip at {place}", content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]


def json_damages(content: bytes):
    """Names and contents of JSON files with other values, each place with some of `VALUES`."""
    whole = json.loads(content)
    for value in (None, [], {}, "text", 5, True):
        yield f"all: {value!r}", json.dumps(value).encode()
    yield "deep", b"[" * DEEP + b"]" * DEEP
    yield "deep objects", b'{"a":' * DEEP + b"1" + b"}" * DEEP
    yield "a huge number", b"9" * 6000
    for number, path in enumerate(_places(whole)):
        for step in range(4):
            value = VALUES[(number + 4 * step) % len(VALUES)]
            yield f"{'.'.join(map(str, path))}: {value!r}", json.dumps(_replaced(whole, path, value)).encode()
        yield f"{'.'.join(map(str, path))}: missing", json.dumps(_removed(whole, path)).encode()


def _places(value, path=()):
    """The paths of all values, except items after the second of a list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _replaced(whole, path, value):
    whole = copy.deepcopy(whole)
    _owner(whole, path)[path[-1]] = value
    return whole


def _removed(whole, path):
    whole = copy.deepcopy(whole)
    del _owner(whole, path)[path[-1]]
    return whole


def _owner(whole, path):
    for key in path[:-1]:
        whole = whole[key]
    return whole
