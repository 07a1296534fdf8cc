from scripts.tools.pages import tiny_model
from tests.scripts.tools.pages.results import evaluation, judged_block_sparse, judged_sparse


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
    assert "| exact | 4 | 100.0 | 94.9 ✗ ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section  # 95 are wanted
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert tiny_model.evaluated("x.json", {}, training) == ""


def test_sparse_rows_measured_on_a_gpu_are_in_bf16_unless_they_say_otherwise():
    sparse, block_sparse = (
        {**each, "environment": {"gpu": "GPU X"}} for each in (judged_sparse(), judged_block_sparse())
    )
    block_sparse["settings"] = {**block_sparse["settings"], "dtype": "float32"}
    table = tiny_model.tiers_table(evaluation(), sparse, block_sparse)
    assert "| sparse (SLA) in bf16, 10 % of the key blocks |" in table
    assert "| block_sparse in fp32, mass 0.9 |" in table
