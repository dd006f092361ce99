#!/usr/bin/env bash
# `make dist`: the last commit as an sdist, wheels and a bill of materials in dist/, each artefact tried.
# make gives MACHINES, PYTHONS, TORCH (pip's requirement) and TRY (0: build and check only).
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD here=$PWD/scripts/release work=$PWD/build/release source=$PWD/build/release/kvreclaim
glibc=2.28
rm -rf "$work" dist
mkdir -p "$source" dist
commit=$(git rev-parse HEAD)
export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
tools=$root/.dist-env/bin
# The programs themselves: pip's isolated builds lose the scripts of their packages.
export PATH="$("$tools/python" -c 'import cmake, ninja; print(cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, sep=":")'):$tools:$PATH"
zig=$("$tools/python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')

git archive HEAD | tar -x -C "$source"
echo "{\"commit\": \"$commit\"}" > "$source/src/kvreclaim/build.json"
python -m build --sdist --outdir dist "$source" > /dev/null
sdist=$(echo dist/*.tar.gz)
python "$here/bill.py" wheel > "$work/kvreclaim.cdx.json"

for machine in $MACHINES; do
  # zig's clang is the C++ compiler of each machine. Kernels are compiled once for all of its wheels.
  folder=$work/$machine
  mkdir -p "$folder"
  defines=("CMAKE_SYSTEM_NAME=Linux" "CMAKE_SYSTEM_PROCESSOR=$machine")
  for tool in CXX_COMPILER=c++ AR=ar RANLIB=ranlib; do
    arguments=${tool#*=}
    [ "$arguments" != c++ ] || arguments="c++ -target $machine-linux-gnu.$glibc"
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$arguments" > "$folder/${tool#*=}"
    chmod +x "$folder/${tool#*=}"
    defines+=("CMAKE_${tool%=*}=$folder/${tool#*=}")
  done
  cmake -G Ninja -S "$source/csrc" -B "$folder/kernels" -DCMAKE_BUILD_TYPE=Release -DKVR_PYTHON=OFF -DKVR_TESTS=ON \
    "${defines[@]/#/-D}" > "$folder/kernels.log"
  cmake --build "$folder/kernels" >> "$folder/kernels.log"
  [ "$machine" != "$(uname -m)" ] || "$folder/kernels/kvr_tests"
  # nanobind's stable ABI names stderr without its header, which libc++ does not bring along. wheel.cmake=true: a
  # build without its kernels fails.
  defines+=("KVR_KERNELS=$folder/kernels/libkvr_kernels.a" "KVR_COMMIT=$commit"
    "CMAKE_CXX_FLAGS=-include stdio.h -ffile-prefix-map=$work=.")
  for python in $PYTHONS; do
    tag=$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
    _PYTHON_HOST_PLATFORM=linux-$machine SETUPTOOLS_EXT_SUFFIX=.cpython-$tag-$machine-linux-gnu.so \
      "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/$tag" "$sdist" \
      "${defines[@]/#/--config-settings=cmake.define.}" --config-settings=wheel.cmake=true
    python -m wheel unpack --dest "$folder/$tag" "$folder/$tag"/*.whl > "$folder/$tag.log"
    info=$(echo "$folder/$tag"/kvreclaim-*/*.dist-info)
    mkdir "$info/sboms"
    cp "$work/kvreclaim.cdx.json" "$info/sboms/"
    python -m wheel pack --dest-dir "$folder/$tag" "$folder/$tag"/kvreclaim-*/ >> "$folder/$tag.log"
    # Fails if a symbol is newer than the tag. libgomp is torch's. auditwheel knows the tags of its own machine only.
    platform=auto
    [ "$machine" != "$(uname -m)" ] || platform=manylinux_${glibc/./_}_$machine
    python -m auditwheel repair --plat "$platform" --only-plat --exclude libgomp.so.1 \
      --wheel-dir "$folder/$tag/repaired" "$folder/$tag"/*.whl
    cp "$folder/$tag"/repaired/*.whl dist/
  done
done
python -m twine check --strict dist/*

[ "$TRY" != 0 ] || exit 0
for python in $PYTHONS; do
  tag=$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
  "$here/try.sh" "$python" "$work/$(uname -m)/$tag"/repaired/*.whl "$source/examples" "$work/try/$tag" native
done
"$here/try.sh" "$python" "$sdist" "$source/examples" "$work/try/sdist" reference
# The environment of the newest Python's wheel.
python "$here/bill.py" environment "$work/try/$tag/env/bin/python" > "${sdist%.tar.gz}.cdx.json"
