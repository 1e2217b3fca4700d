"""The request for keys: which files make this process a member of a run, and encrypt what it sends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.request.declared import option, options_of
from pipeedge.request.parsing import path

__all__ = ["KeyRequest"]


@dataclass(frozen=True)
class KeyRequest:
    """Files with the key of a run. Without any, everything is sent in clear, and anybody can take part."""

    key: Path | None = option(
        None,
        "--key",
        type=path,
        variable="PIPEEDGE_KEY",
        help="encrypt everything, and accept only ranks with the same file, which {pipeedge-key} makes; "
        "- reads it from standard input",
    )
    certificate: Path | None = option(
        None,
        "--tls-cert",
        type=path,
        help="instead of --key: certificate of this rank, from a PKI of your own, as PEM",
    )
    private_key: Path | None = option(
        None, "--tls-key", type=path, help="private key of that certificate, as PEM"
    )
    authority: Path | None = option(
        None,
        "--tls-ca",
        type=path,
        help="CA that issued the certificates of all ranks, and no others, as PEM",
    )

    def __post_init__(self) -> None:
        files = {
            "--tls-cert": self.certificate,
            "--tls-key": self.private_key,
            "--tls-ca": self.authority,
        }
        missing = [option for option, file in files.items() if file is None]
        if self.key is not None and len(missing) < len(files):
            raise RequestError("give either --key (PIPEEDGE_KEY) or --tls-cert, --tls-key and --tls-ca")
        if 0 < len(missing) < len(files):
            raise RequestError(
                f"--tls-cert, --tls-key and --tls-ca belong together: give {' and '.join(missing)} too"
            )

    def arguments(self) -> tuple[str, ...]:
        """Return the options that give another program the same key."""
        return tuple(
            word
            for one in options_of(KeyRequest)
            if (file := getattr(self, one.field)) is not None
            for word in (one.flags[0], str(file))
        )

    @property
    def given(self) -> bool:
        """Whether there is a key, of either kind."""
        return self.key is not None or self.certificate is not None
