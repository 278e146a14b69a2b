"""config/*.json: fastjson text, whose integer keys stand without quotes (section 12).

Reading accepts both forms; writing gives strict JSON, which RocketMQ reads too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pyengine.errors import FormatError

# A string (left alone), or an unquoted integer key behind { or , and before a colon.
# What reading a document can end with that somebody made up: no JSON, other kinds of values, nesting or numbers without end.
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_STRING_OR_KEY = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)


def _quote_key(found: re.Match[str]) -> str:
    return found[0] if found[2] is None else f'{found[1]}"{found[2]}"'


def decode_config(text: str) -> Any:
    """The value of the text; every key comes as text. FormatError when it is not JSON."""
    try:
        return json.loads(_STRING_OR_KEY.sub(_quote_key, text))
    except (ValueError, RecursionError) as error:  # the latter: brackets nested without end
        raise FormatError(f"not the text of a config file: {error}") from error


def encode_config(value: Any) -> str:
    """Strict JSON, tab-indented like RocketMQ's own files, with a line end."""
    return json.dumps(value, indent="\t", ensure_ascii=False) + "\n"
