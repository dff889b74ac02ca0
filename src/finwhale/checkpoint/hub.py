"""Downloads a repository of the Hugging Face Hub; needs the extra `hub`.

The package huggingface_hub does the work, with its cache, progress bars and environment variables
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). An interrupted download keeps its complete files.
"""

import errno
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from finwhale.errors import CheckpointError, ResourceError, first_line
from finwhale.extras import named_extras
from finwhale.platform import existing_folder

with named_extras():
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

# The files that loading, chatting and `finwhale inspect` read.
PATTERNS = ["*.json", "*.safetensors", "encoding/*"]


class _NoBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})


def download(repository: str, revision: str | None) -> Path:
    """Download a repository unless the cache has it; returns the directory of its files.

    Args:
        revision: branch, tag or commit; None: the main branch.

    Raises:
        CheckpointError: there is no such repository or revision, or its terms are not accepted.
        ResourceError: the disk is too small, or the repository cannot be reached and is not in the
            cache.
    """
    name = repository if revision is None else f"{repository} at revision {revision}"
    try:
        if not hub.is_offline_mode():
            _check_space(repository, revision)
        return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=PATTERNS))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repository} is gated: accept its terms on its page, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no checkpoint {repository}: there is no such directory, and no such repository that "
            "is public (for a private one, set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if hub.is_offline_mode() else first_line(error.__cause__)
        raise ResourceError(
            f"the cache {constants.HF_HUB_CACHE} lacks files of {name}, which cannot be "
            f"downloaded: {reason}"
        ) from error
    except Exception as error:  # The package's HTTP and storage errors have no common base class.
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ResourceError(f"no space is left in {constants.HF_HUB_CACHE}") from error
        raise ResourceError(f"cannot download {name}: {first_line(error)}") from error


def _check_space(repository: str, revision: str | None) -> None:
    """Raise ResourceError if the missing files do not fit on the disk."""
    try:
        files = hub.snapshot_download(
            repository, revision=revision, allow_patterns=PATTERNS, dry_run=True, tqdm_class=_NoBar
        )
    except errors.DryRunError:
        return  # The repository cannot be reached. The cache may have it.
    needed = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE).absolute()
    free = shutil.disk_usage(existing_folder(cache)).free
    if needed > free:
        raise ResourceError(
            f"{repository} needs {needed / 1e9:,.1f} GB in {cache}, which has {free / 1e9:,.1f} GB "
            "free: make room, or set HF_HOME to a directory of a larger disk"
        )
