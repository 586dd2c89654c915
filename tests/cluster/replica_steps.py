"""Three replicas of one rank each, of which one dies at a chosen place of a step:

    python -m tests.cluster.replica_steps WHERE ...

WHERE: before (it exchanges nothing), between (it has told, and sends no gradients), one, two (it has the mean, and has
told so one of the others, or both). Prints for each, as JSON, what each survivor has after each step: [replicas, loss,
a sum of weights].
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import launcher
from launcher.cluster.coordinator import Coordinator
from launcher.cluster.membership import Membership
from launcher.cluster.node_spec import MEMORY_VARIABLE
from launcher.replica import ADDRESS, REPLICA, REPLICAS, SECRET
from launcher.replica_run import ReplicaRun

STEPS, DIES_IN, VICTIM = 6, 3, 1


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def die_at(where: str, replica: ReplicaRun) -> None:
    """Let the next step end this process."""
    group: Any = replica.group

    def leave(*_: Any, **__: Any) -> Any:
        os._exit(9)

    def tell_some() -> bool:
        transport = group._transport
        number = transport.numbers.gather()
        heard = [transport.group.recv([torch.ones(1)], peer, number) for peer in transport.peers]
        for peer in transport.peers[: {"one": 1, "two": 2}[where]]:
            transport.group.send([torch.ones(1)], peer, number).wait()
        for work in heard:
            work.wait()
        os._exit(9)

    if where == "before":
        group.swap = leave
    elif where == "between":
        group.weighted_sums = leave
    else:
        replica._all_have_it = tell_some  # type: ignore[method-assign]


def train(number: int, where: str) -> list[list[float]]:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "fault_tolerance": {"replicas": 3, "timeout_s": 20},
    }
    engine = launcher.initialize(model=Small(), config=config, device=torch.device("cpu"))[0]
    engine.saver.steps_alone_change = True
    replica = ReplicaRun(engine)
    replica.join(lambda: None, lambda _: None, print)
    made = []
    for step in range(STEPS):
        replica.admit(dict)
        torch.manual_seed(100 * step + number)
        loss = engine(torch.randn(1, 5))
        engine.backward(loss)
        replica.begin_step(float(loss.detach()), 1 + number, stops=False)
        if step == DIES_IN and number == VICTIM:
            die_at(where, replica)
        engine.step()
        weights = sum(float(p.detach().double().sum()) for p in engine.module.parameters())
        made.append([replica.told.members, replica.told.loss, weights])
    return made


def run(where: str) -> list[list[list[float]]]:
    server, secret = socket.create_server(("127.0.0.1", 0)), secrets.token_hex(16)
    os.environ |= {ADDRESS: f"127.0.0.1:{server.getsockname()[1]}", SECRET: secret, REPLICAS: "3"}
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for number in range(3):
            if (child := os.fork()) == 0:
                memory = Path(scratch) / f"memory{number}"
                memory.mkdir()
                os.environ |= {REPLICA: str(number), MEMORY_VARIABLE: str(memory)}
                (Path(scratch) / f"{number}.json").write_text(json.dumps(train(number, where)))
                os._exit(0)
            children.append(child)
        Coordinator(server, secret, Membership(3, 1, answer_s=20.0))
        for child in children:
            os.waitpid(child, 0)
        return [json.loads((Path(scratch) / f"{number}.json").read_text()) for number in (0, 2)]


if __name__ == "__main__":
    print(json.dumps({where: run(where) for where in sys.argv[1:]}))
