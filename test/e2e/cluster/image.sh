#!/usr/bin/env bash
# image.sh NAME:TAG: assembles the driver's image into an archive. The nodes of a cluster
# import the archive when they start.
set -euo pipefail
. "$(dirname "$0")/env.sh"
[ $# = 1 ] || fail "usage: image.sh NAME:TAG"
lock
mkdir -p "$images"
make --no-print-directory -C "$here/../../.." image IMAGE="$1" VERSION="${1##*:}"
cp "$here/../../../bin/image.tar" "$images/driver.new"
mv "$images/driver.new" "$images/driver.tar"
