# SPDX-License-Identifier: Apache-2.0
"""`reach`: one number for how far back a window sees.

It is a number of positions, or the memory that one row's state may take. It sets the size of the memory "kv": how many
positions that is, and how they are split into sinks, far and recent ones (`split_positions`).
"""

import math
import re
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from ..backbones.architectures import architecture_of
from ..presets import DEFAULT_SINKS
from .kinds import MemoryChoice, parse_memory
from .kv import KVMemoryConfig

Reach = int | str

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}  # as in huggingface_hub
_MEMORY = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) *([KMG]I?B)", re.IGNORECASE)
_POSITIONS = re.compile(r"[0-9]{1,12}")


def memory_with_reach(
    reach: Reach, memory: MemoryChoice, base: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> KVMemoryConfig:
    """Keys and values of as many positions as `reach` says.

    Args:
        reach: the positions that a window sees of its past, such as 2000, or the memory of one row's state, such as
            "64MB" or "1.5 GB". A kilobyte is 1000 bytes, a KiB is 1024.
        memory: "kv", or its config with other fields than `recent` and `far`.
        dtype: the precision of states, which is the model's.
    """
    configs = parse_memory(memory)
    config = configs[0]
    if len(configs) > 1 or not isinstance(config, KVMemoryConfig):
        kinds = " and ".join(repr(config.kind) for config in configs)
        raise ValueError(
            f"reach={reach!r} is for carried keys and values alone, and the memory is {kinds}. Use memory='kv', or "
            "leave reach out."
        )
    given = [f"{name}={getattr(config, name)}" for name in ("recent", "far") if getattr(config, name)]
    if given:
        raise ValueError(
            f"reach={reach!r} sets how many positions are carried in all, and so does KVMemoryConfig({given[0]}). "
            "Leave one of them out."
        )
    return split_positions(_positions(reach, config, base, dtype), config)


def split_positions(positions: int, config: KVMemoryConfig) -> KVMemoryConfig:
    """The config with so many positions carried in all: sinks, and the rest recent. The one place that decides this."""
    sinks = min(DEFAULT_SINKS, positions // 2) if config.sinks is None else config.sinks
    return replace(config, sinks=sinks, recent=positions - sinks)


def check_reach(reach: Reach, memory: KVMemoryConfig, window: int, base: PreTrainedConfig) -> None:
    """Refuse a reach for which a model has too few positions, if they end."""
    architecture = architecture_of(base)
    positions = architecture.max_positions(base)
    if not architecture.positions_end or window + memory.extra_positions <= positions:
        return
    room, kind = positions - window - memory.right, architecture.kind_of_positions
    if room < 1:
        raise ValueError(
            f"reach={reach!r}: a window of {window} tokens takes all of the {positions} {kind} that "
            f"{base.model_type} has, and what a window sees of its past needs some as well. Use a smaller window."
        )
    raise ValueError(
        f"reach={reach!r} takes {memory.carried} positions, and the {positions} {kind} that "
        f"{base.model_type} has leave {room} beside a window of {window} tokens. Use reach={room} or less, or a "
        "smaller window."
    )


def _positions(reach: Reach, config: KVMemoryConfig, base: PreTrainedConfig, dtype: torch.dtype) -> int:
    """How many positions a reach is; at least one more than there are sinks."""
    least = 1 + (config.sinks or 0)
    fewest = f"{least - 1} sinks and a recent position" if least > 1 else "one position"
    if (number := _number(reach)) is not None:
        if number < least:
            raise ValueError(f"reach={reach!r} must be at least {least}: {fewest}.")
        return number
    of_one = bytes_per_position(base, dtype)
    positions = _bytes(reach) // of_one
    if positions < least:
        raise ValueError(
            f"reach={reach!r} is too little memory: the state of one position takes {of_one / 1e3:,.1f} KB "
            f"({str(dtype).removeprefix('torch.')}). Give at least {math.ceil(least * of_one / 1e3):,}KB, for {fewest}."
        )
    return positions


def bytes_per_position(base: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position in all layers."""
    heads, size = architecture_of(base).kv_heads(base)
    return base.num_hidden_layers * 2 * heads * size * dtype.itemsize


def _number(reach: Reach) -> int | None:
    """A reach that is a number of positions."""
    if isinstance(reach, str) and _POSITIONS.fullmatch(reach.strip()):
        return int(reach)
    return reach if isinstance(reach, int) and not isinstance(reach, bool) else None


def _bytes(reach: Reach) -> int:
    """A reach that is an amount of memory."""
    match = _MEMORY.fullmatch(reach.strip()) if isinstance(reach, str) else None
    if match is None:
        raise ValueError(
            f"reach={reach!r} must be a number of positions, such as 2000, or memory for the state, such as '64MB' or "
            f"'1.5 GB' (KB, MB, GB, KiB, MiB or GiB)."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])
