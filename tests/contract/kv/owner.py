"""A process that owns a KV pool, for the contract tests. One JSON answer per line of stdin."""

import json
import os
import sys

import numpy as np

from app.kv import KVPool

NUM_BLOCKS, BLOCK_BYTES = 8, 64 * 1024


def main() -> None:
    incarnation, layout = sys.argv[1:]
    pool = KVPool.create(NUM_BLOCKS, BLOCK_BYTES, incarnation, layout)
    pool.blocks[:] = np.random.default_rng(11).integers(0, 256, pool.blocks.shape, np.uint8)
    print(pool.location().model_dump_json(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = None
        if command == "commit":
            blocks = [int(block) for block in arguments]
            digests = [digest.hex() for digest in pool.digest(blocks)]
            answer = {"generations": pool.generations[blocks].tolist(), "digests": digests}
        elif command == "reuse":
            pool.bump(int(arguments[0]))
            pool.blocks[int(arguments[0])] += np.uint8(1)
        elif command == "flip":
            pool.blocks[int(arguments[0]), -1] ^= np.uint8(1)
        elif command == "churn":  # give block 0 to new uses, again and again
            for _ in range(int(arguments[0])):
                pool.bump(0)
                pool.blocks[0] += np.uint8(1)
        elif command == "close":
            pool.close()
        elif command == "impostor":  # a file where a pool could be
            answer = {"fd": impostor(arguments[0], pool)}
        print(json.dumps(answer), flush=True)


def impostor(kind: str, pool: KVPool) -> int:
    location = pool.location()
    whole = os.pread(location.fd, os.fstat(location.fd).st_size, 0)
    if kind == "pipe":
        return os.pipe()[0]
    name = "something" if kind == "other-name" else "baton-kv"
    fd = os.memfd_create(name)
    content = {"truncated": whole[:-1], "garbage": os.urandom(len(whole)), "empty": b""}.get(kind, whole)
    os.write(fd, content)
    return fd


if __name__ == "__main__":
    main()
