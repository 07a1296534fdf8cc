"""The error that patching and restoring raise."""


class PatchError(RuntimeError):
    """A model cannot be patched or restored as asked. It is as it was before the call."""


class KeepError(PatchError, ValueError):
    """A name in `keep` fits nothing in a model, or the list is another model's."""
