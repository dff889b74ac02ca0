"""Lower bounds of dependencies that read what strangers send exclude known faults."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# The first versions without the faults that pyproject.toml names.
FIRST = {"starlette": (1, 3, 1), "python-multipart": (0, 0, 31), "h11": (0, 16)}


def test_floors() -> None:
    server = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["server"]
    floors = {}
    for line in server:
        found = re.fullmatch(r"([a-z0-9-]+)>=([0-9.]+)(,<[0-9.]+)?", line)
        assert found is not None, line
        floors[found[1]] = tuple(map(int, found[2].split(".")))
    for name, first in FIRST.items():
        assert floors[name] >= first, name
