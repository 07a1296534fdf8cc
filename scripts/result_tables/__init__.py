"""The tables of the results page and of the README, from results files; scripts/readme_results.py writes them."""
