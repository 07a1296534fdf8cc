"""Programs for those who develop the package; none of them is installed with it."""
