import json

from scripts.tools import write_pages
from scripts.tools.pages import tiny_model
from tests.scripts.tools.pages.results import TIERS, evaluation, judged_block_sparse, judged_sparse


def test_an_evaluation_and_its_training_become_a_table(tmp_path):
    def accuracy(share):
        part = {"share": share, "right": 1, "asked": 2, "standard_error": 0.0123}
        return {"count": {**part, "share": 1.0}, "overall": part}

    result = {
        "variant": "exact",
        "steps": 4,
        "accuracy": accuracy(0.956),
        "change": {"share": -0.004, "standard_error": 0.006},
        "psnr_to_fp32": 31.257,
        "psnr_to_exact": None,
    }
    environment = {"gpu": "GPU X", "torch": "2.11"}
    evaluation = {"settings": {"n": 77}, "environment": environment, "results": [result]}
    taught = {"steps": 50, "accuracy": accuracy(0.98)}
    training = {"seconds": 90, "environment": environment, "stages": {"teacher accuracy": taught}}
    section = tiny_model.evaluated("x.json", {"evaluate": evaluation}, training)
    assert "| teacher, guided | 50 | 100.0 | 98.0 ± 1.2 |  |  |  |" in section
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert "77 held-out captions" in section
    assert "1.5 minutes on one GPU X" in section
    assert "`x.json`" in section

    evaluation["results"].append({**result, "accuracy": accuracy(0.949)})
    section = tiny_model.evaluated("x.json", {"evaluate": evaluation}, None)
    assert "teacher" not in section
    assert "| exact | 4 | 100.0 | **94.9** ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section  # 95 are wanted
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert tiny_model.evaluated("x.json", {}, training) == ""


def test_what_sparsity_costs_becomes_a_table_of_a_row_per_kept_share(tmp_path):
    def row(variant, kept, steps, share, psnr):
        overall = {"share": share, "standard_error": 0.021}
        return {
            "variant": variant,
            "kept": kept,
            "steps": steps,
            "accuracy": {"overall": overall},
            "psnr_to_exact": psnr,
        }

    environment = {"gpu": None, "torch": "2.13", "triton": "3.9", "diffusers": "0.42", "commit": "0123456789abcdef"}
    rows = [row("exact", None, 1, 0.9, None), row("exact", None, 4, 1.0, None)]
    rows += [row("SLA", 0.15, 1, 0.5, 17.891), row("SLA", 0.15, 4, 0.75, 20.0)]
    content = {"settings": {"n": 24, "blocks": [16, 16]}, "environment": environment, "results": rows}
    (tmp_path / "sparse-tiny.json").write_text(json.dumps(content))
    page = write_pages.results_page(tmp_path)
    assert "24 held-out captions" in page
    assert "On a CPU, torch 2.13, triton 3.9, diffusers 0.42, commit 0123456789ab" in page
    assert "| attention | key blocks kept | 1 step, % | PSNR to exact, dB | 4 steps, % | PSNR to exact, dB |" in page
    assert "| exact in fp32 | all | 90.0 ± 2.1 |  | 100.0 ± 2.1 |  |" in page
    assert "| SLA in fp32 | 15 % | 50.0 ± 2.1 | 17.89 | 75.0 ± 2.1 | 20.00 |" in page


def test_every_tier_is_in_one_table_with_where_it_was_measured_and_of_how_many_captions():
    lines = tiny_model.tiers_table(evaluation(), judged_sparse(), judged_block_sparse()).splitlines()[2:]
    assert lines == ["| measured on | captions | variant | 1 step | 4 steps | PSNR to exact, dB |", *TIERS]


def test_sparse_rows_measured_on_a_gpu_are_in_bf16_unless_they_say_otherwise():
    sparse, block_sparse = (
        {**each, "environment": {"gpu": "GPU X"}} for each in (judged_sparse(), judged_block_sparse())
    )
    block_sparse["settings"] = {**block_sparse["settings"], "dtype": "float32"}
    table = tiny_model.tiers_table(evaluation(), sparse, block_sparse)
    assert "| sparse (SLA) in bf16, 10 % of the key blocks |" in table
    assert "| block_sparse in fp32, mass 0.9 |" in table


def test_what_the_judge_sees_of_a_lora_becomes_a_table(tmp_path):
    environment = {"gpu": None, "torch": "2.13", "triton": "3.9", "diffusers": "0.42", "commit": "0123456789abcdef"}
    rows = [
        {"variant": "with it, unpatched", "colour": 0.9375, "asked": 0.0, "psnr": None},
        {"variant": "with it, patched (exact)", "colour": 0.9375, "asked": 0.0, "psnr": 81.25},
    ]
    settings = {"n": 16, "colour": "red", "rank": 8, "steps": 4}
    content = {"settings": settings, "training": {"updates": 60, "seconds": 61.7}, "environment": environment}
    (tmp_path / "lora-tiny.json").write_text(json.dumps({**content, "results": rows}))
    page = write_pages.results_page(tmp_path)
    assert "60 updates in 62 s" in page
    assert "| with it, patched (exact) | 93.8 | 0.0 | 81.25 |" in page
