"""scripts/benchmarks/exchange.py in two processes, over gloo."""

import json

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import exchange
from scripts.tools.pages.ops import exchange_table
from tests.ranks import start_on_cpu, use_one_thread


def one_process(rank, arguments, rendezvous):
    use_one_thread()
    torch.manual_seed(rank)
    check, exchange.ROUNDS = exchange.parts_of, 1

    def parts_of(options, device):
        parts = check(options, device)
        for name in ("the whole", "the whole in 8 bits"):
            first, second = parts[f"{name}, by halves of the heads"]()
            halves = torch.cat([half.unflatten(2, (2, -1)) for half in (first, second)], 3).flatten(2, 3)
            torch.testing.assert_close(halves, parts[name]())
        sent = torch.cat(parts["project one by one, each sent beside the next"](), 2)
        torch.testing.assert_close(sent, parts["project, then exchange"]())
        check_8_bits(rank, parts)
        return parts

    exchange.parts_of = parts_of
    exchange.measure_in_parallel(rank, exchange.parse_options(arguments), rendezvous)


def check_8_bits(rank, parts):
    """Both ways give the same q. Before the exchange, k and v are those that each GPU put in 8 bits."""
    names = [f"norm to 8 bits {when} the exchange" for when in ("after", "before")]
    after, before, own = (parts[name]()._asdict() for name in (*names, "norm, RoPE and 8 bits of a GPU's tokens"))
    for name in (*exchange.SENT, "v_scale"):
        assert before[name].is_contiguous()
        assert (before[name].shape, before[name].dtype) == (after[name].shape, after[name].dtype)
    assert torch.equal(before["q"], after["q"])
    torch.testing.assert_close(before["q_scale"], after["q_scale"])
    for name, (heads, tokens) in exchange.SENT.items():
        part, whole = (x.view(torch.int8) if x.element_size() == 1 else x for x in (own[name], before[name]))
        of_all = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(of_all, part)
        assert torch.equal(whole, torch.cat([other.chunk(2, heads)[rank] for other in of_all], tokens)), name


def test_every_part_is_timed(tmp_path):
    arguments = ["--heads", "4", "--tokens", "256", "--head-dim", "64", "--json", str(tmp_path / "exchange.json")]
    start_on_cpu(one_process, arguments, f"file://{tmp_path}/rendezvous")
    figures = json.loads((tmp_path / "exchange.json").read_text())
    assert figures["settings"] == {"ulysses": 2, "heads": 4, "tokens": 256, "head_dim": 64}
    assert len(figures["milliseconds"]) == 26
    page = exchange_table(figures)
    assert "| self-attention of 4×256×64 on 2 GPUs | ms |" in page
    assert len(page.splitlines()) == 2 + 26
    assert all(value > 0 for value in figures["milliseconds"].values())


def test_heads_that_do_not_divide(capsys):
    with pytest.raises(SystemExit):
        exchange.main(["--ulysses", "5"])
    assert "--heads 12 cannot be divided by --ulysses 5" in capsys.readouterr().err


def test_no_gpus(capsys):
    with pytest.raises(SystemExit):
        exchange.main(["--ulysses", "0"])
    assert "--ulysses 0: give 1 or more." in capsys.readouterr().err
