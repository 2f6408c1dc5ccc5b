# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' Auto classes know recurrent models. `import carryforward` has this done as soon as they are
imported (`registration`)."""

import re
import sys
from typing import Any

AUTO_CLASSES = "transformers.models.auto.modeling_auto"


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
        mapping = getattr(sys.modules[AUTO_CLASSES], f"{'_'.join(words).upper()}_MAPPING_NAMES")
        mapping[RecurrentModelConfig.model_type] = name
