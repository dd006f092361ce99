#!/usr/bin/env bash
# try.sh PYTHON ARTEFACT EXAMPLES FOLDER BACKEND: install ARTEFACT where there is no compiler, and use it.
set -euo pipefail
python=$1 artefact=$(realpath "$2") examples=$3 folder=$4 backend=$5
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m venv "$folder/env"
cd "$folder"
bin=$folder/env/bin
# Only the environment's programs are on the path, so no compiler.
alone=(env -u CC -u CXX -u PYTHONPATH PATH="$bin" HOME="$folder" KVRECLAIM_HOME="$folder/home")

echo "== $(basename "$artefact")"
"${alone[@]}" "$bin/pip" install --quiet "$TORCH"
"${alone[@]}" "$bin/pip" install --quiet "$artefact"
"${alone[@]}" "$bin/kvreclaim" --version | tee version.txt
if grep -q "used on this CPU" version.txt; then used=native; else used=reference; fi
if [ $used != "$backend" ] || grep "commit: unknown" version.txt; then
  echo "kvreclaim --version: expected a commit and $backend kernels, got $used" >&2
  exit 1
fi

cp -r "$examples/third_party_policy" policy
"${alone[@]}" "$bin/pip" install --quiet --no-deps --no-build-isolation ./policy
"${alone[@]}" "$bin/python" policy/try_it.py

port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"${alone[@]}" "$bin/kvreclaim" serve --model demo --served-model-name demo --port "$port" > server.log 2>&1 &
server=$!
trap 'kill -9 $server 2>/dev/null || true' EXIT
curl --silent --fail-with-body --retry 300 --retry-delay 1 --retry-connrefused --json \
  '{"model": "demo", "prompt": "a b c d e f g h", "max_tokens": 8}' "http://127.0.0.1:$port/v1/completions"
echo
kill -TERM $server
wait $server || [ $? = 143 ]

"${alone[@]}" "$bin/kvreclaim" demo --json demo.json
