"""Finds the directory of a checkpoint, given a path or the id of a repository."""

import importlib
import re
from pathlib import Path

from finwhale.demo import DEMO_PATH, EMBEDDED
from finwhale.errors import FinwhaleError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def checkpoint_directory(path: str | Path | None, revision: str | None = None) -> Path:
    """The directory of a checkpoint. Downloads a repository that is not in the cache.

    Args:
        path: a directory, or the id of a repository on the Hugging Face Hub, such as
            "deepseek-ai/DeepSeek-V4-Flash"; "demo-dspark", "demo-v41": an embedded model,
            unless a directory has this name; None: the embedded model with its MTP layer.
        revision: branch, tag or commit of the repository; None: its main branch.

    Returns:
        The directory. It does not exist if `path` is neither a directory nor a repository id.

    Raises:
        CheckpointError, ResourceError: as `hub.download` does.
        FinwhaleError: the extra `hub` is not installed, or a directory has no revisions.
    """
    if path is None or Path(path).exists() or not _REPOSITORY.fullmatch(str(path)):
        if revision is not None:
            raise FinwhaleError(f"revision {revision}: only a repository has revisions")
        if is_demo(path):
            return DEMO_PATH if path is None else EMBEDDED[str(path)]
        assert path is not None
        return Path(path).expanduser()
    try:
        hub = importlib.import_module("finwhale.checkpoint.hub")
    except ModuleNotFoundError as error:
        raise FinwhaleError(
            f"there is no directory {path}, and downloading the repository of that name needs "
            f"{error.name}: pip install 'finwhale[hub]'"
        ) from error
    directory: Path = hub.download(str(path), revision)
    return directory


def is_demo(path: str | Path | None) -> bool:
    """Whether a path names an embedded model."""
    return path is None or (str(path) in EMBEDDED and not Path(path).exists())
