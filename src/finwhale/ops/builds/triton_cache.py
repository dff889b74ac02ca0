"""Where Triton keeps what it compiles: a folder that may be moved, or copied into an image."""
# mypy: allow-subclassing-any

import json
import os
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):
    """Triton notes a kernel's files by their whole paths; here they lie beside that note."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths by name of the files that were noted as one group; None: there is no such note."""
        note = self.get_file(f"__grp__{filename}")
        names = json.loads(Path(note).read_text()).get("child_paths") if note is not None else None
        if names is None:
            return None
        found = {name: self.get_file(name) for name in names}
        return {name: path for name, path in found.items() if path is not None}


def keep_in(folder: str) -> None:
    """Let this process keep them there, and torch's own compiler look for them there."""
    knobs.cache.dir = os.environ["TRITON_CACHE_DIR"] = folder
    knobs.cache.manager_class = MovableCache
    # What only a reader of intermediate code needs would be read at each start.
    knobs.compilation.store_binary_only = True
