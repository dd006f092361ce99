"""Bills of materials, CycloneDX 1.6: in each wheel of what it holds, beside it with what it runs on, too."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from contents import APACHE, COMPILED, PARTS, Part, part_of
from cyclonedx.exception import MissingOptionalDependencyException
from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

NAME = "sboms/kvreclaim.cdx.json"
"""Below a wheel's .dist-info, as PEP 770 has it."""


def bill_of_wheel(files: dict[str, bytes], release: str, epoch: str) -> bytes:
    """Everything in `files`, contents of a wheel by path: our code, each part by its files, what is linked.

    Raises: LookupError if a file belongs to no known part.
    """
    of: dict[str, list[str]] = {}
    for path in sorted(files):
        if (part := part_of(path)) is not None:
            of.setdefault(part.name, []).append(path)
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"kvreclaim {release} {sorted(files)}"))
    bom.metadata.timestamp = datetime.fromtimestamp(int(epoch), UTC)
    own = _component(Part("kvreclaim", "application", APACHE, "this project", version=release))
    bom.metadata.component = own
    parts = [(part, of[part.name]) for part in PARTS if part.name in of]
    if any("/_native" in path for path in files):
        own.properties.add(Property(name="kvreclaim:compiler", value=f"zig {version('ziglang')}"))
        parts += [(_dated(part), []) for part in COMPILED]
    children = [_component(part, [(path, files[path]) for path in paths]) for part, paths in parts]
    bom.components.update(children)
    bom.register_dependency(own, children)
    return _valid(JsonV1Dot6(bom).output_as_string(indent=1))


def bill_of_environment(wheel_bill: bytes, python: Path) -> bytes:
    """The wheel's bill and every distribution that is installed beside it, with versions and licences."""
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--spec-version",
        "1.6",
        "--output-reproducible",
    ]
    told = subprocess.run([*command, str(python)], check=True, capture_output=True, text=True).stdout
    installed = json.loads(told)
    bill = json.loads(wheel_bill)
    others = [one for one in installed["components"] if one["name"] != "kvreclaim"]
    kept = {one["bom-ref"] for one in others}
    bill["components"] += others
    (own,) = (one["bom-ref"] for one in installed["components"] if one["name"] == "kvreclaim")
    for entry in installed["dependencies"]:
        needs = [ref for ref in entry.get("dependsOn", ()) if ref in kept]
        if entry["ref"] == own:
            ours = next(
                one for one in bill["dependencies"] if one["ref"] == bill["metadata"]["component"]["bom-ref"]
            )
            ours["dependsOn"] = sorted([*ours["dependsOn"], *needs])
        elif entry["ref"] in kept:
            bill["dependencies"].append({"ref": entry["ref"], **({"dependsOn": needs} if needs else {})})
    return _valid(json.dumps(bill, indent=1))


def _component(part: Part, files: Iterable[tuple[str, bytes]] = ()) -> Component:
    purl = (
        PackageURL("pypi", None, part.name, part.version) if part.name in ("kvreclaim", "nanobind") else None
    )
    return Component(
        name=part.name,
        type=ComponentType(part.kind),
        version=part.version,
        bom_ref=part.name,
        purl=purl,
        description=part.source,
        licenses=[LicenseFactory().make_from_string(part.licence)],
        components=[_file(path, content, part.licence) for path, content in files],
    )


def _file(path: str, content: bytes, licence: str) -> Component:
    digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(content).hexdigest())
    licences = [LicenseFactory().make_from_string(licence)]
    return Component(name=path, type=ComponentType.FILE, bom_ref=path, hashes=[digest], licenses=licences)


def _dated(part: Part) -> Part:
    """With the version that this environment compiled."""
    source = {"nanobind": "nanobind", "libc++": "ziglang", "compiler-rt": "ziglang"}.get(part.name)
    return (
        part if source is None else Part(part.name, part.kind, part.licence, part.source, (), version(source))
    )


def _valid(text: str) -> bytes:
    """Raises: SystemExit if it does not keep to CycloneDX's schema."""
    try:
        wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    except MissingOptionalDependencyException as error:
        raise SystemExit(f"the bill cannot be checked: {error}") from error
    if wrong is not None:
        raise SystemExit(f"the bill does not keep to CycloneDX 1.6: {wrong}")
    return text.encode() + b"\n"
