import copy

import pytest
import torch
from diffusers import WanTransformer3DModel

from scripts.training.embedded.models import build_text_encoder, train_tokenizer
from scripts.training.embedded.optimizers import Learner, Rates, warmup_and_cosine
from scripts.training.embedded.progress import Run

from .test_teacher_and_student import TINY


def learned_by(optimizer, network):
    ours = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return {name for name, weight in network.named_parameters() if id(weight) in ours}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, seed=0)


def learner_of(run, network):
    options = {"warmup": 1, "momentum": 0.9, "betas": (0.0, 0.9), "clip": 10.0}
    return Learner(run, network, Rates(muon=0.01, adamw=0.02), 10, **options)


def test_muon_learns_the_blocks_matrices_and_adamw_the_rest(run):
    text_encoder = build_text_encoder(train_tokenizer())
    for network, blocks in ((WanTransformer3DModel(**TINY), "blocks."), (text_encoder, "encoder.block.")):
        learner = learner_of(run, network)
        matrices = {
            name
            for name, module in network.named_modules()
            if isinstance(module, torch.nn.Linear) and name.startswith(blocks)
        }
        assert learned_by(learner.muon, network) == {f"{name}.weight" for name in matrices}
        everything = {name for name, _ in network.named_parameters()}
        assert learned_by(learner.adamw, network) == everything - {f"{name}.weight" for name in matrices}
        rates = [optimizer.param_groups[0]["lr"].item() for optimizer in (learner.muon, learner.adamw)]
        assert rates == pytest.approx([0.01, 0.02])


def test_a_learner_moves_the_rates_of_both(run):
    learner = learner_of(run, WanTransformer3DModel(**TINY))
    for optimizer in (learner.muon, learner.adamw):
        optimizer.step = lambda: None
    learner.advance()
    learner.advance()
    for optimizer, rate in ((learner.muon, 0.01), (learner.adamw, 0.02)):
        assert 0.9 * rate < optimizer.param_groups[0]["lr"].item() < 0.99 * rate


def test_a_learner_goes_on_from_its_state(run):
    """Moments and learning rates: the next updates of a learner and of one with its state are the same."""

    def new():
        torch.manual_seed(0)
        network = WanTransformer3DModel(**TINY)
        return network, learner_of(run, network)

    def learn(network, learner, steps):
        for step in steps:
            torch.manual_seed(step)
            x, text = torch.randn(1, 2, 2, 4, 4), torch.randn(1, 5, 8)
            learner.learn(network(x, torch.tensor([500.0]), text, return_dict=False)[0].square().sum())
            learner.advance()

    network, learner = new()
    learn(network, learner, range(3))
    twin, other = new()
    twin.load_state_dict(network.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    learn(network, learner, range(3, 6))
    learn(twin, other, range(3, 6))
    for name, weight in twin.state_dict().items():
        torch.testing.assert_close(weight, network.state_dict()[name], rtol=0, atol=0)


def test_learning_rate_rises_and_falls():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = warmup_and_cosine(optimizer, 100, warmup=10)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.01 + 0.99 / 2)
    assert rates[99] < 0.02
