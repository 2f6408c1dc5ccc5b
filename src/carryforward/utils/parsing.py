# SPDX-License-Identifier: Apache-2.0
"""Read JSON and YAML files that may be damaged: whatever they hold, the error is a ValueError that names the file."""

import json
import re
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes, where: object) -> Any:
    """The value of a JSON text; `where` names it in the error."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where} is not valid JSON: it is nested too deeply.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 (byte {error.start}).") from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}).") from error


def read_json(path: Path, remedy: str = "") -> Any:
    """The value of a JSON file; `remedy` is a sentence that says what to do if it is damaged."""
    try:
        return parse_json(read_bytes(path), path)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}".rstrip()) from error


def read_json_object(path: Path, remedy: str = "") -> dict[str, Any]:
    """The object of a JSON file."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds {_kind(content)}, not an object. {remedy}".rstrip())
    return content


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. A key that stands twice is refused: only the last one would count."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    content = read_bytes(path)
    try:
        return yaml.load(content, Loader)
    except RecursionError as error:
        raise ValueError(f"{path} is not valid YAML: it is nested too deeply.") from error
    except (yaml.YAMLError, ValueError) as error:
        text = re.sub(
            r'\s+in "<(byte|unicode) string>"|:\s.*\^$', "", str(error), flags=re.DOTALL
        )  # without the excerpt
        raise ValueError(f"{path} cannot be read: {' '.join(text.split())}.") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read ({reason}). Check the path and its permissions.") from error


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
