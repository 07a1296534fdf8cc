import pytest

from turbo_rcm_patch.patching.families.vae.classes import DECODER, ENCODER


@pytest.fixture
def diffusers_is_off(monkeypatch):
    """Nothing that is compared with diffusers' VAE may be diffusers' own: a fallback would always agree."""

    def must_not_run(*_, **__):
        raise AssertionError("diffusers' own encoder or decoder ran")

    return lambda: [monkeypatch.setattr(network, "__call__", must_not_run) for network in (*ENCODER, *DECODER)]
