"""Jobs that start in a second: a process that has imported everything forks launchers, which fork the ranks.

`python -m tests.training.zygote` reads one JSON command a line and answers with one: {"start": run.toml, "ranks": 2}
gives {"launcher": pid, "ranks": [pids]}; {"wait": launcher pid} gives {"status": exit status}. A launcher ends all
ranks when one fails, as torchrun does, and leaves them alive when it is killed, as torchrun does too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class Zygote:
    """The parent's side: start jobs, kill them, wait for them."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.zygote"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def serve() -> None:
    import torch
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    import steppe.training.launch

    assert steppe.training.launch and transformers  # imported for the forks
    torch.set_num_threads(1)
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            answer = _start(command["start"], command["ranks"])
        else:
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1])}
        print(json.dumps(answer), flush=True)


def _start(path: str, ranks: int) -> dict[str, Any]:
    reader, writer = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        _launcher(path, ranks, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return {"launcher": launcher, "ranks": json.loads(pipe.readline())}


def _launcher(path: str, ranks: int, writer: int) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            _rank(path, rank, ranks, port)
        pids.append(pid)
    os.write(writer, (json.dumps(pids) + "\n").encode())
    os.close(writer)
    failed = 0
    for _ in pids:
        pid, status = os.wait()
        if status and not failed:
            failed = 1
            for other in pids:
                if other != pid:
                    try:
                        os.kill(other, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
    os._exit(failed)


def _rank(path: str, rank: int, ranks: int, port: int) -> None:
    from steppe.training.launch import train

    os.setsid()  # as torch's agent does
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.stdout = sys.stderr
    code = 1
    try:
        code = train(path, environment=os.environ)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
