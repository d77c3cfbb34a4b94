#!/usr/bin/env bash
# make_env.sh FOLDER: an environment with SGLang on a CPU torch, this checkout in it (editable), and older SGLang
# releases beside it. FOLDER/freeze-before.txt and freeze-after.txt say what installing hicache-obs changed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
python=${PYTHON:-python3}
older=(0.5.14 0.5.18 0.5.20 0.5.22)

rm -rf "$folder"
mkdir -p "$folder"
"$python" -m venv "$folder/venv"
# Not compiled: most of these 3 GB is never imported, and compiling them takes longer than unpacking them.
pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)

# The older releases into folders of their own, meanwhile; and what those up to 0.5.20 want in other versions.
{
  for version in "${older[@]}"; do
    "${pip[@]}" --no-deps --target "$folder/sglang-$version" "sglang==$version"
  done
  "${pip[@]}" --no-deps --target "$folder/older" -r tests_sglang/requirements-older.txt
} &
beside=$!
trap 'kill "$beside" 2>/dev/null || true' EXIT

"${pip[@]}" torch==2.13.0 -r tests_sglang/requirements.txt
# Without what they depend on: torchvision alone would bring another torch, with CUDA and 4 GB of it.
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.9.0

"$folder/venv/bin/python" -m pip freeze --exclude hicache-obs >"$folder/freeze-before.txt"
# Not while .venv is being built: both write hicache_obs.egg-info.
flock .venv.lock "${pip[@]}" -e .
"$folder/venv/bin/python" -m pip freeze --exclude hicache-obs >"$folder/freeze-after.txt"
wait "$beside"
trap - EXIT
touch "$folder/.complete"
