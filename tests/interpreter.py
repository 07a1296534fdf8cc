"""Make Triton's CPU interpreter a third faster.

Before a kernel runs it puts functions of its own in the place of those in triton.language, and does so again in every
call of a function within the kernel, where they are in place already.
"""

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter


def replace_language_once():
    """Let it do so once a launch for each set of modules that a function sees."""
    replace, replaced = interpreter._patch_lang, set()

    def once(function):
        modules = modules_seen(function)
        if modules in replaced:
            return None  # which the caller, a function within a kernel, does not use
        scope = replace(function)
        if not replaced:  # of the launch, which alone takes it back
            scope.restore = functools.partial(end, scope.restore)
        replaced.add(modules)
        return scope

    def end(restore):
        replaced.clear()
        restore()

    interpreter._patch_lang = once


@functools.cache
def modules_seen(function):
    modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(module.__name__ for module in modules if module in (tl, tl.core))
