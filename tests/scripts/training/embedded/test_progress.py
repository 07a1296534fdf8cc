import math

import pytest
import torch

from scripts.training.embedded.optimizers import warmup_and_cosine
from scripts.training.embedded.progress import Average, GraphedStep, OutOfTime, Run, Stage


def train(folder, minutes=math.inf):
    """Ten noisy steps of a small regression; returns its weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = warmup_and_cosine(optimizer, 10, warmup=3)
    average = Average(model, 0.9)
    run = Run(folder, seed=1, minutes=minutes)
    stage = Stage(run, "line", 10, model=model, optimizer=optimizer, schedule=schedule, average=average)
    for step in stage.steps():
        x = torch.randn(4, 3)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update(model, step)
        stage.record(loss=loss)
    return [*model.parameters(), *average.parameters()], run


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path):
    whole, _ = train(tmp_path / "whole")
    interruptions = 0
    while True:
        try:
            pieces, run = train(tmp_path / "pieces", minutes=0)
            break
        except OutOfTime:
            interruptions += 1
    assert interruptions == 10
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    assert run.last_log("line")["step"] == 10
    assert not run.has_logged("other")


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    with pytest.raises(OutOfTime):
        train(tmp_path, minutes=0)
    stage = Stage(Run(tmp_path, seed=2), "line", 10)
    with pytest.raises(ValueError, match=r"line.pt is of a run with {'seed': 1, 'steps': 10}.*--output"):
        next(stage.steps())


def test_a_folder_exists_only_when_it_is_whole(tmp_path):
    class Failing:
        def save_pretrained(self, folder):
            folder.mkdir()
            (folder / "half").touch()
            raise OSError("disk full")

    class Fine:
        def save_pretrained(self, folder):
            folder.mkdir()
            (folder / "whole").touch()

    run = Run(tmp_path, seed=0)
    with pytest.raises(OSError, match="disk full"):
        run.save(Failing(), "model")
    assert not (tmp_path / "model").exists()
    run.save(Fine(), "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_another_seed_draws_other_data(tmp_path):
    def first_draw(seed):
        return next(torch.rand(1) for _ in Stage(Run(tmp_path, seed), "draw", 1).steps())

    assert torch.equal(first_draw(1), first_draw(1))
    assert not torch.equal(first_draw(1), first_draw(2))


def test_average_starts_as_a_mean_and_ends_exponential():
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0)
        average = Average(model, 0.5)
        model.weight.fill_(1)
        average.update(model, 0)
        assert average.module.weight.item() == pytest.approx(1 - 1 / 10)
        average.update(model, 1000)
    assert average.module.weight.item() == pytest.approx(1 - 1 / 20)
    assert not average.module.weight.requires_grad


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphed_step_does_what_the_step_does(place):
    def updates(wrap):
        weight = torch.ones(4, device=place)

        def step(x):
            weight.mul_(0.5).add_(x)
            return weight.sum(), x * 2

        step, results = wrap(step), []
        for k in range(8):
            results.append(torch.cat([part.flatten() for part in step(torch.full((4,), float(k), device=place))]))
        return torch.stack(results)

    expected, actual = updates(lambda step: step), updates(GraphedStep)
    # The weight starts elsewhere after the three calls that warm up, and forgets half of that with every step.
    assert torch.equal(actual[:, 1:], expected[:, 1:])
    distance = (actual - expected)[:, 0].abs()
    assert torch.equal(distance[1:], distance[:-1] / 2)
