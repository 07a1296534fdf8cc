"""Programs for developers of the package. None of them is installed with it."""
