"""A process knows when it began."""

import subprocess
import sys
import time

CODE = """
import time
time.sleep(0.5)
from finwhale.engine.start.start_times import process_start
print(process_start())
"""


def test_the_process_s_start_time_lies_before_its_first_line() -> None:
    """The clock counts from the machine's start; the system tells a start in hundredths."""
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    after = time.monotonic()
    assert before - 0.05 <= float(done.stdout) <= after - 0.5 + 0.05
