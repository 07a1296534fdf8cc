"""Time, check and count what the kernels and patched pipelines do; gpu_session.py runs all of it."""
