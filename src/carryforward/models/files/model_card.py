# SPDX-License-Identifier: Apache-2.0
"""The files that are saved beside a recurrent model: a loader for `trust_remote_code`, and a model card.

The card says what the config and the record of a training run say, and nothing that was not measured.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from ...utils.markdown import escape_markdown, markdown_table

if TYPE_CHECKING:
    from ..base import RecurrentPreTrainedModel

CARD = "README.md"
LOADER = "modeling_carryforward.py"
_MARK = "<!-- Written by carryforward whenever the model is saved. Without this line, the file is left alone. -->"
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")

# By head: the pipeline of transformers, and an example of a call.
_PIPELINES = {
    "AutoModelForCausalLM": ("text-generation", 'pipe("It was a dark night", max_new_tokens=1000)'),
    "AutoModelForMaskedLM": ("fill-mask", 'pipe(f"A text of any length with a {pipe.tokenizer.mask_token}.")'),
    "AutoModelForTokenClassification": ("token-classification", 'pipe("A text of any length.")'),
    "AutoModelForSequenceClassification": ("text-classification", 'pipe("A text of any length.")'),
    "AutoModelForQuestionAnswering": ("question-answering", 'pipe(question="Who?", context="A text of any length.")'),
    "AutoModel": ("feature-extraction", 'pipe("A text of any length.", return_tensors=True)'),
}


def auto_map(model: "RecurrentPreTrainedModel") -> dict[str, str]:
    """Where transformers finds the classes of a saved model: in the loader."""
    module = Path(LOADER).stem
    return {name: f"{module}.{cls.__name__}" for name, cls in
            (("AutoConfig", type(model.config)), (model.auto_class, type(model)))}  # fmt: skip


def write_files(
    model: "RecurrentPreTrainedModel", folder: Path, target: Path, run: dict[str, Any] | None = None
) -> None:
    """Write the loader and, unless the user has one of their own at `target`, the model card to a folder.

    Args:
        target: the folder that `folder` will become, or be moved into.
        run: the record of the training run that the model comes from.
    """
    shutil.copyfile(Path(__file__).with_name(LOADER), folder / LOADER)
    if is_ours(target / CARD):
        (folder / CARD).write_text(model_card(model, target.resolve().name, run), encoding="utf-8")
    else:
        (folder / CARD).unlink(missing_ok=True)


def write_card_for_hub(model: "RecurrentPreTrainedModel", card: Path, repository: str, token: Any) -> None:
    """Write the model card that is uploaded over the one that transformers has made: the repository's, with the tags of
    this upload, or a generated one if it has none. A card that somebody has made their own is left alone."""
    if is_ours(card) or not huggingface_hub.file_exists(repository, CARD, token=token):
        tags = huggingface_hub.ModelCard.load(card).data.tags if card.exists() else None
        card.write_text(model_card(model, repository, tags=tags or ()), encoding="utf-8")


def is_ours(card: Path) -> bool:
    """Whether a card may be written: there is none, or one that nobody has made their own."""
    return not card.exists() or _MARK in card.read_text(encoding="utf-8", errors="replace")


def model_card(
    model: "RecurrentPreTrainedModel", name: str, run: dict[str, Any] | None = None, tags: Sequence[str] = ()
) -> str:
    """A model card, in Markdown with YAML in front.

    Args:
        tags: besides that of carryforward.
    """
    recurrence, base = model.config.recurrence, model.config.base_config
    task, call = _PIPELINES[model.auto_class]
    known = _hub_name(base._name_or_path)
    metadata = ["library_name: transformers", f"pipeline_tag: {task}", *([f"base_model: {known}"] if known else [])]
    metadata += ["tags:", *(f"- {tag}" for tag in dict.fromkeys(("carryforward", *tags)))]
    facts = {
        "base model": f"{f'`{known}`, ' * bool(known)}{type(model.base).__name__} of {base.num_hidden_layers} layers",
        "windows": f"{recurrence.window} tokens" + f", {recurrence.overlap} shared" * bool(recurrence.overlap),
        "memory": recurrence.describe(),
        "state of one text": f"{model.memory.state_bytes:,} bytes",
        "precision": str(model.dtype).removeprefix("torch."),
    }
    return f"""---
{chr(10).join(metadata)}
---
{_MARK}

# {escape_markdown(name)}

A model with recurrence: it reads texts of any length in windows, and passes a state from each window to the next. It
was made with the Python package carryforward, which must be installed to load it.

{_facts(facts)}

{_training(model, run)}

## Use

```python
import carryforward  # or trust_remote_code=True below: carryforward must be installed either way
from transformers import {model.auto_class}, pipeline

model = {model.auto_class}.from_pretrained("{name}")
pipe = pipeline("{task}", model="{name}")
{call}
```

`model(..., use_state=False)` removes the state: every window then stands alone, as with the base model.
"""


def _hub_name(name: str) -> str:
    """A base model's name, if it may be one on the Hub; names of folders say nothing to others."""
    return name if _ON_HUB.fullmatch(name) and not Path(name).exists() else ""


def _training(model: "RecurrentPreTrainedModel", run: dict[str, Any] | None) -> str:
    """What is known of the model's training, and what was measured."""
    untrained = model.untrained_memories
    lines = [f"The memory {', '.join(untrained)} is **not trained**: its states mean nothing yet."] * bool(untrained)
    if run is None:
        return "\n\n".join([*lines, "No record of a training or of a measurement was saved with this model."])
    settings = run["settings"]
    facts = {
        "data": _without_folder(settings.get("data")),
        "tokens": run.get("tokens"),
        "questions": run.get("questions"),
        "steps": run.get("steps"),
        "step of the best validation, which was kept": run.get("best_step"),
        "validation data": _without_folder(settings.get("validation_data")),
        "word perplexity, validation": run.get("best_word_perplexity"),
        "F1, validation": run.get("best_f1"),
        "seed": settings.get("seed"),
        "command": run.get("command") and f"`{run['command']}`",
        "carryforward": f"{run['carryforward']}, commit {run['commit']}" if "commit" in run else None,
    }
    note = (
        "The validation figure chose among checkpoints. What the state contributes was not measured in training: "
        "`carryforward evaluate`, or `carryforward qa evaluate`, scores the model with its state and without."
    )
    return "\n\n".join([*lines, "## Training", _facts(facts), note])


def _facts(facts: dict[str, Any]) -> str:
    """A table of what is known."""
    rows = [[name, f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else value]
            for name, value in facts.items() if value is not None]  # fmt: skip
    return markdown_table(["", ""], rows, text_columns=2)


def _without_folder(name: Any) -> Any:
    """A name of data, without directories of this machine."""
    if not isinstance(name, str):
        return None
    return escape_markdown(Path(name).name if name.startswith(("/", "~", ".")) else name)
