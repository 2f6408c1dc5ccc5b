# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' Auto classes know recurrent models, without importing transformers to do so.

`import carryforward` takes milliseconds. The registration is done when transformers' Auto classes are first imported,
by whoever imports them; if they are in memory already, at once.
"""

import importlib.abc
import importlib.machinery
import re
import sys
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto.modeling_auto"


def classes() -> dict[str, Any]:
    """The recurrent models, by the names that saved configs have."""
    from . import causal_lm, encoders, headless, question_answering

    found = (
        causal_lm.RecurrentForCausalLM,
        encoders.RecurrentForMaskedLM,
        question_answering.RecurrentForQuestionAnswering,
        encoders.RecurrentForSequenceClassification,
        encoders.RecurrentForTokenClassification,
        headless.RecurrentModel,
    )
    return {cls.__name__: cls for cls in found}


def register() -> None:
    """Enter the models in transformers' Auto classes."""
    import transformers
    from transformers import AutoConfig

    from ..config import RecurrentModelConfig

    AutoConfig.register(RecurrentModelConfig.model_type, RecurrentModelConfig, exist_ok=True)
    for name, cls in classes().items():
        getattr(transformers, cls.auto_class).register(RecurrentModelConfig, cls, exist_ok=True)
        # By these names, and not by what is registered, `Trainer` knows whose labels to shift for label smoothing, and
        # pipelines know which models they support.
        words = re.findall("[A-Z]+[a-z]*", cls.auto_class)[1:]  # AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM
        mapping = getattr(sys.modules[_AUTO], f"{'_'.join(words).upper()}_MAPPING_NAMES")
        mapping[RecurrentModelConfig.model_type] = name


def register_when_needed() -> None:
    """Register now if the Auto classes are loaded, otherwise as soon as they are."""
    if _AUTO in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Watcher())


class _Watcher(importlib.abc.MetaPathFinder):
    """Sees the Auto classes being imported, once, and has the registration follow."""

    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _AUTO:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(importlib.abc.Loader):
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
        register()
