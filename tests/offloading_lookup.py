"""Make diffusers' search for hooks of group offloading fast. Each ``pipe.device`` and each call of a pipeline searches
all modules, which takes up to half of a tiny pipeline's time. No result changes."""

import sys

SEARCHES = "diffusers.hooks.group_offloading"


def speed_up():
    """Call it when all tests are imported."""
    if SEARCHES in sys.modules:
        sys.modules[SEARCHES]._get_top_level_group_offload_hook = first_hook


def first_hook(module):
    """Return the first hook of group offloading in the order of ``module.modules()``, or None.

    It looks into the attributes themselves, because Module.__getattr__ takes long to say that there is none.
    """
    seen, waiting = set(), [module]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        registry = vars(module).get("_diffusers_hook")
        hook = registry and registry.get_hook("group_offloading")
        if hook is not None:
            return hook
        waiting.extend(child for child in reversed(module._modules.values()) if child is not None)
    return None
