"""A prefix store whose server is killed."""

import subprocess
import sys
import time
from pathlib import Path

from tests.unit.test_directory_store import content, get, open_store, record

WRITE = """
import sys
from pathlib import Path
from tests.unit.test_directory_store import content, open_store, put, record
store = open_store(Path(sys.argv[1]))
for number in range(10**6):
    put(store, record(number), content(number, 20_000))
"""


def test_a_killed_server_loses_no_finished_record(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path)])
    while not list((tmp_path / "store").rglob("*.block")):
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(0.1)
    child.kill()
    child.wait()
    store = open_store(tmp_path)
    count = len(list((tmp_path / "store").rglob("*.block")))
    assert count > 1
    for number in range(count):
        assert get(store, record(number), 20_000) == content(number, 20_000)
