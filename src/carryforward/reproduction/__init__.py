# SPDX-License-Identifier: Apache-2.0
"""Reproduce the paper's tables, figures and claims from the recipes in `experiments/paper/`."""
