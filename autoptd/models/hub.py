"""Models by their id on the Hugging Face Hub, such as `org/name`, from files that are in the local cache.

    $HF_HOME/hub/models--org--name/refs/main                  text: a revision
    $HF_HOME/hub/models--org--name/snapshots/<revision>/…     the files of it

The id may name a revision: `org/name@v2`. Nothing is downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from autoptd.errors import ModelError

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9._-]{{1,128}}))?")


def is_hub_id(name: str) -> bool:
    """Return whether a text has the form of a Hub id. Files, and a folder of that name, count first."""
    return _ID.fullmatch(name) is not None and not name.endswith((".json", ".py")) and not Path(name).exists()


def hub_name(name: str) -> str:
    """Return the part of a Hub id that names the model."""
    return name.partition("@")[0].rpartition("/")[2]


def cached_folder(name: str, file: str = "config.json") -> Path:
    """Return the cached folder of a Hub id. Raises ModelError, with the command to download it, without that file."""
    found = _ID.fullmatch(name)
    assert found is not None
    repository, revision = found[1], found[2]
    command = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    try:
        from huggingface_hub import constants, try_to_load_from_cache
    except ImportError as error:
        fix = "install it: pip install 'autoptd[hf]'; or give a folder with config.json"
        raise ModelError(f"{name} is an id of the Hugging Face Hub, which needs huggingface_hub", fix=fix) from error
    cached = try_to_load_from_cache(repository, file, revision=revision)
    if not isinstance(cached, str):
        raise ModelError(
            f"{file} of {name!r} is not in the local cache of the Hugging Face Hub, and autoptd downloads nothing",
            where=constants.HF_HUB_CACHE,
            fix=f"download it once: {command}" + (f" {file}" if file.endswith("config.json") else ""),
        )
    return Path(cached).parent
