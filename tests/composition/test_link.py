"""One host link for everybody: a backward's reloads pass the optimizer's queue, and no bit depends on the order."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from steppe.compose import Flattened, flatten_peaks
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.runtime import link as links
from steppe.runtime.link import HostLink
from tests.composition.programs import LABELS, ROWS, Seen, own, policies, tokens, whole
from tests.support.exactness import assert_bitwise
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
LAYERS = 4


def _all_four(link: HostLink | None, mesh: MeshShape | None = None, **optimizer: Any) -> Flattened:
    model = toy_model("qwen3_moe", num_hidden_layers=LAYERS).train()
    return flatten_peaks(model, policies(NAMES, optimizer={"max_norm": 1.0, **optimizer}), mesh=mesh, link=link)


def _train(made: Flattened, mine: tuple[slice, slice], optimizer: Any) -> Seen:
    """Two steps of two micro-batches; all weights afterwards."""
    for step in range(2):
        for micro in range(2):
            optimizer.set_is_last_backward(micro == 1)
            ids = tokens(2 * step + micro)[mine]
            made.model(input_ids=ids, labels=ids, num_items_in_batch=2 * LABELS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in made.model.named_parameters()}


def _delayed(seed: int) -> HostLink:
    draw = random.Random(seed)
    return HostLink(CPU, delay=lambda: draw.random() * 0.0005, timeout_s=30)


def _weights(rank: int, world_size: int, seed: int | None, optimizer: dict[str, Any]) -> Seen:
    mesh = MeshShape(world_size, expert=world_size, vocab=world_size)
    made = _all_four(None if seed is None else _delayed(seed + rank), mesh, **optimizer)
    weights = _train(made, own(mesh, rank), made.optimizer(0.01))
    made.close()
    return weights


@pytest.mark.parametrize(
    "optimizer", [{"overlap_backward": True}, {"update": "device", "overlap_backward": True}], ids=["host", "device"]
)
def test_delays_on_the_shared_link_change_no_bit(optimizer: dict[str, Any]) -> None:
    quiet = run_ranks(_weights, 2, None, optimizer)
    late = run_ranks(_weights, 2, 3, optimizer)
    for name, value in quiet[0].items():
        assert_bitwise(late[0][name], value, name)


class _Watched:
    """What each lane of a link still had in its queue when another lane's job was served."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, link: HostLink) -> None:
        self.served: list[tuple[str, dict[str, int]]] = []
        serve = links._ServedLane.serve_head

        def watched(lane: Any) -> None:
            queues = {each.name: len(each.heads) for each in (*lane._server.urgent, *lane._server.ordinary)}
            self.served.append((lane.name, queues))
            serve(lane)

        monkeypatch.setattr(links._ServedLane, "serve_head", watched)

    def overtakes(self, urgent: str, ordinary: str) -> int:
        """How many jobs of one lane were served while the other lane had some waiting."""
        return sum(name == urgent and queues.get(ordinary, 0) > 0 for name, queues in self.served)


def test_a_reload_overtakes_queued_optimizer_traffic_with_all_four(monkeypatch: pytest.MonkeyPatch) -> None:
    link = HostLink(CPU, rate=1e9)
    made = _all_four(link)
    optimizer = made.optimizer(0.01)
    ids = tokens(0)
    loss = made.model(input_ids=ids, labels=ids, num_items_in_batch=LABELS, use_cache=False).loss
    uploads = optimizer._engine.lines.to_device
    watched = _Watched(monkeypatch, link)
    queued = [uploads.run(lambda: time.sleep(0.01), stage="parameters") for _ in range(100)]
    loss.backward()
    assert not queued[-1].done(), "the backward did not wait for the queue's second"
    assert watched.overtakes("boundary in", "parameters") == made.stats()["boundary"].reloads > 0
    made.close()
    assert queued[-1].done(), "closing finishes what is enqueued"


def test_boundaries_leave_before_the_gradients_of_the_micro_batch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients leave during a backward and may still wait when the next forward's boundaries come."""
    link = HostLink(CPU, rate=5e5)  # so slow that gradients still wait on a busy machine, whose forwards take long too
    made = _all_four(link, overlap_backward=True, slots=64)
    optimizer = made.optimizer(0.01)
    watched = _Watched(monkeypatch, link)
    _train(made, (slice(0, ROWS), slice(None)), optimizer)
    assert watched.overtakes("boundary out", "gradients") > 0
    assert watched.overtakes("gradients", "boundary out") == 0, "an ordinary copy went before a waiting boundary"
    made.close()
