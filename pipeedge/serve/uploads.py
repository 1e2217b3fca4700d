"""Files in requests: those of a form, and data URLs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt

__all__ = ["decode_data_url", "files_of_form"]

_DATA_URL = "data:"
_MOST_FILES = 64


class _FormParser(MultiPartParser):
    """A parser of forms that refuses one without an end, whose last files would be missing or cut off."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers, self._to_the_end(stream), max_files=_MOST_FILES, max_fields=_MOST_FILES)
        self._has_ended = False

    def on_end(self) -> None:
        self._has_ended = True

    async def _to_the_end(self, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async for chunk in stream:
            yield chunk
        if not self._has_ended:
            raise MultiPartException("it is cut off before its closing boundary")


async def files_of_form(request: Request) -> list[bytes]:
    """Return the files of a form.

    Raises:
        InputError: It is not one, is cut off, or has a field that is no file.
    """
    try:
        async with aclosing(request.stream()) as stream:
            form = await _FormParser(request.headers, stream).parse()
    except MultiPartException as error:
        raise InputError(f"the form cannot be read: {excerpt(error.message, 200)}") from None
    try:
        fields = [name for name, one in form.multi_items() if not isinstance(one, UploadFile)]
        if fields:
            raise InputError(
                f"the form has a field {excerpt(fields[0])}, which is no file: send images as files, and the "
                "number of classes as ?top=N"
            )
        return [await one.read() for _, one in form.multi_items() if isinstance(one, UploadFile)]
    finally:
        await form.close()


def decode_data_url(text: str, source: str) -> bytes:
    """Return the bytes of a data URL, or of base64 alone.

    Raises:
        InputError: It is neither.
    """
    encoded = text
    if text.startswith(_DATA_URL):
        head, comma, encoded = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InputError(f"{source}: a data URL must be data:image/...;base64,...")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{source}: is neither a data URL nor base64") from None
