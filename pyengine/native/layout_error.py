"""What a ms_*_check function found wrong with a shared object, as a sentence."""

from __future__ import annotations

import errno

from pyengine.errors import EngineUnavailableError


def raise_layout_error(what: str, code: int) -> None:
    """EngineUnavailableError that names `what`, for the answer of a ms_*_check function; nothing for 0."""
    if code == -errno.EPROTO:
        raise EngineUnavailableError(f"{what}: not published yet, or not ours (wrong magic)")
    if code == -errno.EBADMSG:
        raise EngineUnavailableError(f"{what}: another layout than this version's: use the version of the running engine")
    if code:
        raise EngineUnavailableError(f"{what}: too short")
