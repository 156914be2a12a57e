"""Threads are not forked: the child of a fork is told so instead of waiting for them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent("""
    import os, signal, torch
    from torch import nn
    from steppe.core.errors import SteppeError
    from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW

    def refused(enter):
        try:
            enter()
        except SteppeError as error:
            return "make the optimizer in the child" in str(error)
        return False

    def made(**settings):
        held = [nn.Parameter(torch.ones(3))]
        return held, OffloadStreamAdamW(held, **settings)

    def step(held, optimizer):
        held[0].grad = torch.ones(3)
        optimizer.step()
        return True

    held, optimizer = made(threads=2)
    parted, early = made(threads=1, overlap_backward=True)
    step(held, optimizer)
    early.materialize()
    unopened = made(threads=1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # whoever waits for a thread that isn't there is ended
        seen = (
            refused(lambda: step(held, optimizer)), refused(optimizer.materialize),
            refused(lambda: parted[0].sum().backward()), step(*unopened), step(*made(threads=1)),
            optimizer.state_dict()["state"][0]["step"].item() == 1.0,
        )
        print(seen, flush=True)
        os._exit(0 if all(seen) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert step(held, optimizer), "the parent goes on"
""")


def test_a_forked_child_is_refused_at_once_and_may_make_its_own() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
