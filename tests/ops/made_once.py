"""What one of pytest's workers makes for all of them."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made_once(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns, through JSON in a file. Of all workers, the first one calls it."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if not text:
            text = json.dumps(make())
            file.write(text)
    return json.loads(text)
