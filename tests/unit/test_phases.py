"""The phases of a start add up to it."""

import subprocess
import sys
import time

from finwhale.engine.phases import Phases, process_start, table, whole_start


def test_phases_follow_each_other() -> None:
    begin = time.monotonic()
    phases = Phases()
    time.sleep(0.02)
    phases.end("weights")
    phases.end("kernels")
    time.sleep(0.02)
    phases.end("weights")
    spent = time.monotonic() - begin
    assert list(phases.seconds) == ["weights", "kernels"]
    assert 0.04 <= phases.seconds["weights"] <= spent
    assert sum(phases.seconds.values()) <= spent


def test_a_whole_start_has_what_else_passed() -> None:
    began = time.monotonic() - 2
    found = whole_start({"weights": 0.5}, began)
    assert list(found) == ["import", "weights", "rest"]
    assert 1.5 <= found["rest"] < 2
    total = time.monotonic() - process_start()
    assert abs(sum(found.values()) - total) < 0.5
    assert table({"a": 1.0, "b": 0.25}) == "a 1.0 s, b 0.2 s, total 1.2 s"


def test_a_process_knows_when_it_began() -> None:
    code = (
        "import time; time.sleep(0.5)\n"
        "from finwhale.engine.phases import process_start\n"
        "print(time.monotonic() - process_start())"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) + 0.02 <= time.monotonic() - begin + 0.05
