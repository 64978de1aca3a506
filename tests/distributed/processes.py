"""Two ranks, started once for many checks: each check is a function of the mesh that both ranks run in step."""

from __future__ import annotations

import datetime
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Check = Callable[[DeviceMesh], Any]
RANKS = 2
_LONGEST = 300  # seconds


def run(checks: dict[str, Check]) -> dict[str, list[Any]]:
    """What each check returned on each rank; an exception comes as its traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    started = [context.Process(target=_rank, args=(rank, port, checks, queue)) for rank in range(RANKS)]
    for process in started:
        process.start()
    try:
        found = dict(queue.get(timeout=_LONGEST) for _ in started)  # a rank that was killed puts nothing
        for process in started:
            process.join()
    finally:
        for process in started:
            process.kill()
    return {name: [found[rank][name] for rank in range(RANKS)] for name in checks}


def _rank(rank: int, port: int, checks: dict[str, Check], queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            torch.manual_seed(0)
            found[name] = check(mesh)
        except Exception:
            found[name] = traceback.format_exc()
    queue.put((rank, found))
    dist.destroy_process_group()
