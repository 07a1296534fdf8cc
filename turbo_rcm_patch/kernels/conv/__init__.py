"""3-D convolutions of the VAE's decoder, fused with their skip."""
