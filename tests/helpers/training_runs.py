# SPDX-License-Identifier: Apache-2.0
"""Arguments and texts of small training runs and evaluations."""

WINDOW = 12
TRAIN = ["--window", WINDOW, "--windows-per-sample", 3, "--batch-size", 2, "--train-tokens", 600, "--eval-tokens", 300]


def evaluation(model, home, *more):
    """The arguments of an evaluation on the texts in `home`."""
    return ["evaluate", model, "--data", home / "texts", *more]


def write_texts(folder, **files):
    """A folder with a .txt file for each name and content."""
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder
