"""The sizes of latents from configs of VAEs, which may lack entries."""

from tests.tiny_ltx2 import tiny_ltx2_pipeline
from turbo_rcm_patch.cli.sizes import size_rules
from turbo_rcm_patch.latents import compression


def test_compression_is_in_the_config_or_follows_from_it():
    pipe = tiny_ltx2_pipeline()
    config = dict(pipe.vae.config)
    assert config["spatial_compression_ratio"] is None
    assert compression(config) == (pipe.vae.spatial_compression_ratio, 2)
    assert compression({**config, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}) == (32, 8)
    rules = size_rules(config, pipe.transformer.config)
    assert (rules.patch[0], rules.temporal) == compression(config)


def test_the_entries_that_published_configs_lack():
    """diffusers has these defaults: Wan 2.1's VAE, and LTX-2's, whose patches are of 4 pixels."""
    assert compression({}) == (8, 4)
    assert compression({"spatio_temporal_scaling": (True, True, True)}) == (32, 8)
