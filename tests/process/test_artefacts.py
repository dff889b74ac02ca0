"""The directory of compiled kernels, where a process that fills it dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from finwhale.artefacts import Artefacts

HOLD = """
import sys, time
from finwhale.artefacts import Artefacts
with Artefacts(sys.argv[1], {"device": "x"}).filling():
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_process_killed_while_it_fills_the_cache_blocks_no_other(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "in\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with Artefacts(tmp_path, {"device": "x"}).filling():
        pass
