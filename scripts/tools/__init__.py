"""Check kernels without a GPU and under sanitizers, write the pages of results, and ship measurements."""
