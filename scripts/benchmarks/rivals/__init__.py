"""Other projects' implementations that the benchmarks time beside ours."""
