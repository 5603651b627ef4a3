"""A process that writes shards or publishes versions without end, for tests that kill it."""

import sys
from pathlib import Path

from adaflash.engine.learning.buffer import Buffer
from adaflash.engine.learning.versions import publish
from adaflash.engine.trajectories import Trajectory

PART_BYTES = 20_000


def write_shards(folder: Path) -> None:
    """Every text is its own number over and over."""
    buffer = Buffer(folder / "buffer", max_bytes=300_000, max_age_s=60)
    number = 0
    while True:
        texts = []
        for _ in range(8):
            number += 1
            texts.append(Trajectory(f"t{number}", "d", (number,) * 500, 10, (number % 500,)))
        buffer.write(texts)


def publish_versions(folder: Path) -> None:
    """Every version is three files that say the same."""
    number = 0
    while True:
        number += 1

        def fill(scratch: Path, content: bytes = b"%08d" % number) -> None:
            for name in ("a", "b", "c"):
                (scratch / name).write_bytes(content * (PART_BYTES // 8))

        publish(folder, fill, keep=3)


if __name__ == "__main__":
    {"shards": write_shards, "versions": publish_versions}[sys.argv[1]](Path(sys.argv[2]))
