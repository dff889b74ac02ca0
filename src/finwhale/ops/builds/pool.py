"""Worker processes that compile kernels, one job at a time each."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

Answer = dict[str, Any]

MAX_WORKERS = 16
TIMEOUT_S = 900
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import runpy; "


class Pool:
    """Worker processes that run the same module.

    Args:
        module: reads one line of JSON from stdin for each job, and answers with one line on stdout.
        first: the first line that each worker reads.
        size: number of workers.
    """

    def __init__(self, module: str, first: Mapping[str, Any], size: int) -> None:
        # multiprocessing would run the user's main module again, so start the interpreter directly.
        command = [
            sys.executable,
            "-c",
            _MAIN + f"runpy.run_module({module!r}, run_name='__main__')",
            json.dumps(sys.path),
        ]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(max(1, size))
        ]
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(dict(first)) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                logger.warning("a compiler process ended at once (exit code %s)", process.poll())

    def start(self, jobs: Iterable[Mapping[str, Any]]) -> Callable[[], list[Answer]]:
        """Start all jobs.

        Returns:
            A function that waits for the jobs, ends the workers and returns the jobs' answers. The
            answer of a failed job has the key "error".
        """
        waiting: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        for job in jobs:
            waiting.put(job)
        answers: list[Answer] = []
        threads = [
            threading.Thread(target=self._feed, args=(process, waiting, answers), daemon=True)
            for process in self._processes
        ]
        for thread in threads:
            thread.start()

        def finish() -> list[Answer]:
            end = time.monotonic() + TIMEOUT_S
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            if any(thread.is_alive() for thread in threads):
                answers.append({"error": f"compilation took longer than {TIMEOUT_S} s"})
            self.close()
            for _ in range(waiting.qsize()):
                answers.append({"error": "all compiler processes had ended"})
            return answers

        return finish

    @staticmethod
    def _feed(
        process: "subprocess.Popen[str]",
        waiting: "SimpleQueue[Mapping[str, Any]]",
        answers: list[Answer],
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        while True:
            try:
                job = waiting.get_nowait()
            except Empty:
                return
            try:
                process.stdin.write(json.dumps(dict(job)) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            if not line:
                answers.append({"error": f"a compiler process ended (exit code {process.poll()})"})
                return
            answers.append(json.loads(line))
            logger.debug("%s: %s", job, answers[-1])

    def close(self) -> None:
        """End the workers; their current jobs are lost."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def serve_jobs(begin: Callable[[dict[str, Any]], Callable[[dict[str, Any]], Answer]]) -> None:
    """The main function of a worker's module: answer each job until stdin ends.

    Args:
        begin: gets the first line; returns a function that answers a job.
    """
    # Compilers print to stdout. Redirect that to stderr: the pipe must have only answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        work = begin(json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            start = time.perf_counter()
            try:
                answer = work(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
            answer["seconds"] = round(time.perf_counter() - start, 3)
            print(json.dumps(answer), file=answers, flush=True)
    except BrokenPipeError:
        os._exit(1)  # The parent process has ended.
