"""Which kernel runs an op: what was measured on which GPU, and what `turbo-rcm tune` found on this one."""
