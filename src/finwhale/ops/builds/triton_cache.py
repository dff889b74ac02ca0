"""Triton's cache of compiled kernels, in a folder that can be moved or copied into an image."""
# mypy: allow-subclassing-any

import json
import os
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from finwhale.ops.launch.streamed_loads import install_hook


class MovableCache(FileCacheManager):
    """Finds a kernel's files by name, because the group file lists them by absolute path."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a group's files, by name; None: the group does not exist."""
        group = self.get_file(f"__grp__{filename}")
        names = json.loads(Path(group).read_text()).get("child_paths") if group else None
        if names is None:
            return None
        found = {name: self.get_file(name) for name in names}
        return {name: path for name, path in found.items() if path is not None}


def use_folder(folder: str) -> None:
    """Make `folder` the cache of Triton in this process, and of torch's compiler."""
    knobs.cache.dir = os.environ["TRITON_CACHE_DIR"] = folder
    knobs.cache.manager_class = MovableCache
    # Do not store intermediate code, because each start would read it.
    knobs.compilation.store_binary_only = True
    # The hook is part of the kernels' keys, so all processes that share a cache need it.
    install_hook()
