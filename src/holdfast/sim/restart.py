"""Restart after a kill: a new core begins with the durable state.

A turn is durable before its client receives its end, so every session comes back exactly as its client knows
it, and turns in flight are discarded. One-shot requests and volatile sessions are lost. Some sessions have
a file with the memory of their first tokens, up to the end of some turn; the others have their tokens alone
and compute them again. Called by the world.
"""

from __future__ import annotations

from random import Random

from holdfast.core.layout import Component, Tier
from holdfast.core.scheduler import Scheduler
from holdfast.core.turn import TurnRequest
from holdfast.sim.clients import Clients
from holdfast.sim.device import NOTHING, SimDevice
from holdfast.sim.reference import Conversation

HAVE_A_FILE = 0.6


def come_back(clients: Clients, scheduler: Scheduler, device: SimDevice, now: float, rng: Random) -> None:
    """Recover the sessions of all clients, without their turns in flight."""
    clients.scheduler = scheduler
    for waits in (clients.ending, clients.closing):
        waits.clear()
    for roster in (clients.busy, clients.listeners):
        for name in list(roster):
            roster.discard(name)
    for name, conversation in list(clients.conversations.items()):
        if name not in clients.sessions or conversation.volatile:
            clients.lose(name)
            continue
        conversation.come_back()
        history = [
            (TurnRequest(f"{name} {number}", tuple(said_in), max(1, len(said_out))), said_out)
            for number, (said_in, said_out) in enumerate(conversation.turns())
        ]
        session = scheduler.recover(name, conversation.tenant, now, conversation.retention, history)
        conversation.rested_at = scheduler.registry.now
        if conversation.boundaries and rng.random() < HAVE_A_FILE:
            _find_file(conversation, scheduler, device, rng.choice(conversation.boundaries))
        clients.compare(session)


def _find_file(conversation: Conversation, scheduler: Scheduler, device: SimDevice, length: int) -> None:
    """There is a file with the memory of a session's first `length` tokens."""
    disk = [scheduler.registry.ledger.pools.get((component, Tier.DISK)) for component in Component]
    if not any(disk) or not scheduler.adopt(conversation.session_id, length):
        return
    parcel = scheduler.registry.find(conversation.session_id).parcel
    assert parcel is not None, "what was adopted lies in a parcel"
    page_size, contents = device.layout.page_size, conversation.contents
    for component, hold in parcel.away.items():
        pool = (component, Tier.DISK)
        if component is Component.STATE:
            device.write_unit(pool, hold.units[0], [contents[length]])
            continue
        first = device.layout.window_first_page(length) if component is Component.WINDOW else 0
        for page, unit in enumerate(hold.units, first):
            cells = contents[page * page_size + 1 : min((page + 1) * page_size, length) + 1]
            device.write_unit(pool, unit, cells + [NOTHING] * (page_size - len(cells)))
