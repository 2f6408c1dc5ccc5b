# SPDX-License-Identifier: Apache-2.0
"""Enters models and pipelines in transformers' registries, without importing transformers to do so.

`import carryforward` takes milliseconds. The registration is done when transformers' own modules are first imported, by
whoever imports them; if they are in memory already, at once.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType

from .models import auto


def register_when_needed() -> None:
    """Register now what belongs to modules of transformers that are loaded, and the rest as soon as they are."""
    _when_imported(auto.AUTO_CLASSES, auto.register)
    _when_imported("transformers.pipelines", _register_pipelines)


def _register_pipelines() -> None:
    importlib.import_module(".qa.pipeline", __package__)  # which registers itself


def _when_imported(module: str, do: Callable[[], object]) -> None:
    """Call `do` now if a module is loaded, otherwise as soon as it is, once."""
    if module in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _Watcher(module, do))


class _Watcher(importlib.abc.MetaPathFinder):
    """Sees a module being imported, once."""

    def __init__(self, module: str, do: Callable[[], object]):
        self.module = module
        self.do = do

    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenDo(spec.loader, self)
        return spec


class _ThenDo(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, watcher: _Watcher):
        self.loader = loader
        self.watcher = watcher

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # leave no trace
        if self.watcher in sys.meta_path:
            sys.meta_path.remove(self.watcher)
        self.loader.exec_module(module)
        self.watcher.do()
