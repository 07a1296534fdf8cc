"""scripts/benchmarks/exchange.py in two processes, over gloo."""

import json

import pytest
import torch

from scripts.benchmarks import exchange
from scripts.tools.pages.ops import exchange_table
from tests.ranks import start_on_cpu, use_one_thread


def one_process(rank, arguments, rendezvous):
    use_one_thread()
    check, exchange.ROUNDS = exchange.parts_of, 1

    def parts_of(options, device):
        parts = check(options, device)
        for name in ("the whole", "the whole in 8 bits"):
            first, second = parts[f"{name}, by halves of the heads"]()
            halves = torch.cat([half.unflatten(2, (2, -1)) for half in (first, second)], 3).flatten(2, 3)
            torch.testing.assert_close(halves, parts[name]())
        return parts

    exchange.parts_of = parts_of
    exchange.measure_in_parallel(rank, exchange.parse_options(arguments), rendezvous)


def test_every_part_is_timed(tmp_path):
    arguments = ["--heads", "4", "--tokens", "64", "--head-dim", "64", "--json", str(tmp_path / "exchange.json")]
    start_on_cpu(one_process, arguments, f"file://{tmp_path}/rendezvous")
    figures = json.loads((tmp_path / "exchange.json").read_text())
    assert figures["settings"] == {"ulysses": 2, "heads": 4, "tokens": 64, "head_dim": 64}
    assert len(figures["milliseconds"]) == 15
    page = exchange_table(figures)
    assert "| self-attention of 4×64×64 on 2 GPUs | ms |" in page
    assert len(page.splitlines()) == 2 + 15
    assert all(value > 0 for value in figures["milliseconds"].values())


def test_heads_that_do_not_divide(capsys):
    with pytest.raises(SystemExit):
        exchange.main(["--ulysses", "5"])
    assert "--heads 12 cannot be divided by --ulysses 5" in capsys.readouterr().err
