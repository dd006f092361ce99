"""`make dist`: the sdist, the wheels and their bill of materials, each tried where there is no compiler.

Nothing is published. Ends with a table, and with 1 if anything in it failed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import arm
from bill import NAME, bill_of_environment, bill_of_wheel
from repack import add_to_wheel, read_wheel
from source import ROOT, Source, export, make_sdist
from tries import Outcome, make_place, try_demo, try_policy, try_serving, try_version
from wheels import MACHINES, Toolchain, audit, build_kernels, build_wheel, run_kernel_tests

BUILD = ROOT / "build" / "release"
OUT = ROOT / "dist"
STABLE_FROM = (3, 12)
"""From this Python on one wheel serves all: nanobind's stable ABI."""


@dataclass
class Release:
    """A release under way, and what has come of it so far."""

    source: Source
    torch: str
    outcomes: list[Outcome]

    def note(self, artefact: str, backend: str, what: str, action: Callable[[], object]) -> None:
        """Do it and write down how it went; a failure is a row of the table, and the next thing is tried."""
        name, tag = _split(artefact)
        print(f"{artefact}: {what}", flush=True)
        try:
            action()
            result = "passed"
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            result = "FAILED"
        self.outcomes.append(Outcome(name, tag, backend, what, result))

    def skip(self, artefact: str, what: str, reason: str) -> None:
        name, tag = _split(artefact)
        self.outcomes.append(Outcome(name, tag, "-", what, reason))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch", default="torch", help="what pip is asked for before an artefact is installed"
    )
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--no-try", action="store_true", help="build and check only")
    options = parser.parse_args()
    for folder in (BUILD, OUT):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    release = Release(export(BUILD / "kvreclaim"), options.torch, [])
    pythons = find_pythons()
    sdist = make_sdist(release.source, OUT, Path(sys.executable))
    for machine in options.machines.split(","):
        build_machine(release, machine, sdist, pythons)
    artefacts = [sdist, *sorted(OUT.glob("*.whl"))]
    release.note("all", "-", "metadata (twine check)", lambda: _check_metadata(artefacts))
    if not options.no_try:
        try_all(release, sdist, pythons)
    return report(release.outcomes)


def find_pythons() -> list[Path]:
    """The Python that runs this, and the first newer one at hand for the wheel of the stable ABI."""
    own = Path(sys.executable)
    named = [shutil.which(f"python3.{minor}") for minor in range(STABLE_FROM[1], 20)]
    kept = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    for candidate in [*(Path(one) for one in named if one), *kept]:
        code = f"import sys; sys.exit(sys.version_info[:2] < {STABLE_FROM})"
        if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
            return [own, candidate] if sys.version_info[:2] < STABLE_FROM else [own]
    return [own]


def build_machine(release: Release, machine: str, sdist: Path, pythons: list[Path]) -> None:
    """One machine's kernels, their tests where they run, and a wheel for each Python."""
    tools = Toolchain(machine, BUILD / "tools" / machine)
    print(f"{machine}: kernels, by zig's clang", flush=True)
    kernels = build_kernels(release.source, tools, BUILD / "kernels" / machine)
    wheels = []
    for number, python in enumerate(pythons):
        folder = BUILD / "wheels" / machine / str(number)
        folder.mkdir(parents=True)
        print(f"{machine}: wheel for {python}", flush=True)
        raw = build_wheel(sdist, release.source, tools, kernels, python, folder)
        wheel = audit(raw, machine, OUT, set(OUT.glob("*.whl")))
        bill = bill_of_wheel(read_wheel(wheel), release.source.version, release.source.epoch)
        add_to_wheel(wheel, {NAME: bill}, release.source.epoch)
        wheels.append(wheel)
    if len(pythons) == 1 and sys.version_info[:2] < STABLE_FROM:
        release.skip(f"kvreclaim-abi3-{machine}", "build", "not built: no Python of 3.12 or newer here")
    if machine == "x86_64":
        release.note(
            f"kernels-{machine}",
            "all of this CPU",
            "the kernels' own tests",
            lambda: run_kernel_tests(kernels),
        )
    elif (reason := arm.why_not()) is not None:
        release.skip(wheels[0].name, "kernels' tests, module", reason)
    else:
        system = arm.make_system(ROOT / ".dist-env" / "arm64")
        tests = kernels / "kvr_tests"
        release.note(
            f"kernels-{machine}", "baseline", "own tests, qemu", lambda: arm.try_kernels(system, tests)
        )
        release.note(
            wheels[0].name, "baseline", "module loads, qemu", lambda: arm.try_module(system, wheels[0])
        )
        release.skip(wheels[0].name, "demo, serving", "not tried: torch for aarch64 does not start in qemu")


def try_all(release: Release, sdist: Path, pythons: list[Path]) -> None:
    """The sdist and each x86-64 wheel in an environment of its own; the first one is in the bill."""
    wheels = sorted(OUT.glob("*x86_64.whl"))
    for python, wheel in zip(pythons, wheels, strict=True):
        place = try_artefact(release, wheel, python, has_kernels=True)
        if wheel is wheels[0] and place is not None:
            bill = read_wheel(wheel)[f"kvreclaim-{release.source.version}.dist-info/{NAME}"]
            (OUT / f"kvreclaim-{release.source.version}.cdx.json").write_bytes(
                bill_of_environment(bill, place)
            )
    try_artefact(release, sdist, pythons[0], has_kernels=False)


def try_artefact(release: Release, artefact: Path, python: Path, has_kernels: bool) -> Path | None:
    """Returns: the Python of the environment; None where it could not be installed."""
    folder = BUILD / "places" / artefact.name
    made = []
    what = "install, no compiler"
    release.note(
        artefact.name, "-", what, lambda: made.append(make_place(folder, python, release.torch, artefact))
    )
    if not made:
        return None
    (place,) = made
    told: list[str] = []
    release.note(artefact.name, "-", "--version", lambda: told.append(try_version(place, has_kernels)))
    backend = told[0] if told else "?"
    examples = release.source.folder / "examples"
    release.note(artefact.name, backend, "one request served", lambda: try_serving(place))
    release.note(artefact.name, backend, "a third party's policy", lambda: try_policy(place, examples))
    release.note(artefact.name, backend, "demo", lambda: try_demo(place))
    return place.python


def report(outcomes: list[Outcome]) -> int:
    rows = [("artefact", "tag", "back-end", "tried", "result")]
    rows += [(one.artefact, one.tag, one.backend, one.what, one.result) for one in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    print("", *lines, sep="\n")
    (OUT / "tried.txt").write_text("\n".join(lines) + "\n")
    return int(any(one.result == "FAILED" for one in outcomes))


def _check_metadata(artefacts: list[Path]) -> None:
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *artefacts], check=True)


def _split(artefact: str) -> tuple[str, str]:
    """A file's name without its tag, and the tag."""
    if not artefact.endswith(".whl"):
        return artefact, "-"
    name, release, *tag = artefact.removesuffix(".whl").split("-")
    return f"{name}-{release}.whl", "-".join(tag)


if __name__ == "__main__":
    sys.exit(main())
