"""Few threads, and the processes of ranks as forks."""

from tests.few_threads import few_threads
from tests.ranks.forked import forked_ranks, recording_ranks

__all__ = ["few_threads", "forked_ranks", "recording_ranks"]
