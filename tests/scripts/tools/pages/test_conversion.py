import json

from scripts.tools import write_pages


def test_what_a_conversion_takes_becomes_a_table(tmp_path):
    environment = {"gpu": None, "cpu": "x86_64, 2 threads", "torch": "2.13", "triton": "3.9", "diffusers": "0.42"}
    row = {"what": "bf16: convert --preset sparse", "seconds": 18.44, "file_bytes": 3 * 2**30}
    row |= {"own_peak_bytes": 2**29, "mapped_peak_bytes": 5 * 2**29}
    content = {"settings": {"config": "wan2.1-1.3b", "parameters": 1419000000}, "environment": environment}
    (tmp_path / "conversion.json").write_text(json.dumps({**content, "rows": [row]}))
    page = write_pages.results_page(tmp_path)
    assert "random weights of wan2.1-1.3b's size, 1.42 billion" in page
    assert "x86_64, 2 threads, torch 2.13, triton 3.9" in page
    assert "| bf16: convert --preset sparse | 18.4 | 0.50 | 2.50 | 3.00 |" in page
