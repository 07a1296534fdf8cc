import pytest
import torch

from scripts.training.embedded.muon import Muon

SHAPES = ((24, 24), (24, 24), (48, 16), (16, 48))


def test_it_is_the_muon_of_torch():
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    muon = Muon(ours, torch.tensor(0.02), momentum=0.95, weight_decay=0.1)
    oracle = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        before = [weight.detach().clone() for weight in theirs]
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.clone()
        muon.step()
        oracle.step()
        for weight, other, old in zip(ours, theirs, before, strict=True):
            assert (weight - other).norm() < 0.02 * (other - old).norm()


@pytest.mark.gpu
def test_a_graph_of_it_follows_the_learning_rate():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(32, 32, device="cuda"))
    weight.grad = torch.randn_like(weight)
    rate = torch.tensor(0.1, device="cuda")
    muon = Muon([weight], rate, momentum=0.95, weight_decay=0.0)
    muon.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        muon.step()
    moves = []
    for value in (0.1, 0.0, 0.2):
        rate.fill_(value)
        before = weight.detach().clone()
        graph.replay()
        moves.append((weight - before).norm().item())
    assert moves[0] > 0
    assert moves[1] == 0
    assert moves[2] == pytest.approx(2 * moves[0], rel=0.05)
