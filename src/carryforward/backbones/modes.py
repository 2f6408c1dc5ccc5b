# SPDX-License-Identifier: Apache-2.0
"""What is changed of a model for a time, or only if all goes well: the mode of its modules, hooks and attributes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is as before: its hooks, buffers, modes, attributes, classes and config; and so are torch's
    random numbers on the CPU."""
    restore = _restoring(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def as_before_on_error(model: nn.Module) -> Iterator[None]:
    """The same if an error is raised inside."""
    restore = _restoring(model)
    try:
        yield
    except BaseException:
        restore()
        raise


def _restoring(model: nn.Module) -> Callable[[], None]:
    """A function that makes a model as it is now."""
    modules = [*model.modules()]
    classes = [type(module) for module in modules]
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    attributes = [(vars(owner), dict(vars(owner))) for owner in (*modules, *configs.values())]
    contents = [
        (value, dict(value)) for _, values in attributes for value in values.values() if isinstance(value, dict)
    ]
    random = torch.get_rng_state()

    def restore() -> None:
        for changed, before in (*attributes, *contents):
            changed.clear()
            changed.update(before)
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls
        torch.set_rng_state(random)

    return restore
