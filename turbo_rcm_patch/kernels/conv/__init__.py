"""3-D convolutions of the VAE's decoder with their skip."""
