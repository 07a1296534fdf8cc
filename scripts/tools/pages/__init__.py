"""The tables of the results page and of the README, from results files; scripts/tools/write_pages.py writes them."""
