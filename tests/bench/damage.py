"""A patch that computes something wrong in one block."""

from turbo_rcm_patch.bench.verify import named_blocks
from turbo_rcm_patch.patching import patch


def damage_block(monkeypatch, user, name, damage):
    """Let the `patch` that module `user` applies also pass the output of the named block through `damage`."""
    hooks = []

    def wrong_patch(pipe, config):
        while hooks:  # of a patch that was restored
            hooks.pop().remove()
        applied = patch(pipe, config)
        hooks.append(named_blocks(pipe)[name].register_forward_hook(lambda _block, _args, output: damage(output)))
        return applied

    monkeypatch.setattr(user, "patch", wrong_patch)
