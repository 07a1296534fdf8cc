"""compare() in two processes, with diffusers' Ulysses context parallelism over gloo."""

import json

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from scripts.benchmarks import end_to_end, exchange
from scripts.tools.pages.charts import names_of
from tests.ranks import start_on_cpu, use_one_thread

TOKENS = 12  # of the tiny case's video


def one_process(rank, arguments, rendezvous, folder):
    """One rank; writes which of its calls of a block were patched, and how many tokens they had."""
    seen, call = [], torch.nn.Module.__call__

    def seen_call(module, *args, **kwargs):
        if type(module) is WanTransformerBlock:
            seen.append(("forward" in vars(module), args[0].shape[1]))
        return call(module, *args, **kwargs)

    use_one_thread()
    torch.accelerator.device_count = lambda: 2  # diffusers counts GPUs to name a device, and there may be none
    torch.nn.Module.__call__ = seen_call
    script = end_to_end
    script.measure_in_parallel(rank, script.parse_options(arguments), rendezvous)
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


def test_two_processes_compare_and_one_reports(tmp_path):
    arguments = ["--config", "tiny", "--ulysses", "2", "--steps", "1", "--repeats", "1", "--no-compile", "--decode"]
    arguments += ["--preset", "exact", "quantized", "--without-graphs", "--json", str(tmp_path / "figures.json")]
    start_on_cpu(one_process, arguments, f"file://{tmp_path}/rendezvous", tmp_path)
    by_preset = json.loads((tmp_path / "figures.json").read_text())
    figures, in_8_bits = by_preset["exact"], by_preset["quantized"]["variants"][1]
    assert 1e-3 < in_8_bits["step_error"] < 0.1
    unpatched, patched, without_graphs = figures["variants"]
    assert names_of(figures)[without_graphs["name"]] == end_to_end.WITHOUT_GRAPHS
    assert without_graphs["latents"]["relative_l2"] <= 1e-6
    assert figures["settings"]["ulysses"] == 2
    assert unpatched["step_error"] <= 1e-6  # fp32 against fp32 of the whole sequence
    assert patched["step_error"] <= 1e-6
    assert patched["latents"]["relative_l2"] <= 1e-6
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert [False, TOKENS] in seen  # the call whose inputs the oracle gets
        for is_patched in (False, True):
            assert [is_patched, TOKENS // 2] in seen  # the second block; the first one splits its input itself


@pytest.mark.parametrize(("script", "work"), [(end_to_end, "measure_presets"), (exchange, "measure")])
def test_a_process_that_fails_does_not_end_the_group(script, work, monkeypatch):
    """NCCL's end waits for the other processes, which wait for this one. So it would never tell the error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # there may be one GPU
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: pytest.fail("waits for the others"))
    monkeypatch.setattr(script, work, lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.measure_in_parallel(1, script.parse_options(["--ulysses", "2"]), "file:///nowhere")
