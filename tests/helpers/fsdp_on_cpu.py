# SPDX-License-Identifier: Apache-2.0
"""FSDP by accelerate in CPU processes: accelerate itself shards weights only in processes with an accelerator each.

As a program, it runs carryforward's command line.
"""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def allow() -> None:
    """Let accelerate's state choose FSDP in CPU processes too."""
    initialise = AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = __init__


if __name__ == "__main__":
    allow()
    from carryforward.cli.main import main

    main()
