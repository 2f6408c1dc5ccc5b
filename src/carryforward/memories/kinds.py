# SPDX-License-Identifier: Apache-2.0
"""The kinds of memory, by name.

A new kind is a file of this package and a row of `MEMORY_KINDS`. `add_recurrence(memory="NAME")` and `carryforward
train --memory NAME` then know it. Command-line flags for its fields go into `settings.recurrence`, its config
into `carryforward.__init__` to make it public.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .associative import AssociativeMemoryConfig
from .base import MemoryConfig, check_fields
from .kv import KVMemoryConfig
from .tokens import TokenMemoryConfig
from .vector import VectorMemoryConfig

MEMORY_KINDS: dict[str, type[MemoryConfig]] = {
    config.kind: config for config in (VectorMemoryConfig, KVMemoryConfig, TokenMemoryConfig, AssociativeMemoryConfig)
}

MemoryChoice = str | MemoryConfig | dict[str, Any] | Sequence[str | MemoryConfig | dict[str, Any]]


def parse_memory(memory: MemoryChoice) -> tuple[MemoryConfig, ...]:
    """Memory configs from names of kinds, configs or dictionaries, one or several, in the order of `MEMORY_KINDS`."""
    choices = [memory] if isinstance(memory, str | MemoryConfig | dict) else memory
    if not isinstance(choices, Sequence):
        raise ValueError(f"memory={memory!r} must be one of {_names()}, a memory config, or a list of these.")
    configs = [_parse_one(choice) for choice in choices]
    if not configs:
        raise ValueError(f"memory={memory!r} is empty: give at least one of {_names()}.")
    if len({config.kind for config in configs}) < len(configs):
        raise ValueError(f"memory={memory!r} names a kind twice: give each kind once.")
    _check_combination(configs)
    return tuple(sorted(configs, key=lambda config: [*MEMORY_KINDS].index(config.kind)))


def _check_combination(configs: Sequence[MemoryConfig]) -> None:
    """Refuse kinds that cannot stand beside each other."""
    for config in configs:
        others = [other.kind for other in configs if other is not config]
        refused = [kind for kind in others if config.combines_with is not None and kind not in config.combines_with]
        if refused:
            fitting = " or ".join(map(repr, config.combines_with or ()))
            beside = f"alone or beside {fitting}" if fitting else "alone"
            raise ValueError(
                f"memory: {config.kind!r} cannot stand beside {refused[0]!r}. Use {config.kind!r} {beside}."
            )


def _parse_one(choice: Any) -> MemoryConfig:
    if isinstance(choice, MemoryConfig):
        return choice
    if not isinstance(choice, str | dict):
        raise ValueError(f"memory={choice!r} must be one of {_names()}, a memory config, or a dictionary.")
    values = {"kind": choice} if isinstance(choice, str) else dict(choice)
    kind = values.pop("kind", None)
    if kind not in MEMORY_KINDS:
        raise ValueError(f"memory={kind!r}: the kinds of memory are {_names()}.")
    check_fields(MEMORY_KINDS[kind], values, owner_hint)
    return MEMORY_KINDS[kind](**values)


def owner_hint(name: str) -> str:
    """Advice for a field of a memory config that was given elsewhere."""
    if name == "reach":
        return " It depends on the model: give it to add_recurrence(model, reach=...)."
    for config in MEMORY_KINDS.values():
        if name in {field.name for field in dataclasses.fields(config)}:
            return f" It is a field of {config.__name__}: give memory={config.__name__}({name}=...)."
    return ""


def _names() -> str:
    return ", ".join(map(repr, MEMORY_KINDS))
