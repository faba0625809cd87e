"""The storm: more sessions than fit on the device, on a small model. Counts, not times."""

import pytest

from holdfast.bench.loops import open_loop, open_model
from holdfast.bench.small_models import saved_small_model
from holdfast.bench.storm import Storm, host_room, storm

SHAPE = Storm(sessions=12, history=96, clients=4, turns=36, said=6, answer=6)
OPTIONS = {
    "page_size": 8,
    "kv_tokens": 640,
    "window_tokens": 640,
    "state_slots": 12,
    "session_tokens": SHAPE.tokens_max,
    "checkpoints": 0,
    "leave_history": False,
}


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_no_history_is_computed_again_and_what_is_on_the_host_stays_there(layout: str) -> None:
    with saved_small_model(layout) as path:
        model = open_model(path, "cpu", "float32", dummy=False)
    host, sessions = host_room(model, SHAPE, **OPTIONS)
    assert sessions == SHAPE.sessions
    loop = open_loop(model, False, **OPTIONS, host_memory=host)
    figures = storm(loop, SHAPE)
    assert figures["turns/s"] > 0 and figures["longest pause"] >= figures["usual pause"]
    assert figures["tokens computed per turn"] <= SHAPE.said + SHAPE.answer
    assert figures["sessions dropped"] == figures["turns retracted"] == 0
    assert figures["sessions that left"] > 12, "they do not fit"
    if layout == "dense":
        # A turn adds two pages to twelve; a session that never was on the host leaves whole, once.
        assert figures["bytes to the host"] < 0.6 * figures["bytes to the device"]
    assert loop.scheduler.recount() == []
    assert all(len(pool.free) == pool.size for pool in loop.scheduler.registry.ledger.pools.values())
