"""A process that is killed while it appends a part to the file of a session, or before the part has a row.

    python -m tests.engine.part_victim DIRECTORY PATH POINT

It prints how many tokens the file holds that has a row.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from holdfast.engine.tiers.files import SnapshotFiles
from holdfast.engine.tiers.writing import SnapshotWriter
from tests.engine.test_disk_parts import long_session
from tests.engine.test_disk_tier import options, talk, to_disk
from tests.engine.tiny import tiny_engine


def die(*_: object) -> None:
    """End at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class HalfPart(SnapshotFiles):
    """A disk on which the process dies in the middle of what it writes."""

    def put(self, descriptor: int, content: bytes) -> None:
        super().put(descriptor, content[: len(content) // 2])
        die()


def main() -> None:
    directory, path, point = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    engine = tiny_engine(directory, **options(path))
    session = long_session(engine)
    to_disk(engine)
    talk(session, range(1, 2))
    assert engine.loop.disk is not None
    store = engine.loop.disk.store
    os.write(1, str(store.snapshots["s"].length).encode())
    if point == "half a part":
        store.files.close()
        store.files = HalfPart(path / "disk")
    else:
        SnapshotWriter.finish = die  # type: ignore[method-assign]
    to_disk(engine)


if __name__ == "__main__":
    main()
