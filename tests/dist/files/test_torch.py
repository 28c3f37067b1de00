"""Files in a job of torch: over its process group, and beside a training on two nodes."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from ddp_ckpt.torch_group import TorchGroup
from tierckpt.files import Files

MANY_BYTES = 4_000_000


def place(root: Path, node: int) -> dict[str, Any]:
    """Settings of the only rank on a node."""
    shm = root / f"n{node}" / "shm"
    shm.mkdir(parents=True, exist_ok=True)
    return {
        "job_id": "job",
        "node": f"n{node}",
        "shm_dir": shm,
        "local_every_steps": 1,
        "when_busy": "wait",
        "peer_redundancy": "partner",
    }


def content(number: int, rank: int) -> bytes:
    return bytes([number, rank]) * (MANY_BYTES // 2)


def files_over_the_group(root: Path, last: int) -> tuple[int, dict[str, int]]:
    rank = dist.get_rank()
    with Files(root / "{node}" / "ckpts", group=TorchGroup(), **place(root, rank)) as files:
        found = files.restore()
        start = found.number if found else 0
        if found:
            assert Path(found[f"x{rank}"]).read_bytes() == content(start, rank)
        for number in range(start + 1, last + 1):
            with files.version(number) as f:
                Path(f.route(f"x{rank}")).write_bytes(content(number, rank))
            assert f.complete
    return start, found.levels if found else {}


def test_files_over_a_process_group_and_a_lost_node(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(files_over_the_group, tmp_path, 2) == [(0, {})] * 2
    shutil.rmtree(tmp_path / "n1")
    rebuilt = {"local": 1, "peer": 1}
    assert ranks(2).run(files_over_the_group, tmp_path, 3) == [(2, rebuilt)] * 2


def training(root: Path, last: int) -> tuple[int, int]:
    """Where it started, and the size of the largest object that this rank gathered until then."""
    sizes, rank, gather = [0], dist.get_rank(), TorchGroup.all_gather_object

    def counting(group: TorchGroup, value: Any) -> list[Any]:
        sizes.append(len(pickle.dumps(value)))
        return gather(group, value)

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = DistributedDataParallel(model)
    path = root / "{node}" / "ckpts"
    given = place(root, rank if last == 3 else 1 - rank)
    with (
        mock.patch.object(TorchGroup, "all_gather_object", counting),
        ddp_ckpt.Checkpointer(model, optimizer, path=path, **given) as ckpt,
    ):
        start = int(ckpt.restore())
        gathered = max(sizes)
        there = {name: Path(file).read_bytes() for name, file in ckpt.restored_files.items()}
        assert there == ({f"x{rank}": content(2, rank), "empty": b""} if start else {})
        for number in range(start + 1, last + 1):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if number == 2:
                with ckpt.files() as f:
                    Path(f.route(f"x{rank}")).write_bytes(content(2, rank))
                    Path(f.route("empty")).touch()
            ckpt.step()
    return start, gathered


def test_files_beside_a_training_come_in_windows(ranks: Any, tmp_path: Path) -> None:
    """Nodes change places, so each rank's files come from the other one: not as one object, of
    which every rank would have those of all."""
    ranks(2).run(training, tmp_path, 3)
    for start, gathered in ranks(2).run(training, tmp_path, 4):
        assert start == 3
        assert gathered < MANY_BYTES // 10
