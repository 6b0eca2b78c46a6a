"""Files of safetensors, written and read in the simplest way: all bytes at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
}


def write(file: Path, arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in arrays.items():
        array = np.asarray(array)
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": DTYPES[str(array.dtype)], "shape": list(array.shape), "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def parse(file: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata, and the arrays by their names."""
    content = file.read_bytes()
    base = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:base])
    metadata = header.pop("__metadata__", {})
    numpy = {
        name: np.dtype(getattr(ml_dtypes, text) if hasattr(ml_dtypes, text) else text)
        for text, name in DTYPES.items()
    }
    return metadata, {
        name: np.frombuffer(content[base:][slice(*of["data_offsets"])], numpy[of["dtype"]]).reshape(
            of["shape"]
        )
        for name, of in header.items()
    }
