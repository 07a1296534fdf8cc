from scripts.tools.pages import ops
from tests.scripts.tools.pages.results import attention_rows


def test_the_whole_sparse_attention_beside_the_dense_ones_is_a_sentence():
    assert ops.sparse_attention_sentence(attention_rows()) == (
        "One self-attention with its norms and RoPE (12 heads of 128, 32760 tokens): exact 9.50 ms beside 7.75 in 8 "
        "bits, and sparse 1.50 beside 7.12 in 8 bits; each pair was timed in turns.\n"
    )


def test_ops_become_a_table_that_marks_what_is_missed():
    def timing(milliseconds, error):
        return {"milliseconds": milliseconds, "error": error}

    timings = {"rival A": timing(2.0, 2e-3), "rival B": timing(3.0, None), "ours": timing(2.5, 1e-3)}
    result = {
        "case": "op 1×2",
        "best": "ours",
        "timings": timings,
        "speedups": {"rival A": 0.8, "rival B": 1.2, "copy": 0.75},
        "targets": {"rival A": 1.1, "rival B": 1.0},
    }
    refused = {"case": "op 3×4", "best": None, "timings": {}, "speedups": {}, "targets": {}}
    table = ops.ops_table({"results": [result, refused], "rounds": 7, "copy_bandwidth": 4e12})
    assert "| op 1×2 | 2.500 | rival A | 2.000 | 0.800 ✗ | 1.1 | 1.0e-03 / 2.0e-03 |" in table
    assert "|  |  | rival B | 3.000 | 1.200 | 1.0 |  |" in table
    assert "|  |  | copy |  | 0.750 |  |  |" in table
    assert "| op 3×4 | refused" in table
    assert "4.00 TB/s" in table
    for wanted, (ours, asked) in (
        ({"teraflops": 860.2, "least": 860}, ("2.500 (860 TFLOP/s)", "860 TFLOP/s")),
        ({"teraflops": 860.2, "least": 861}, ("2.500 (860 ✗ TFLOP/s)", "861 TFLOP/s")),
        ({"most": 2.5}, ("2.500", "2.5 ms")),
        ({"most": 2.4}, ("2.500 ✗", "2.4 ms")),
    ):
        rated = ops.ops_table({"results": [{**result, **wanted}], "rounds": 7, "copy_bandwidth": 1e12})
        assert f"| op 1×2 | {ours} | rival A | 2.000 | 0.800 ✗ | 1.1 / {asked} | 1.0e-03 / 2.0e-03 |" in rated
    assert ops.op_rows({**result, "kept": 0.421})[0][0] == "op 1×2, 42 % kept"
    alone = {**result, "timings": {"ours": timings["ours"]}, "speedups": {}, "teraflops": 860.2, "least": 860}
    table = ops.ops_table({"results": [alone], "rounds": 7, "copy_bandwidth": 4e12})
    assert "| op 1×2 | 2.500 (860 TFLOP/s) |  |  |  | 860 TFLOP/s | 1.0e-03 |" in table
    dense = {**result, "timings": {**timings, "rival A": timing(2.0, None)}}
    table = ops.ops_table({"results": [dense], "rounds": 7, "copy_bandwidth": 4e12})
    assert "| op 1×2 | 2.500 | rival A | 2.000 | 0.800 ✗ | 1.1 | 1.0e-03 |" in table  # ours alone
