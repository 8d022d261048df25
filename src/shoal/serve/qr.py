"""QR codes (ISO/IEC 18004): a text as a square of dark and light modules. Bytes only, versions 1 to 20, correction level M."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Square = list[list[bool]]

_CHECK_BYTES = (10, 16, 26, 18, 24, 16, 18, 22, 22, 26, 30, 22, 22, 24, 24, 28, 28, 26, 26, 26)
_BLOCKS = (1, 1, 1, 2, 2, 4, 4, 4, 5, 5, 5, 8, 9, 9, 10, 10, 11, 13, 14, 16)
"""By version: bytes of correction in each block, and blocks, at level M."""
_LEVEL = 0
"""How level M is written in the format."""
_MASKS: tuple[Callable[[int, int], bool], ...] = (
    lambda row, column: (row + column) % 2 == 0,
    lambda row, column: row % 2 == 0,
    lambda row, column: column % 3 == 0,
    lambda row, column: (row + column) % 3 == 0,
    lambda row, column: (row // 2 + column // 3) % 2 == 0,
    lambda row, column: row * column % 2 + row * column % 3 == 0,
    lambda row, column: (row * column % 2 + row * column % 3) % 2 == 0,
    lambda row, column: ((row + column) % 2 + row * column % 3) % 2 == 0,
)


def encode(text: str) -> Square | None:
    """The code of a text, dark modules as True; None where the text is too long."""
    content = text.encode("utf-8")
    version = next((one for one in range(1, len(_BLOCKS) + 1) if len(content) <= _capacity(one)), None)
    if version is None:
        return None
    bits = list(_bits(_with_correction(_padded(content, version), version)))
    made = [_Drawing(version).finished(bits, mask) for mask in range(8)]
    return min(made, key=_penalty)


def _modules(version: int) -> int:
    """Modules that carry data and correction."""
    count = (16 * version + 128) * version + 64
    if version >= 2:
        several = version // 7 + 2
        count -= (25 * several - 10) * several - 55
        if version >= 7:
            count -= 36
    return count


def _data_bytes(version: int) -> int:
    return _modules(version) // 8 - _CHECK_BYTES[version - 1] * _BLOCKS[version - 1]


def _length_bits(version: int) -> int:
    return 8 if version < 10 else 16


def _capacity(version: int) -> int:
    return (8 * _data_bytes(version) - 4 - _length_bits(version)) // 8


def _padded(content: bytes, version: int) -> list[int]:
    """Mode, length, content, and filling up to what the version holds."""
    size = _data_bytes(version)
    bits = f"{4:04b}{len(content):0{_length_bits(version)}b}" + "".join(f"{byte:08b}" for byte in content)
    bits += "0" * min(4, 8 * size - len(bits))
    bits += "0" * (-len(bits) % 8)
    data = [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
    return data + [(0xEC, 0x11)[number % 2] for number in range(size - len(data))]


# --- correction -------------------------------------------------------------------------------------------


def _with_correction(data: list[int], version: int) -> list[int]:
    """The bytes of all blocks in turn, then their correction likewise. Later blocks may be one byte longer."""
    count, checks = _BLOCKS[version - 1], _CHECK_BYTES[version - 1]
    short, longer = divmod(len(data), count)
    blocks, at = [], 0
    for number in range(count):
        size = short + (number >= count - longer)
        blocks.append(data[at : at + size])
        at += size
    corrections = [_remainder(block, _generator(checks)) for block in blocks]
    first = [block[at] for at in range(short + 1) for block in blocks if at < len(block)]
    return first + [one[at] for at in range(checks) for one in corrections]


def _times(left: int, right: int) -> int:
    """The product in GF(256) modulo x⁸ + x⁴ + x³ + x² + 1."""
    product = 0
    for place in range(7, -1, -1):
        product = product << 1 ^ (product >> 7) * 0x11D
        product ^= (right >> place & 1) * left
    return product


def _generator(degree: int) -> list[int]:
    """The coefficients of (x − 1)(x − 2)(x − 4) … without the leading one."""
    result, root = [0] * (degree - 1) + [1], 1
    for _ in range(degree):
        for at in range(degree):
            result[at] = _times(result[at], root)
            if at + 1 < degree:
                result[at] ^= result[at + 1]
        root = _times(root, 2)
    return result


def _remainder(data: list[int], generator: list[int]) -> list[int]:
    rest = [0] * len(generator)
    for byte in data:
        factor = byte ^ rest.pop(0)
        rest.append(0)
        rest = [one ^ _times(coefficient, factor) for one, coefficient in zip(rest, generator, strict=True)]
    return rest


def _bits(values: list[int]) -> Iterator[bool]:
    return (bool(value >> place & 1) for value in values for place in range(7, -1, -1))


# --- drawing ----------------------------------------------------------------------------------------------


class _Drawing:
    """The square of a version: first what every code of it has, then the data."""

    def __init__(self, version: int) -> None:
        self.version, self.size = version, 17 + 4 * version
        self.dark: Square = [[False] * self.size for _ in range(self.size)]
        self.fixed: Square = [[False] * self.size for _ in range(self.size)]
        for at in range(self.size):
            self._set(6, at, at % 2 == 0)
            self._set(at, 6, at % 2 == 0)
        for row, column in ((3, 3), (3, self.size - 4), (self.size - 4, 3)):
            self._draw_finder(row, column)
        self._draw_alignments()
        self._draw_format(0)
        self._draw_version()

    def _set(self, row: int, column: int, dark: bool) -> None:
        self.dark[row][column], self.fixed[row][column] = dark, True

    def _draw_finder(self, row: int, column: int) -> None:
        for y in range(max(0, row - 4), min(self.size, row + 5)):
            for x in range(max(0, column - 4), min(self.size, column + 5)):
                self._set(y, x, max(abs(y - row), abs(x - column)) not in (2, 4))

    def _draw_alignments(self) -> None:
        places = _alignments(self.version)
        corners = {(0, 0), (0, len(places) - 1), (len(places) - 1, 0)}
        for i, row in enumerate(places):
            for j, column in enumerate(places):
                if (i, j) not in corners:
                    for y in range(-2, 3):
                        for x in range(-2, 3):
                            self._set(row + y, column + x, max(abs(y), abs(x)) != 1)

    def _draw_format(self, mask: int) -> None:
        data = _LEVEL << 3 | mask
        bits = (data << 10 | _rest(data, 10, 0x537)) ^ 0x5412
        one = [bool(bits >> place & 1) for place in range(15)]
        for place, (row, column) in enumerate([*((at, 8) for at in (0, 1, 2, 3, 4, 5, 7, 8)), *((8, at) for at in (7, 5, 4, 3, 2, 1, 0))]):
            self._set(row, column, one[place])
        for place in range(8):
            self._set(8, self.size - 1 - place, one[place])
        for place in range(8, 15):
            self._set(self.size - 15 + place, 8, one[place])
        self._set(self.size - 8, 8, True)

    def _draw_version(self) -> None:
        if self.version < 7:
            return
        bits = self.version << 12 | _rest(self.version, 12, 0x1F25)
        for place in range(18):
            far, near = self.size - 11 + place % 3, place // 3
            self._set(far, near, bool(bits >> place & 1))
            self._set(near, far, bool(bits >> place & 1))

    def finished(self, bits: list[bool], mask: int) -> Square:
        self._draw_format(mask)
        for (row, column), bit in zip(self._way(), bits + [False] * 7, strict=False):
            self.dark[row][column] = bit != _MASKS[mask](row, column)
        return self.dark

    def _way(self) -> Iterator[tuple[int, int]]:
        """The modules for data, in order: up and down in pairs of columns, from the right."""
        up = True
        for right in range(self.size - 1, 0, -2):
            right -= right <= 6
            for row in range(self.size - 1, -1, -1) if up else range(self.size):
                for column in (right, right - 1):
                    if not self.fixed[row][column]:
                        yield row, column
            up = not up


def _alignments(version: int) -> list[int]:
    if version == 1:
        return []
    count = version // 7 + 2
    step = (version * 8 + count * 3 + 5) // (count * 4 - 4) * 2
    return [6, *reversed([version * 4 + 10 - at * step for at in range(count - 1)])]


def _rest(value: int, bits: int, divisor: int) -> int:
    rest = value
    for _ in range(bits):
        rest = rest << 1 ^ (rest >> (bits - 1)) * divisor
    return rest


def _penalty(square: Square) -> int:
    """How hard a code is to read: long runs, blocks, what looks like a finder, and an uneven number of dark modules."""
    lines = [*square, *map(list, zip(*square, strict=True))]
    text = ["".join("1" if dark else "0" for dark in line) for line in lines]
    runs = sum(len(run) - 2 for line in text for run in line.replace("01", "0 1").replace("10", "1 0").split() if len(run) >= 5)
    finders = sum(line[at : at + 11] in ("10111010000", "00001011101") for line in text for at in range(len(line) - 10))
    size = len(square)
    pairs = ((square[y][x : x + 2], square[y + 1][x : x + 2]) for y in range(size - 1) for x in range(size - 1))
    blocks = sum(above == below and above[0] == above[1] for above, below in pairs)
    share = sum(map(sum, square)) * 20 / size**2
    return runs + 40 * finders + 3 * blocks + 10 * int(abs(share - 10))
