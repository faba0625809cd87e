"""Faults of a world: crashes, pauses, partitions, drains, scaling, hand-overs, failovers.

Faults come at random moments and end by themselves; `stop` ends all of them, so that the end of a run shows
whether every session is served again. Used by the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.cluster.ownership import Offer
from holdfast.sim.cluster.replica import Replica

if TYPE_CHECKING:
    from holdfast.sim.cluster.world import World

__all__ = ["Faults"]

PAUSE_SECONDS = (0.5, 20.0)
CUT_SECONDS = (0.5, 15.0)
FAILOVER_SECONDS = (0.2, 3.0)
SKEW_SECONDS = 6.0
SEIZED = 6
"""How many sessions an operator moves at once."""


class Faults:
    """The faults of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopped = False
        self.kinds: tuple[tuple[float, str, Callable[[Replica], None]], ...] = (
            (0.15, "crash", self._crash),
            (0.15, "pause", self._pause),
            (0.10, "cut from store", self._cut_from_store),
            (0.10, "cut from clients", self._cut_from_front),
            (0.12, "drain", self._drain),
            (0.05, "scale down", self._scale_down),
            (0.05, "scale up", self._scale_up),
            (0.18, "hand over", self._hand_over),
            (0.08, "seize", self._seize),
            (0.02, "failover", self._fail_over),
        )
        self.counts = {name: 0 for _, name, _ in self.kinds}

    def start(self) -> None:
        """Let faults come."""
        rate = self.world.options.faults
        if rate > 0:
            self._schedule(rate)

    def _schedule(self, rate: float) -> None:
        wait = self.world.events.dice.expovariate(rate)
        self.world.events.after(wait, self._strike, rate)

    def stop(self) -> None:
        """End every fault; no more come."""
        self.stopped = True
        self.world.store.down = False
        for replica in self.world.replicas:
            replica.cut_from_store = replica.cut_from_front = False
            replica.resume()

    def _strike(self, rate: float) -> None:
        if self.stopped:
            return
        events, replicas = self.world.events, self.world.replicas
        dice = events.chance()
        for share, name, strike in self.kinds:
            dice -= share
            if dice < 0:
                self.counts[name] += 1
                strike(replicas[int(events.chance() * len(replicas))])
                break
        self._schedule(rate)

    def _crash(self, replica: Replica) -> None:
        if replica.owner is not None:
            replica.restart()

    def _pause(self, replica: Replica) -> None:
        if replica.owner is not None and not replica.paused:
            replica.paused = True
            self.world.events.after(self.world.events.between(*PAUSE_SECONDS), replica.resume)

    def _cut_from_store(self, replica: Replica) -> None:
        replica.cut_from_store = True
        self.world.events.after(self.world.events.between(*CUT_SECONDS), self._heal_store, replica)

    @staticmethod
    def _heal_store(replica: Replica) -> None:
        replica.cut_from_store = False

    def _cut_from_front(self, replica: Replica) -> None:
        replica.cut_from_front = True
        self.world.events.after(self.world.events.between(*CUT_SECONDS), self._heal_front, replica)

    @staticmethod
    def _heal_front(replica: Replica) -> None:
        replica.cut_from_front = False

    def _drain(self, replica: Replica) -> None:
        """A rolling update: drained, ended, and started again."""
        replica.drain(leave=False)

    def _scale_down(self, replica: Replica) -> None:
        serving = sum(each.owner is not None and not each.draining for each in self.world.replicas)
        if serving > max(2, self.world.options.replicas // 2):
            replica.drain(leave=True)

    def _scale_up(self, _replica: Replica) -> None:
        serving = sum(not each.leaving for each in self.world.replicas)
        if serving < 2 * self.world.options.replicas:
            self.world.add_replica()

    def _hand_over(self, replica: Replica) -> None:
        self.world.rebalance(replica)

    def _seize(self, replica: Replica) -> None:
        """An operator moves sessions away from a replica that does not hear of it."""
        owner, loads = replica.owner, self.world.others(replica, 1)
        if owner is None or not loads or self.world.store.down:
            return
        rows = self.world.store.rules.sessions
        names = [name for name in owner.sessions if name in rows and rows[name].owner == owner.life]
        offers = [
            Offer(name, rows[name].epoch, rows[name].commits, loads[0].life) for name in names[-SEIZED:]
        ]
        self.world.store.hand_over(owner.life, offers)

    def _fail_over(self, _replica: Replica) -> None:
        """Statements and answers are lost for a while; the clock of the new primary differs."""
        store, events = self.world.store, self.world.events
        if not store.down:
            store.down = True
            events.after(events.between(*FAILOVER_SECONDS), self._recover, events.between(-1, 1))

    def _recover(self, skew: float) -> None:
        self.world.store.down = False
        self.world.store.skew = SKEW_SECONDS * skew
