# SPDX-License-Identifier: Apache-2.0
"""Does something as soon as a module of another library is imported, without importing it.

`import carryforward` takes milliseconds. What must be entered in transformers' registries waits until transformers'
own modules are first imported, by whoever imports them.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType


def when_imported(module: str, do: Callable[[], object]) -> None:
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
