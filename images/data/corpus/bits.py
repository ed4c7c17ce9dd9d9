"""Two machine instructions that Numba has no name for: eight bytes from anywhere, and the lowest bit that is set."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def load64(typing_context: Any, data: Any, at: Any) -> Any:
    """The eight bytes of a uint8 array from `at` on, the first one lowest. Nothing is checked: at + 8 <= len(data)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(array.data, [arguments[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(typing_context: Any, value: Any) -> Any:
    """The number of the lowest bit that is set; 64 for 0."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), build
