# SPDX-License-Identifier: Apache-2.0
"""The ordinary tensors inside tensors of other classes."""

from torch import Tensor


def tensor_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a quantised weight consists of, such as integers and scales; an ordinary tensor itself. A
    weight that is sharded over processes is returned as it is."""
    if not hasattr(tensor, "__tensor_flatten__") or is_shard(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in tensor_parts(getattr(tensor, name))]


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process has a part."""
    return hasattr(tensor, "full_tensor")
