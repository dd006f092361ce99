"""Files added to a wheel, and its archive written so that equal contents give equal bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import time
import zipfile
from pathlib import Path


def read_wheel(wheel: Path) -> dict[str, bytes]:
    """What is in it, by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def add_to_wheel(wheel: Path, added: dict[str, bytes], epoch: str) -> None:
    """Rewrite `wheel` with `added`, files of its .dist-info by their path below it, and a RECORD of all."""
    files = read_wheel(wheel)
    info = dist_info(files)
    files |= {f"{info}/{name}": content for name, content in added.items()}
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    with zipfile.ZipFile(wheel) as archive:
        modes = {entry.filename: entry.external_attr for entry in archive.infolist()}
    moment = time.gmtime(max(int(epoch), 315532800))[:6]  # zip begins in 1980
    # The .dist-info comes last, as the format of wheels recommends.
    order = sorted(files, key=lambda name: (name.startswith(f"{info}/"), name))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in order:
            entry = zipfile.ZipInfo(name, moment)
            entry.external_attr = modes.get(name, 0o644 << 16)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])


def dist_info(files: dict[str, bytes]) -> str:
    (name,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    return name


def _record(files: dict[str, bytes], own: str) -> bytes:
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name in sorted(files.keys() - {own}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(files[name])))
    writer.writerow((own, "", ""))
    return rows.getvalue().encode()
