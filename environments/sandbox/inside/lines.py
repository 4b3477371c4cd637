"""JSON for the server's pipe, without the package `json`: that loads regular expressions, which take as long as all
other parts of a start.

The package's own parts in C do the work. They are no public interface: where they are missing or behave otherwise, the
package is loaded."""

from __future__ import annotations

__all__ = ["decode", "encode"]

SAMPLE = '{"a": [1, -2.5, true, null, "\\u00e9\\n\\"", {}]}'


class _Settings:
    """What the scanner asks for."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int = True, None, None, float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


def _load_c_codec():
    import _json  # pyright: ignore[reportMissingImports]

    scan = _json.make_scanner(_Settings)  # pyright: ignore[reportArgumentType]
    make = _json.make_encoder(
        None,
        None,  # pyright: ignore[reportArgumentType]
        _json.encode_basestring_ascii,
        None,
        ": ",
        ", ",
        False,
        False,
        True,
    )

    def decode(text: str) -> object:
        try:
            value, end = scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):
            raise ValueError("this is no JSON")
        return value

    def encode(value: object) -> str:
        return "".join(make(value, 0))

    if encode(decode(SAMPLE)) != SAMPLE:
        raise ValueError("the parts in C write other JSON than the package")
    return decode, encode


try:
    decode, encode = _load_c_codec()
except (ImportError, AttributeError, TypeError, ValueError):
    from json import dumps as encode
    from json import loads as decode
