"""Print docs/formats.md's table: bytes of a unit (one block of one KV head in one layer) in every format."""

import argparse

from kvreclaim.ops.formats import FORMATS

COLUMNS = ("bf16", "int8", "int4", "kivi4", "turboquant4")
ROWS = {"D 32": (32, 32), "D 64": (64, 64), "D 128": (128, 128), "MLA 64 + 512": (64, 512)}


def lines(block_size: int) -> list[str]:
    """One line for each head dim; times: tokens that fit where one fits in bf16."""
    head = (f"unit, S = {block_size}", "bf16", "int8, fp8_e4m3", *COLUMNS[2:])
    made = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, dims in ROWS.items():
        base, *sizes = (FORMATS[column].unit_bytes(*dims, block_size) for column in COLUMNS)
        cells = [str(base), *(f"{size} ({base / size:.3f} ×)" for size in sizes)]
        made.append(f"| {name} | {' | '.join(cells)} |")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=16)
    print("\n".join(lines(parser.parse_args().block_size)))


if __name__ == "__main__":
    main()
