#!/usr/bin/env bash
# image.sh NAME:TAG: assembles the driver's image, and packages the chart. The cluster's
# registry gets both when the cluster starts.
set -euo pipefail
. "$(dirname "$0")/env.sh"
[ $# = 1 ] || fail "usage: image.sh NAME:TAG"
lock
root=$(readlink -f "$here/../../..")
mkdir -p "$cache/release" "$bin"
make --no-print-directory -C "$root" image IMAGE="$1" VERSION="${1##*:}"
cp "$root/bin/image.tar" "$cache/release/image.new"
mv "$cache/release/image.new" "$cache/release/image.tar"
cp "$root/bin/release" "$bin/release.new"
mv "$bin/release.new" "$bin/release"
echo "${1##*/}" >"$cache/release/name"
rm -f "$cache"/release/trivet-*.tgz
go -C "$root" tool -modfile=tools/go.mod helm package deploy/chart -d "$cache/release"
