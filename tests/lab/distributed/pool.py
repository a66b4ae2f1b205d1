"""A pool with one process for each rank. It is started once for all tests, since importing torch takes seconds."""

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

from waits import slowdown

#: Longest time of one case, in seconds on an idle machine; the start of the ranks does not count. A rank that hangs takes its
#: pool with it.
LIMIT = 60.0
#: Imported once, before the ranks are forked; DDP and FSDP import torch._dynamo when they first run.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
PRELOAD += ["transformers", "torchrl_llm_kl.losses", "torchrl_llm_kl.transforms"]


class RankPool:
    """Runs functions ``module:function`` on several ranks at once, each as ``function(**arguments)``."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._cases = 0
        self._workers = []

    def run(self, function, *, ranks=2, **arguments):
        """The result of each rank. Raises the first error of a rank, or a TimeoutError after ``LIMIT`` seconds."""
        if not all(process.is_alive() for process, _ in self._workers):
            self.close()
        self._start(ranks)
        self._cases += 1
        store = str(Path(self._folder.name) / f"case{self._cases}")
        for rank in range(ranks):
            self._workers[rank][1].send((function, arguments, rank, ranks, store))
        results, failures, begin = [], [], time.monotonic()
        waiting = set(range(ranks))
        while waiting and not failures and time.monotonic() - begin < LIMIT * slowdown():
            for rank in sorted(waiting):
                process, connection = self._workers[rank]
                if connection.poll(0.02) or not process.is_alive():
                    waiting.discard(rank)
                    try:
                        ok, value = connection.recv()
                    except EOFError:
                        ok, value = False, f"the process ended with exit code {process.exitcode}."
                    (results if ok else failures).append((rank, value))
        if waiting or failures:
            self.close()  # other ranks wait for this one
            if not failures:
                raise TimeoutError(f"{function}: ranks {sorted(waiting)} hang after {LIMIT:g} s.")
            raise AssertionError(f"{function}, rank {failures[0][0]}:\n{failures[0][1]}")
        return [value for _, value in sorted(results, key=lambda result: result[0])]

    def _start(self, ranks):
        context = multiprocessing.get_context("forkserver")  # one import for all ranks
        context.set_forkserver_preload(PRELOAD)
        new = []
        for _ in range(len(self._workers), ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            new.append((process, here))
        for _, connection in new:
            connection.recv()  # the imports are done
        self._workers += new

    def close(self):
        """End all processes. The next case starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(connection):
    """Run cases until the pool closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    importlib.import_module("distributed.features")  # and with it transformers and torchrl
    connection.send("ready")
    while True:
        try:
            function, arguments, rank, ranks, store = connection.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        try:
            module, _, name = function.partition(":")
            answer = True, getattr(importlib.import_module(module), name)(**arguments)
            dist.barrier()
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
        if answer[0]:
            dist.destroy_process_group()
