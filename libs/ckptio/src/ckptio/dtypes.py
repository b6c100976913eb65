"""Element types: their names in torch, their size, and their name in safetensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `name` is torch's, without the prefix. `stock` is the name in safetensors, None where that format has
    none. `stock_packing` is how many safetensors elements one of ours holds along the last dimension (packed
    fp4: 2).
    """

    name: str
    item_size_bytes: int
    stock: str | None = None
    stock_packing: int = 1


_ALL = (
    DType("bool", 1, "BOOL"),
    DType("uint8", 1, "U8"),
    DType("int8", 1, "I8"),
    DType("uint16", 2, "U16"),
    DType("int16", 2, "I16"),
    DType("uint32", 4, "U32"),
    DType("int32", 4, "I32"),
    DType("uint64", 8, "U64"),
    DType("int64", 8, "I64"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16"),
    DType("float32", 4, "F32"),
    DType("float64", 8, "F64"),
    DType("complex32", 4),
    DType("complex64", 8, "C64"),
    DType("complex128", 16),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, "F4", 2),
    *(DType(f"{sign}int{bits}", 1) for sign in ("", "u") for bits in range(1, 8)),
    *(DType(name, 1) for name in ("bits1x8", "bits2x4", "bits4x2", "bits8")),
    DType("bits16", 2),
)

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
DTYPES_BY_STOCK: dict[str, DType] = {dtype.stock: dtype for dtype in _ALL if dtype.stock is not None}
ITEM_SIZE_BYTES_MAX = max(dtype.item_size_bytes for dtype in _ALL)
