"""The choice of an op's kernel: the registry, shipped measurements, and results of `turbo-rcm tune` on this machine."""
