"""Reads the file that W&B writes in its offline mode, and which `wandb sync` uploads.

It has a header of 7 bytes and then the blocks of a LevelDB log: 32 KiB each, of parts with a header of 7 bytes
(checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last). Every record is a protobuf message.
"""

import json
import struct
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK, PART = 7, 32 * 1024, 7


def records(path: Path) -> list[Record]:
    data, at, whole, found = path.read_bytes(), HEADER, b"", []
    while at + PART <= len(data):
        left = BLOCK - at % BLOCK
        if left < PART:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + PART])
        at += PART
        whole += data[at : at + length]
        at += length
        if kind in (1, 4):
            found.append(Record.FromString(whole))
            whole = b""
    return found


def run_of(path: Path) -> tuple[str, str, str]:
    run = next(record.run for record in records(path) if record.HasField("run"))
    return run.run_id, run.project, run.display_name


def history(path: Path) -> list[dict]:
    rows = [record.history.item for record in records(path) if record.HasField("history")]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
