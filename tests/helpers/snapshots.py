# SPDX-License-Identifier: Apache-2.0
"""What of a model could be changed by a call that should change nothing."""


def snapshot(model):
    """Modes, hooks, classes, attributes, gradients, weights and the config: all that a call could change."""
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [[*module._forward_hooks.values(), *module._forward_pre_hooks.values()] for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "requires": [parameter.requires_grad for parameter in model.parameters()],
        "weights": {name: value.tolist() for name, value in (*model.named_parameters(), *model.named_buffers())},
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
    }
