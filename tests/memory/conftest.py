import pytest

from turbo_rcm_patch.memory import plan
from turbo_rcm_patch.memory.choose import Placement


@pytest.fixture
def everything_streams(monkeypatch):
    """Let the plan stream all models that can, and decode in tiles."""
    monkeypatch.setattr(
        plan, "choose", lambda components, *_: Placement(frozenset(c.name for c in components if c.blocks), tiles=True)
    )
