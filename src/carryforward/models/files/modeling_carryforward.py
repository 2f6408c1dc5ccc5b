# SPDX-License-Identifier: Apache-2.0
"""Loads this model with `AutoModel....from_pretrained(..., trust_remote_code=True)`, where carryforward is installed.

Saved with every recurrent model. Nothing else is in this file: the model's code is in the package carryforward, and
after `import carryforward` the model loads without `trust_remote_code`.
"""

try:
    from carryforward import (
        RecurrentForCausalLM,
        RecurrentForMaskedLM,
        RecurrentForQuestionAnswering,
        RecurrentForSequenceClassification,
        RecurrentForTokenClassification,
        RecurrentModel,
        RecurrentModelConfig,
    )
except ModuleNotFoundError as error:
    if error.name != "carryforward":
        raise
    raise ImportError(
        "This model is recurrent: its code is in the Python package carryforward, which is not installed. Install it: "
        "pip install FOLDER, a copy of carryforward's source, or a wheel of it."
    ) from error

__all__ = [
    "RecurrentForCausalLM",
    "RecurrentForMaskedLM",
    "RecurrentForQuestionAnswering",
    "RecurrentForSequenceClassification",
    "RecurrentForTokenClassification",
    "RecurrentModel",
    "RecurrentModelConfig",
]
